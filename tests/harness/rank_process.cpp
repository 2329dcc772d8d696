#include "tests/harness/rank_process.h"

#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/environment.h"

extern char** environ;

namespace lockstep::internal::testing {
namespace {

constexpr const char* kSocketVariable = "LOCKSTEP_TEST_CONTROL_FD";
// The longest packet. run_body() (process_world.cpp) keeps answers shorter,
// also with thousands of failures.
constexpr size_t kMaxMessage = 128 * 1024;

}  // namespace

RankProcess::RankProcess(int rank, const std::vector<std::string>& environment)
    : rank_(rank) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_errno("socketpair");
  }
  socket_ = FileDescriptor(ends[0]);
  FileDescriptor child_end(ends[1]);

  std::vector<std::string> variables(environment);
  variables.push_back(std::string(kSocketVariable) + "=" +
                      std::to_string(child_end.get()));
  std::vector<char*> envp;
  for (auto& variable : variables) envp.push_back(variable.data());
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string_view text(*entry);
    auto name = text.substr(0, text.find('=') + 1);
    bool replaced = false;
    for (auto& variable : variables) replaced |= variable.starts_with(name);
    if (!replaced) envp.push_back(*entry);
  }
  envp.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // dup2 onto itself keeps a close-on-exec descriptor open in the child.
  posix_spawn_file_actions_adddup2(&actions, child_end.get(), child_end.get());
  std::string self = "/proc/self/exe";
  char* argv[] = {self.data(), nullptr};
  int error =
      ::posix_spawn(&pid_, self.c_str(), &actions, nullptr, argv, envp.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    errno = error;
    throw_errno("posix_spawn");
  }
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : rank_(other.rank_),
      pid_(std::exchange(other.pid_, -1)),
      socket_(std::move(other.socket_)) {}

RankProcess::~RankProcess() { kill_and_reap(); }

void RankProcess::kill_and_reap() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void RankProcess::send(const nlohmann::json& message) {
  send_message(socket_.get(), message);
}

std::optional<nlohmann::json> RankProcess::receive() {
  return receive_message(socket_.get());
}

std::string RankProcess::describe_end() {
  // The socket is closed, so the process is ending by itself or never will.
  int status = 0;
  Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (deadline.expired()) return "closed its socket, but did not end";
    ::usleep(1000);
  }
  pid_ = -1;
  if (WIFSIGNALED(status)) {
    return "was killed by signal " + std::to_string(WTERMSIG(status)) + " (" +
           ::strsignal(WTERMSIG(status)) + ")";
  }
  return "exited with code " + std::to_string(WEXITSTATUS(status));
}

std::optional<int> inherited_control_socket() {
  auto fd = get_env_int(kSocketVariable, 0, 1 << 20);
  if (!fd) return std::nullopt;
  ::unsetenv(kSocketVariable);  // not for processes that a test starts
  return static_cast<int>(*fd);
}

void send_message(int socket, const nlohmann::json& message) {
  std::string text =
      message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (::send(socket, text.data(), text.size(), MSG_NOSIGNAL) < 0 &&
      errno != EPIPE) {
    throw_errno("send");
  }
}

std::optional<nlohmann::json> receive_message(int socket) {
  std::string text(kMaxMessage, '\0');
  ssize_t size;
  do {
    size = ::recv(socket, text.data(), text.size(), 0);
  } while (size < 0 && errno == EINTR);
  if (size <= 0) return std::nullopt;
  text.resize(size);
  return nlohmann::json::parse(text);
}

}  // namespace lockstep::internal::testing
