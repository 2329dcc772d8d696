#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

namespace lockstep::internal {

// Returns what names the file of `fd` to a process that inherits it, by the
// descriptor's number and the file's inode: "7:123456". So no other descriptor
// of that process is taken for it.
std::string descriptor_mark(int fd);
// Returns the descriptor that `mark` names, if this process has it and its file
// is of `type`: S_IFSOCK, S_IFREG.
std::optional<int> marked_descriptor(std::string_view mark, mode_t type);

}  // namespace lockstep::internal
