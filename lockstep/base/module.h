#pragma once

#include <string>

namespace lockstep {

// A part of Lockstep that links libraries which an installed Lockstep can do
// without: a shared object that is loaded when it is first asked for, and
// stays.
//
// load_module() loads `name` ("c10d_store.so") and returns its symbol `symbol`.
// Looked for as lib/lockstep/NAME in the folder of this program and the two
// above it (there it must belong to this user, to root or to the owner of the
// program), then where Lockstep was to be installed; in LOCKSTEP_MODULE_PATH
// alone, where that is set. With `global`, symbols of what it links are visible
// to what those load in turn.
//
// Throws std::runtime_error of one line that names the file and what is
// missing. Any thread.
void* load_module(const std::string& name, const char* symbol,
                  bool global = false);

}  // namespace lockstep
