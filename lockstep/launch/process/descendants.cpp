#include "lockstep/launch/process/descendants.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/system_file.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLastAllowance{5000};
// How often SIGKILL is repeated: a child that is adopted in between needs its
// own.
constexpr milliseconds kKillInterval{10};

// Returns field 4 of /proc/PID/stat; 0 if the process is gone. The name in
// field 2 may hold anything, parentheses too, so fields are counted from the
// last parenthesis.
pid_t parent_of(const char* pid) {
  const FileDescriptor file(::open(
      (std::string("/proc/") + pid + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 512> bytes;
  const ssize_t count =
      file ? ::read(file.get(), bytes.data(), bytes.size()) : -1;
  const std::string line(bytes.data(),
                         static_cast<size_t>(std::max<ssize_t>(0, count)));
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > line.size()) return 0;
  return static_cast<pid_t>(
      std::strtol(line.c_str() + name_end + 4, nullptr, 10));
}

// Sleeps until a child ends or `allowed` has passed.
void await_child(milliseconds allowed) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  const timespec time{allowed.count() / 1000,
                      (allowed.count() % 1000) * 1'000'000};
  sigtimedwait(&set, nullptr, &time);
}

std::vector<pid_t> children_but(const std::set<pid_t>& spared) {
  std::vector<pid_t> children = child_processes();
  std::erase_if(children, [&](pid_t pid) { return spared.contains(pid); });
  return children;
}

}  // namespace

void adopt_orphans() {
  if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
    throw_errno("PR_SET_CHILD_SUBREAPER");
  }
}

std::vector<pid_t> child_processes() {
  struct Closer {
    void operator()(DIR* directory) const { closedir(directory); }
  };
  const std::unique_ptr<DIR, Closer> proc(opendir("/proc"));
  std::vector<pid_t> children;
  if (!proc) return children;
  const pid_t self = getpid();
  while (const dirent* entry = readdir(proc.get())) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    if (parent_of(entry->d_name) == self) {
      children.push_back(
          static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10)));
    }
  }
  return children;
}

bool proc_is_mounted() { return ::access("/proc/self/stat", R_OK) == 0; }

std::vector<Leftover> leftovers(const std::set<pid_t>& spared) {
  std::vector<Leftover> all;
  for (const pid_t pid : children_but(spared)) {
    const std::string folder = "/proc/" + std::to_string(pid);
    const std::string ignored =
        field_of(folder + "/status", "SigIgn").value_or("");
    const uint64_t mask = std::strtoull(ignored.c_str(), nullptr, 16);
    all.push_back({.pid = pid,
                   .session = ::getsid(pid),
                   .name = first_line(folder + "/comm").value_or("?"),
                   .ignores_sigterm = (mask >> (SIGTERM - 1) & 1) != 0});
  }
  return all;
}

bool reap_children(const Reaped& reaped) {
  while (true) {
    int status = 0;
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid > 0) {
      reaped(pid, status);
    } else if (pid == 0) {
      return true;
    } else if (errno != EINTR) {
      return false;  // ECHILD
    }
  }
}

bool end_descendants(milliseconds grace, const Reaped& reaped,
                     const std::set<pid_t>& spared) {
  const auto none_left = [&] {
    return !reap_children(reaped) ||
           (!spared.empty() && children_but(spared).empty());
  };
  const auto signal_all = [&](int signal) {
    for (const pid_t pid : children_but(spared)) ::kill(pid, signal);
  };
  if (none_left()) return true;
  if (grace > milliseconds(0)) signal_all(SIGTERM);
  const Deadline polite = Deadline::after(grace);
  while (!polite.expired()) {
    await_child(polite.remaining());
    if (none_left()) return true;
  }
  const Deadline last = Deadline::after(kLastAllowance);
  while (!last.expired()) {
    signal_all(SIGKILL);
    await_child(kKillInterval);
    if (none_left()) return true;
  }
  return false;
}

}  // namespace lockstep::internal
