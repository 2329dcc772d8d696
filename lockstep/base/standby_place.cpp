#include "lockstep/base/standby_place.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

constexpr const char* kPlace = "place";
constexpr const char* kListenVariable = "LOCKSTEP_MASTER_LISTEN_FD";
constexpr const char* kEarlyOutput = "lockstep-standby";
// The environment, the standard streams, and the socket of rank 0's store.
constexpr size_t kMostDescriptors = 5;
constexpr size_t kLeastDescriptors = 4;

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

std::optional<ino_t> inode_of_socket(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) {
    return std::nullopt;
  }
  return status.st_ino;
}

// Returns the agent's socket that `mark` names, if this process has it.
std::optional<int> socket_of(std::string_view mark) {
  const size_t colon = mark.find(':');
  if (colon == mark.npos) return std::nullopt;
  const auto number = [](std::string_view text, auto& value) {
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
  };
  int fd = -1;
  ino_t inode = 0;
  if (!number(mark.substr(0, colon), fd) ||
      !number(mark.substr(colon + 1), inode) || inode_of_socket(fd) != inode) {
    return std::nullopt;
  }
  return fd;
}

bool tell_agent(int socket, const std::string& text) {
  return ::send(socket, text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

// Waits for the agent's message and returns its descriptors.
std::vector<FileDescriptor> await_place(int socket) {
  while (true) {
    std::array<char, 64> words;
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
    if (std::string_view(words.data(), static_cast<size_t>(count)) != kPlace ||
        descriptors.size() < kLeastDescriptors) {
      throw std::runtime_error(
          "a standby process did not get all that belongs to its place; raise "
          "its limit of descriptors (ulimit -n)");
    }
    return descriptors;
  }
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
  std::cout.flush();
  std::fflush(nullptr);
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
        "LOCKSTEP_STANDBY for a program that is no rank of the job");
  }
  const FileDescriptor socket(*inherited);
  tell_agent(socket.get(), kStandbyWaits);
  auto descriptors = await_place(socket.get());
  take_environment(contents(descriptors[0].get()));
  if (descriptors.size() == kMostDescriptors) {
    // The descriptor has another number here than in the agent. It stays open,
    // as one that is inherited.
    const int listener = descriptors[4].release();
    ::setenv(kListenVariable, std::to_string(listener).c_str(), 1);
  }
  ::unsetenv(kStandbyVariable);
  take_streams(descriptors);
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

std::string standby_mark(const FileDescriptor& socket) {
  return std::to_string(socket.get()) + ":" +
         std::to_string(inode_of_socket(socket.get()).value_or(0));
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
  std::array<int, kMostDescriptors> fds{
      environment.get(), place.standard_fds[0], place.standard_fds[1],
      place.standard_fds[2], place.master_listen_fd};
  const size_t bytes =
      sizeof(int) *
      (place.master_listen_fd >= 0 ? kMostDescriptors : kLeastDescriptors);
  ControlBuffer control{};
  iovec part{const_cast<char*>(kPlace), std::strlen(kPlace)};
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

}  // namespace lockstep::internal
