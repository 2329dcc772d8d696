#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// Returns where a program of libexec/lockstep lies, relative to the running
// `lockstep`, in a build or in an installation; nothing if it is missing.
std::optional<std::filesystem::path> find_libexec(const std::string& program);

// Replaces this process by a program of libexec/lockstep. `command` is what the
// user typed, for messages. Returns only if that fails, after writing
// why; the result is the exit code, as a shell's: 127 if there is no such
// program, otherwise 126.
int execute_libexec(const std::string& command, std::string program,
                    std::vector<std::string> arguments);

}  // namespace lockstep::internal
