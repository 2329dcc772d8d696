#include "lockstep/base/descriptor_mark.h"

#include <sys/stat.h>

#include <charconv>

namespace lockstep::internal {

std::string descriptor_mark(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return {};
  return std::to_string(fd) + ":" + std::to_string(status.st_ino);
}

std::optional<int> marked_descriptor(std::string_view mark, mode_t type) {
  const size_t colon = mark.find(':');
  if (colon == mark.npos) return std::nullopt;
  const auto number = [](std::string_view text, auto& value) {
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
  };
  int fd = -1;
  ino_t inode = 0;
  struct stat status {};
  if (!number(mark.substr(0, colon), fd) ||
      !number(mark.substr(colon + 1), inode) || ::fstat(fd, &status) != 0 ||
      (status.st_mode & S_IFMT) != type || status.st_ino != inode) {
    return std::nullopt;
  }
  return fd;
}

}  // namespace lockstep::internal
