#include "lockstep/worker/error_file.h"

#include <fcntl.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <ctime>
#include <iterator>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "lockstep/base/environment.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/worker/native_stack.h"

namespace lockstep::internal {
namespace {

// The failure that the process has noted. Never destroyed, because a process
// may fail while its static objects are destroyed.
struct Noted {
  std::mutex mutex{};
  std::optional<FailureKind> kind{};
  std::string message{};
  pid_t pid = 0;  // of the process that noted first
};

Noted& noted() {
  static NoDestructor<Noted> instance;
  return *instance;
}

const char* name_of(FailureKind kind) {
  return kind == FailureKind::echo ? "echo" : "cause";
}

// The launcher reads 1 MiB of a file. The file has the message twice, and a
// byte of it may take six.
constexpr size_t kLongestMessage = 64 << 10;

// Bytes that are not valid UTF-8 become U+FFFD.
std::string document(FailureKind kind, std::string_view whole) {
  std::string message(whole.substr(0, kLongestMessage));
  if (message.size() < whole.size()) message += " ...";
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(now).count();
  const auto time_ns = std::chrono::nanoseconds(now).count();
  const nlohmann::json json{{"message",
                             {{"message", message},
                              {"extraInfo",
                               {{"timestamp", std::to_string(seconds)},
                                {"time_ns", std::to_string(time_ns)},
                                {"py_callstack", message},
                                {"kind", name_of(kind)}}}}}};
  return json.dump(-1, ' ', /*ensure_ascii=*/false,
                   nlohmann::json::error_handler_t::replace) +
         "\n";
}

constexpr std::array kSignals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr const char* kStackFile = "stack.txt";
constexpr size_t kAlternateStack = 64 << 10;
// At most so much of a stack's file is read; it has 96 lines.
constexpr size_t kMostStackBytes = 256 << 10;
// How long the handler may take; SIGALRM ends the process then.
constexpr unsigned kHandlerSeconds = 10;
// At most so many frames are those of abort() and of an exception on its way.
constexpr ptrdiff_t kAbortFrames = 12;

// The values that the handler needs; the paths end with a zero byte.
struct Paths {
  pid_t pid;
  std::string error_file;
  std::string error_part;  // its name while it is written
  std::string stack_file;
};
std::atomic<const Paths*> paths{nullptr};
std::atomic<bool> crashing{false};

const char* name_of_signal(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGILL:
      return "SIGILL";
    default:
      return "SIGABRT";
  }
}

void write_error_file(const Paths& to, int signal, const siginfo_t& info) {
  HandlerText<1024> words;
  words.add(name_of_signal(signal));
  if (info.si_code == SI_KERNEL) {
    words.add(" at an address that is not known");
  } else if (info.si_code > 0) {
    words.add(" at address 0x");
    words.add_number(reinterpret_cast<uintptr_t>(info.si_addr), 16);
  } else if (info.si_pid == 0) {  // a process outside this PID namespace
    words.add(", which another process has sent");
  } else if (info.si_pid != ::getpid()) {
    words.add(", which process ");
    words.add_number(info.si_pid);
    words.add(" has sent");
  } else if (signal != SIGABRT) {
    words.add(", which the process has sent to itself");
  }
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  HandlerText<1024> json;
  json.add("{\"message\": {\"message\": \"");
  json.add(words.view());
  json.add("\", \"extraInfo\": {\"timestamp\": \"");
  json.add_number(static_cast<int64_t>(now.tv_sec));
  json.add("\", \"time_ns\": \"");
  json.add_number(static_cast<int64_t>(now.tv_sec) * 1'000'000'000 +
                  now.tv_nsec);
  json.add("\", \"py_callstack\": \"");
  json.add(words.view());
  json.add("\", \"kind\": \"cause\"}}}\n");
  const int fd = ::open(to.error_part.c_str(),
                        O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const auto text = json.view();
  const bool whole = ::write(fd, text.data(), text.size()) ==
                     static_cast<ssize_t>(text.size());
  ::close(fd);
  if (whole) {
    ::rename(to.error_part.c_str(), to.error_file.c_str());
  } else {
    ::unlink(to.error_part.c_str());
  }
}

// The process must end, also if the disk does not answer, or if the unwinder
// needs a lock that the thread has.
void end_in_any_case() {
  ::signal(SIGALRM, SIG_DFL);
  sigset_t alarm_only;
  sigemptyset(&alarm_only);
  sigaddset(&alarm_only, SIGALRM);
  ::pthread_sigmask(SIG_UNBLOCK, &alarm_only, nullptr);
  ::alarm(kHandlerSeconds);
}

// Returns where the thread was; null on a processor that is not known here.
const void* interrupted_address([[maybe_unused]] void* context) {
#if defined(__x86_64__)
  const auto& registers =
      static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  return reinterpret_cast<const void*>(registers[REG_RIP]);
#else
  return nullptr;
#endif
}

void handle_crash(int signal, siginfo_t* info, void* context) {
  const Paths* const to = paths.load();
  // Not in a child that was forked off, nor for a crash in this handler or in
  // another thread meanwhile.
  if (to != nullptr && to->pid == ::getpid() && !crashing.exchange(true)) {
    end_in_any_case();
    const int fd = ::open(to->stack_file.c_str(),
                          O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd >= 0) {
      write_stack(capture_stack(), fd, interrupted_address(context));
      ::close(fd);
    }
    if (::access(to->error_file.c_str(), F_OK) != 0) {
      write_error_file(*to, signal, *info);
    }
  }
  // The signal's own action; SA_RESETHAND has set it back. A fault happens
  // again when this returns, but a signal that was sent does not.
  ::raise(signal);
}

// Gives the calling thread a stack for the handler, unless it has one.
void add_alternate_stack() {
  stack_t before{};
  if (::sigaltstack(nullptr, &before) != 0 ||
      (before.ss_flags & SS_DISABLE) == 0) {
    return;
  }
  // For as long as the thread lives, which may be longer than any object.
  stack_t stack{};
  stack.ss_sp = std::make_unique<std::byte[]>(kAlternateStack).release();
  stack.ss_size = kAlternateStack;
  ::sigaltstack(&stack, nullptr);
}

}  // namespace

void note_failure(FailureKind kind, std::string_view message) noexcept {
  try {
    Noted& all = noted();
    std::lock_guard lock(all.mutex);
    if (all.kind && (*all.kind != FailureKind::cause_without_words ||
                     kind == FailureKind::cause_without_words)) {
      return;
    }
    if (all.pid == 0) all.pid = ::getpid();
    if (all.pid != ::getpid()) return;
    all.kind = kind;
    all.message = message.substr(0, kLongestMessage);
    if (const auto path = get_env("TORCHELASTIC_ERROR_FILE")) {
      write_aside(*path, document(kind, message));
    }
  } catch (...) {
    // Out of memory: the process fails without an error file.
  }
}

std::string noted_echo() {
  Noted& all = noted();
  std::lock_guard lock(all.mutex);
  const bool is_own = all.pid == ::getpid();
  return is_own && all.kind == FailureKind::echo ? all.message : "";
}

void forget_failure() noexcept {
  Noted& all = noted();
  std::lock_guard lock(all.mutex);
  if (!all.kind || all.pid != ::getpid()) return;
  all.kind.reset();
  try {
    if (const auto path = get_env("TORCHELASTIC_ERROR_FILE")) {
      ::unlink(path->c_str());
    }
  } catch (...) {
    // Out of memory: the file stays.
  }
}

void arm_crash_handler() {
  const auto error_file = get_env("TORCHELASTIC_ERROR_FILE");
  if (!error_file) return;
  const std::filesystem::path path(*error_file);
  // Earlier ones are not freed: a handler may be reading them.
  paths = std::make_unique<Paths>(
              Paths{.pid = ::getpid(),
                    .error_file = path,
                    .error_part = path.string() + ".crash",
                    .stack_file = path.parent_path() / kStackFile})
              .release();
  prepare_stacks();
  add_alternate_stack();
  for (const int signal : kSignals) {
    struct sigaction current {};
    if (::sigaction(signal, nullptr, &current) != 0 ||
        (current.sa_flags & SA_SIGINFO) != 0 || current.sa_handler != SIG_DFL) {
      continue;
    }
    struct sigaction action {};
    action.sa_sigaction = handle_crash;
    action.sa_flags =
        static_cast<int>(SA_SIGINFO | SA_ONSTACK | SA_RESETHAND | SA_NODEFER);
    ::sigaction(signal, &action, nullptr);
  }
}

std::vector<std::string> read_crash_stack(
    const std::filesystem::path& error_file) {
  std::istringstream file(
      read_left_file(error_file.parent_path(), kStackFile, kMostStackBytes)
          .value_or(""));
  std::vector<std::string> frames;
  bool of_handler = true;
  for (std::string line; std::getline(file, line);) {
    // The kernel calls the handler through __restore_rt, which has no exported
    // name: a frame of libc between the handler and what was interrupted.
    if (!of_handler) {
      frames.push_back(line);
    } else if (frame_text(line).starts_with("libc.so")) {
      of_handler = false;
    }
  }
  // How a process aborts is always the same; where from is of interest.
  const auto first =
      frames.begin() + std::min<ptrdiff_t>(kAbortFrames, std::ssize(frames));
  const auto last_of_abort =
      std::find_if(std::make_reverse_iterator(first), frames.rend(),
                   [](const std::string& line) {
                     const std::string frame = frame_text(line);
                     return frame.starts_with("abort +") ||
                            frame.starts_with("std::terminate") ||
                            frame.starts_with("__cxa_throw +");
                   });
  frames.erase(frames.begin(), last_of_abort.base());
  return frames;
}

}  // namespace lockstep::internal
