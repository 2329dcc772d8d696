#pragma once

#include <string>

namespace lockstep::internal {

// A module is a part of Lockstep that links libraries which an installed
// Lockstep can do without. It is a shared object that is loaded when it is
// first needed and never unloaded.
//
// load_module() loads the module `name` ("c10d_store.so") and returns its
// symbol `symbol`. It looks for lib/lockstep/NAME in the folder of this program
// and in the two folders above, where the file must belong to this user, to
// root or to the owner of the program; then for NAME in the folder to which
// Lockstep's modules were to be installed. If LOCKSTEP_MODULE_PATH is set, it
// looks for NAME in that folder only. With `global`, the symbols of the
// libraries that the module links are visible to the libraries that these load
// later.
//
// Throws std::runtime_error with one line that names the file and what is
// missing. Any thread.
void* load_module(const std::string& name, const char* symbol,
                  bool global = false);

}  // namespace lockstep::internal
