#include "lockstep/worker/standby_place.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/descriptor_mark.h"
#include "lockstep/base/environment.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep::internal {
namespace {

constexpr std::string_view kPlace = "place";
// Follow it if these descriptors come, too.
constexpr std::string_view kWithListener = " listener";
constexpr std::string_view kWithMemory = " memory";
constexpr std::string_view kLeave = "leave";
constexpr std::string_view kBack = "back";
// The longest message: "back" with stream_marks().
constexpr size_t kMostWords = 256;
constexpr const char* kListenVariable = "LOCKSTEP_MASTER_LISTEN_FD";
constexpr const char* kEarlyOutput = "lockstep-standby";
// The environment and the standard streams; the socket of rank 0's store, and
// the memory of the place.
constexpr size_t kMostDescriptors = 6;
constexpr size_t kLeastDescriptors = 4;

// Whether this process may be called back: from tell_agent_meets() on, until it
// leaves.
std::atomic<bool> meets{false};

// A control message that holds descriptors.
union ControlBuffer {
  cmsghdr header;
  std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> bytes;
};

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// Returns what file `fd` holds, from its beginning.
std::string contents(int fd) {
  std::string all;
  std::array<char, 16384> bytes;
  while (true) {
    const ssize_t count =
        ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(all.size()));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return all;
    all.append(bytes.data(), static_cast<size_t>(count));
  }
}

// Returns the agent's socket that `mark` names, if this process has it.
std::optional<int> socket_of(std::string_view mark) {
  return marked_descriptor(mark, S_IFSOCK);
}

bool tell_agent(int socket, const std::string& text) {
  return ::send(socket, text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

// The descriptors of a StandbyPlace, as this process has got them.
struct GivenPlace {
  std::vector<FileDescriptor> first;  // the environment, the standard streams
  FileDescriptor listener{};
  FileDescriptor memory{};
};

// Waits for the agent's message.
GivenPlace await_place(int socket) {
  while (true) {
    std::array<char, kMostWords> words;
    iovec part{words.data(), words.size()};
    ControlBuffer control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    const ssize_t count = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_errno("a standby process waits for its place");
    if (count == 0) {
      throw std::runtime_error(
          "a standby process waited for its place, and its launcher has gone");
    }
    std::vector<FileDescriptor> descriptors;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
        continue;
      }
      std::array<int, kMostDescriptors> fds;
      const size_t bytes = std::min(header->cmsg_len - CMSG_LEN(0), sizeof fds);
      std::memcpy(fds.data(), CMSG_DATA(header), bytes);
      for (size_t at = 0; at < bytes / sizeof(int); ++at) {
        descriptors.emplace_back(fds[at]);
      }
    }
    const std::string_view text(words.data(), static_cast<size_t>(count));
    if (text.starts_with(kBack)) continue;  // it stands by already
    const bool listens = text.find(kWithListener) != text.npos;
    const bool has_memory = text.find(kWithMemory) != text.npos;
    if (!text.starts_with(kPlace) ||
        descriptors.size() != kLeastDescriptors + listens + has_memory) {
      throw std::runtime_error(
          "a standby process did not get all that belongs to its place; raise "
          "its limit of descriptors (ulimit -n)");
    }
    GivenPlace place;
    if (has_memory) place.memory = std::move(descriptors.back());
    if (listens) place.listener = std::move(descriptors[kLeastDescriptors]);
    place.first = std::move(descriptors);
    return place;
  }
}

// Waits for a message without descriptors; empty if none has come at the
// deadline, or the agent is gone.
std::string await_words(int socket, const Deadline& deadline) {
  while (true) {
    pollfd polled{.fd = socket, .events = POLLIN, .revents = 0};
    const auto left = std::min<int64_t>(deadline.remaining().count(), 1 << 30);
    const int ready = ::poll(&polled, 1, static_cast<int>(left));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return {};
    std::array<char, kMostWords> words;
    const ssize_t count = ::recv(socket, words.data(), words.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    return {words.data(), static_cast<size_t>(std::max<ssize_t>(0, count))};
  }
}

std::string stream_mark(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return "none";
  return std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino);
}

// Returns the socket by which the agent can call this worker back.
std::optional<int> socket_of_worker() {
  const auto mark = get_env(kStandbySocketVariable);
  return mark ? socket_of(*mark) : std::nullopt;
}

void flush_streams() {
  std::cout.flush();
  std::fflush(nullptr);
}

// Lets stdout and stderr go to files in memory if they are those of `marks`, in
// which each has a space before and after it.
void leave_streams(const std::string& marks) {
  flush_streams();
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    if (marks.find(" " + stream_mark(stream) + " ") == std::string::npos) {
      continue;
    }
    const FileDescriptor early = early_output_file();
    if (::dup2(early.get(), stream) < 0) {
      throw_errno("a standby process's output");
    }
  }
}

// Takes the agent's next words, and returns whether they call this worker back:
// then it is a standby process again.
bool take_back(int socket, const Deadline& deadline) {
  const std::string words = await_words(socket, deadline);
  if (!words.empty()) meets = false;
  if (!words.starts_with(kBack)) return false;
  leave_streams(words.substr(kBack.size()) + " ");
  ::setenv(kStandbyVariable, get_env(kStandbySocketVariable)->c_str(), 1);
  ::unsetenv(kStandbySocketVariable);
  return true;
}

// Returns whether the program left `fd` as the agent made it, in its
// early_output_file().
bool is_early_output(int fd) {
  std::array<char, 256> target;
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), target.data(), target.size());
  return length > 0 &&
         std::string_view(target.data(), static_cast<size_t>(length))
             .starts_with(std::string("/memfd:") + kEarlyOutput);
}

void take_streams(const std::vector<FileDescriptor>& descriptors) {
  flush_streams();
  ::dup2(descriptors[1].get(), STDIN_FILENO);
  for (const int target : {STDOUT_FILENO, STDERR_FILENO}) {
    if (!is_early_output(target)) continue;
    const std::string early = contents(target);
    if (::dup2(descriptors[static_cast<size_t>(target) + 1].get(), target) <
        0) {
      throw_errno("connecting a standby process's output");
    }
    write_all(target, early);
  }
  // As a program's first use of a terminal would have set it.
  if (::isatty(STDOUT_FILENO) != 0) {
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  }
}

void take_environment(std::string_view entries) {
  while (!entries.empty()) {
    const std::string entry(entries.substr(0, entries.find('\0')));
    entries.remove_prefix(std::min(entries.size(), entry.size() + 1));
    const size_t equals = entry.find('=');
    if (equals == entry.npos) continue;
    ::setenv(entry.substr(0, equals).c_str(), entry.c_str() + equals + 1, 1);
  }
}

// A process that was called back leaves what belonged to the place before.
void leave_place() {
  ::unsetenv(kGenerationVariable);
  const auto mark = get_env(kPlaceMemoryVariable);
  if (!mark) return;
  if (const auto memory = marked_descriptor(*mark, S_IFREG)) ::close(*memory);
  ::unsetenv(kPlaceMemoryVariable);
}

}  // namespace

bool stands_by() { return get_env(kStandbyVariable).has_value(); }

void take_place() {
  const auto mark = get_env(kStandbyVariable);
  if (!mark) return;
  const auto inherited = socket_of(*mark);
  if (!inherited) {
    throw std::invalid_argument(
        "init_process_group: LOCKSTEP_STANDBY is set, but this process did not "
        "inherit the launcher's socket; a process that a standby process "
        "started cannot have a place. Leave out --standby, or unset "
        "LOCKSTEP_STANDBY for a program that is not a rank of the job");
  }
  // It stays open, for await_leave(), but not in programs that this one starts.
  const int socket = *inherited;
  ::fcntl(socket, F_SETFD, FD_CLOEXEC);
  tell_agent(socket, kStandbyWaits);
  GivenPlace place = await_place(socket);
  leave_place();
  take_environment(contents(place.first[0].get()));
  // The descriptors have other numbers here than in the agent. They stay open,
  // as those that are inherited.
  if (place.listener) {
    const int listener = place.listener.release();
    ::setenv(kListenVariable, std::to_string(listener).c_str(), 1);
  }
  if (place.memory) {
    ::setenv(kPlaceMemoryVariable, descriptor_mark(place.memory.get()).c_str(),
             1);
    place.memory.release();
  }
  ::unsetenv(kStandbyVariable);
  ::setenv(kStandbySocketVariable, mark->c_str(), 1);
  take_streams(place.first);
}

void tell_agent_meets() {
  const auto socket = socket_of_worker();
  if (!socket) return;
  ::fcntl(*socket, F_SETFD, FD_CLOEXEC);
  meets = tell_agent(*socket, kStandbyMeets);
}

void look_for_agent() {
  if (!meets) return;
  const auto socket = socket_of_worker();
  if (socket && take_back(*socket, Deadline::after({}))) throw CalledBack();
}

void await_leave(const Deadline& deadline) {
  const auto socket = socket_of_worker();
  if (!socket || !tell_agent(*socket, kStandbyMet)) return;
  if (take_back(*socket, deadline)) throw CalledBack();
  if (deadline.expired()) {
    throw std::runtime_error(
        "init_process_group: the group is made, but the launcher did not let "
        "this rank go on in time: workers of the attempt before have not "
        "ended, or the launcher is stopped");
  }
}

bool is_called_back(std::chrono::milliseconds allowed) {
  if (stands_by()) return true;
  const auto socket = socket_of_worker();
  return socket && take_back(*socket, Deadline::after(allowed));
}

void refuse_early_reader(const std::string& variable) {
  if (const auto mark = get_env(kStandbyVariable)) {
    if (const auto socket = socket_of(*mark)) {
      tell_agent(*socket, kStandbyRead + variable);
    }
  }
  throw std::invalid_argument(
      "the program asks for " + variable +
      " before init_process_group(), which a standby process (lockstep run "
      "--standby) has not got yet; call init_process_group() first, or leave "
      "out --standby");
}

std::string stream_marks(int stdout_fd, int stderr_fd) {
  return stream_mark(stdout_fd) + " " + stream_mark(stderr_fd);
}

FileDescriptor early_output_file() {
  FileDescriptor file(::memfd_create(kEarlyOutput, MFD_CLOEXEC));
  if (!file || ::fcntl(file.get(), F_SETFL, O_APPEND) != 0) {
    throw_errno("a file for a standby process's output");
  }
  return file;
}

bool send_place(const FileDescriptor& socket, const StandbyPlace& place) {
  const FileDescriptor environment(
      ::memfd_create("lockstep-environment", MFD_CLOEXEC));
  if (!environment) throw_errno("an environment for a standby process");
  for (const std::string& entry : place.environment) {
    if (!write_all(environment.get(), {entry.c_str(), entry.size() + 1})) {
      throw_errno("an environment for a standby process");
    }
  }
  std::vector<int> fds{environment.get(), place.standard_fds[0],
                       place.standard_fds[1], place.standard_fds[2]};
  std::string words(kPlace);
  const auto add = [&](int fd, std::string_view name) {
    if (fd < 0) return;
    fds.push_back(fd);
    words += name;
  };
  add(place.master_listen_fd, kWithListener);
  add(place.memory_fd, kWithMemory);
  const size_t bytes = fds.size() * sizeof(int);
  ControlBuffer control{};
  iovec part{words.data(), words.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &control;
  message.msg_controllen = CMSG_SPACE(bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(bytes);
  std::memcpy(CMSG_DATA(header), fds.data(), bytes);
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
    return true;
  }
  if (errno == EPIPE || errno == ECONNRESET) return false;
  throw_errno("giving a standby process its place");
}

void send_leave(const FileDescriptor& socket) {
  ::send(socket.get(), kLeave.data(), kLeave.size(),
         MSG_NOSIGNAL | MSG_DONTWAIT);
}

void send_back(const FileDescriptor& socket, const std::string& streams) {
  const std::string words = std::string(kBack) + " " + streams;
  ::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace lockstep::internal
