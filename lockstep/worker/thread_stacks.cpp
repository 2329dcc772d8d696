#include "lockstep/worker/thread_stacks.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/worker/native_stack.h"

namespace lockstep::internal {
namespace {

constexpr std::chrono::milliseconds kThreadTime{200};
constexpr std::chrono::microseconds kLookInterval{100};
// A thread that is called from here has as many frames of its handler.
constexpr int kHandlerFrames = 3;

// The buffer to which the handler writes. A thread whose time is over may still
// come, and must not write into the next thread's stack: `turn` says whose turn
// it is.
struct Slot {
  std::atomic<pid_t> turn{0};
  std::atomic<bool> done{false};
  NativeStack stack{};
};
Slot slot;

void write_down(int /*signal*/) {
  const int error = errno;
  pid_t own = static_cast<pid_t>(::syscall(SYS_gettid));
  if (slot.turn.compare_exchange_strong(own, 0)) {
    slot.stack = capture_stack();
    slot.done.store(true, std::memory_order_release);
  }
  errno = error;
}

std::vector<pid_t> threads_of_process() {
  std::vector<pid_t> threads;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task", error)) {
    const std::string name = entry.path().filename();
    pid_t thread = 0;
    std::from_chars(name.data(), name.data() + name.size(), thread);
    if (thread != ::gettid()) threads.push_back(thread);
  }
  std::ranges::sort(threads);
  return threads;
}

void take_stack(ThreadStack& into) {
  slot.done = false;
  slot.turn = into.thread;
  if (::syscall(SYS_tgkill, ::getpid(), into.thread, stack_signal()) != 0) {
    slot.turn = 0;
    into.missing = "it has ended";
    return;
  }
  const Deadline deadline = Deadline::after(kThreadTime);
  while (!slot.done.load(std::memory_order_acquire)) {
    pid_t expected = into.thread;
    if (deadline.expired() && slot.turn.compare_exchange_strong(expected, 0)) {
      into.missing = "it blocks signals, or is stuck in the kernel";
      return;
    }
    std::this_thread::sleep_for(kLookInterval);
  }
  for (int i = std::min(kHandlerFrames, slot.stack.size); i < slot.stack.size;
       ++i) {
    into.frames.push_back(
        frame_line(slot.stack.addresses[static_cast<size_t>(i)],
                   /*interrupted=*/i == kHandlerFrames));
  }
}

}  // namespace

int stack_signal() { return SIGRTMAX - 4; }

std::vector<ThreadStack> thread_stacks() {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  prepare_stacks();
  std::vector<ThreadStack> stacks;
  for (const pid_t thread : threads_of_process()) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/comm");
    ThreadStack stack{.thread = thread};
    std::getline(file, stack.name);
    stacks.push_back(std::move(stack));
  }
  if (stacks.empty()) {
    stacks.push_back({.thread = ::getpid(),
                      .missing = "/proc is not mounted, so the threads of this "
                                 "process are not known"});
    return stacks;
  }
  struct sigaction before {};
  ::sigaction(stack_signal(), nullptr, &before);
  const bool is_free =
      (before.sa_flags & SA_SIGINFO) == 0 &&
      (before.sa_handler == SIG_DFL || before.sa_handler == write_down);
  if (!is_free) {
    for (auto& stack : stacks) {
      stack.missing = "the program handles SIGRTMAX-4 itself";
    }
    return stacks;
  }
  struct sigaction action {};
  action.sa_handler = write_down;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  ::sigaction(stack_signal(), &action, nullptr);
  bool all = true;
  for (auto& stack : stacks) {
    take_stack(stack);
    all = all && stack.missing.empty();
  }
  // A thread that blocks the signal would die of it once it does not.
  if (all) ::signal(stack_signal(), SIG_DFL);
  return stacks;
}

std::string to_json(const std::vector<ThreadStack>& stacks) {
  auto all = nlohmann::json::array();
  for (const ThreadStack& stack : stacks) {
    all.push_back({{"thread", stack.thread},
                   {"name", stack.name},
                   {"frames", stack.frames},
                   {"missing", stack.missing}});
  }
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace lockstep::internal
