#include "lockstep/launch/spawn_report.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "lockstep/launch/process/child_process.h"

namespace lockstep::internal {
namespace {

struct Header {
  int64_t state;
  int64_t when;
};

}  // namespace

SpawnReport SpawnReport::create() {
  FileDescriptor fd(::memfd_create("lockstep-spawn-report", MFD_CLOEXEC));
  if (!fd) throw_errno("memfd_create of a spawned process's report");
  return SpawnReport(above_standard_streams(std::move(fd)));
}

SpawnReport SpawnReport::inherit(int fd, ino_t inode) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || status.st_ino != inode) {
    throw std::runtime_error(
        "spawn: this process was spawned, but has closed descriptor " +
        std::to_string(fd) +
        ", which carries its report; do not close what the program did not "
        "open");
  }
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return SpawnReport(FileDescriptor(fd));
}

ino_t SpawnReport::inode() const {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) {
    throw_errno("fstat of a spawned process's report");
  }
  return status.st_ino;
}

void SpawnReport::tell(State state, const std::string& text) const {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const Header header{static_cast<int64_t>(state),
                      std::chrono::nanoseconds(now).count()};
  // The state is written last: a reader that sees it also finds the text.
  [[maybe_unused]] ssize_t written =
      ::pwrite(fd_.get(), text.data(), std::min(text.size(), kLongestText),
               sizeof(header));
  written = ::pwrite(fd_.get(), &header, sizeof(header), 0);
}

SpawnReport::Told SpawnReport::told() const {
  Header header{};
  if (::pread(fd_.get(), &header, sizeof(header), 0) != sizeof(header)) {
    return {};
  }
  return {static_cast<State>(header.state),
          std::chrono::nanoseconds(header.when)};
}

std::string SpawnReport::text() const {
  std::string text(kLongestText, '\0');
  const ssize_t size =
      ::pread(fd_.get(), text.data(), text.size(), sizeof(Header));
  text.resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
  if (text.size() == kLongestText) text += " ...";
  return text;
}

}  // namespace lockstep::internal
