#include "lockstep/worker/native_stack.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/deadline.h"

namespace lockstep::internal {
namespace {

// Names of templates may have kilobytes.
constexpr size_t kLongestName = 200;

std::string_view file_name(std::string_view path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

std::string demangled(const std::string& symbol) {
  int status = 0;
  // A function of C may have the name of a type: "f" would become "float".
  const std::unique_ptr<char, void (*)(void*)> name(
      symbol.starts_with("_Z")
          ? abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status)
          : nullptr,
      std::free);
  std::string text = name ? name.get() : symbol;
  if (text.size() > kLongestName) text = text.substr(0, kLongestName) + "...";
  return text;
}

// Returns whether a frame_text() is of LibTorch, Lockstep or the system, and
// not of the program.
bool is_of_library(std::string_view text) {
  constexpr std::array<std::string_view, 7> kSpaces{
      "lockstep::", "at::",  "c10::",      "c10d::",
      "torch::",    "std::", "__gnu_cxx::"};
  constexpr std::array<std::string_view, 10> kModules{
      "libtorch", "libc10",  "libshm",     "libgomp",  "libc.so",
      "libm.so",  "libgcc_", "libstdc++.", "ld-linux", "linux-vdso"};
  const auto begins = [](std::string_view name, const auto& words) {
    return std::ranges::any_of(
        words, [&](std::string_view word) { return name.starts_with(word); });
  };
  std::string_view function = text.substr(0, text.find_first_of("(<"));
  function = function.substr(0, function.find(" in "));
  // After the type that a template returns.
  const size_t type = function.rfind(' ');
  if (begins(text, kSpaces) || begins(text, kModules) ||
      text.starts_with('[') || text.starts_with("_start") ||
      (type != function.npos && begins(function.substr(type + 1), kSpaces))) {
    return true;
  }
  const size_t in = text.substr(0, text.rfind(" at ")).rfind(" in ");
  return in != text.npos && begins(text.substr(in + 4), kModules);
}

using LineBuilder = HandlerText<PATH_MAX + 2048>;

// The loader knows the program itself by the word by which it was called.
void add_module(LineBuilder& line, const Dl_info& info, const link_map& map) {
  std::array<char, PATH_MAX> path;
  const ssize_t length =
      map.l_name[0] == '\0'
          ? ::readlink("/proc/self/exe", path.data(), path.size())
          : -1;
  if (length > 0) {
    line.add({path.data(), static_cast<size_t>(length)});
  } else {
    line.add(info.dli_fname);
  }
}

void build_line(LineBuilder& line, void* address, bool interrupted) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  const uintptr_t place = interrupted ? value : value - 1;
  Dl_info info{};
  void* map = nullptr;
  if (::dladdr1(reinterpret_cast<void*>(place), &info, &map, RTLD_DL_LINKMAP) ==
          0 ||
      info.dli_fname == nullptr || map == nullptr) {
    line.add("[0x");
    line.add_number(value, 16);
    line.add("]");
    return;
  }
  const auto& module = *static_cast<const link_map*>(map);
  add_module(line, info, module);
  const bool named = info.dli_sname != nullptr;
  line.add("(");
  if (named) line.add(info.dli_sname);
  line.add("+0x");
  line.add_number(value - (named ? reinterpret_cast<uintptr_t>(info.dli_saddr)
                                 : module.l_addr),
                  16);
  line.add(") [0x");
  line.add_number(place - module.l_addr, 16);
  line.add("]");
}

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

void prepare_stacks() { capture_stack(); }

NativeStack capture_stack() noexcept {
  NativeStack stack;
  stack.size = ::backtrace(stack.addresses.data(), NativeStack::kMost);
  return stack;
}

void write_stack(const NativeStack& stack, int fd,
                 const void* interrupted) noexcept {
  for (int i = 0; i < stack.size; ++i) {
    void* const address = stack.addresses[static_cast<size_t>(i)];
    LineBuilder line;
    build_line(line, address, address == interrupted);
    line.add("\n");
    const auto text = line.view();
    if (::write(fd, text.data(), text.size()) < 0) return;
  }
}

std::string frame_line(void* address, bool interrupted) {
  LineBuilder line;
  build_line(line, address, interrupted);
  return std::string(line.view());
}

std::optional<ModulePlace> module_place(std::string_view line) {
  const size_t bracket = line.rfind(") [0x");
  if (bracket == line.npos || !line.ends_with(']')) return std::nullopt;
  const size_t open = line.rfind('(', bracket);
  if (open == line.npos || open == 0) return std::nullopt;
  const std::string_view number = line.substr(bracket + 5);
  ModulePlace place{.module = std::string(line.substr(0, open))};
  const char* const end = number.data() + number.size() - 1;
  const auto parsed = std::from_chars(number.data(), end, place.offset, 16);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return place;
}

std::string frame_text(std::string_view line, std::string_view function) {
  const auto place = module_place(line);
  if (!place) return std::string(line);
  const std::string module(file_name(place->module));
  std::string_view inside = line.substr(place->module.size() + 1);
  inside = inside.substr(0, inside.rfind(") [0x"));
  const size_t plus = inside.rfind('+');
  const std::string symbol(inside.substr(0, plus));
  const std::string offset(
      plus == std::string_view::npos ? "" : inside.substr(plus));
  if (!symbol.empty()) {
    return demangled(symbol) + " " + offset + " in " + module;
  }
  if (!function.empty()) {
    return demangled(std::string(function)) + " in " + module;
  }
  return module + " " + offset;
}

std::vector<std::string> folded_frames(const std::vector<std::string>& frames) {
  std::vector<std::string> all;
  for (auto frame = frames.begin(); frame != frames.end();) {
    const auto end = std::find_if_not(frame, frames.end(), is_of_library);
    all.push_back(*frame);
    if (end - frame > 3) {
      all.push_back("... " + std::to_string(end - frame - 2) +
                    " frames of libraries");
      frame = std::prev(end);
    } else {
      ++frame;
    }
  }
  return all;
}

std::vector<std::string> shown_frames(const std::vector<std::string>& frames,
                                      size_t most) {
  const auto first =
      std::find_if_not(frames.begin(), frames.end(), is_of_library);
  const auto last =
      std::find_if_not(frames.rbegin(), frames.rend(), is_of_library).base();
  auto all =
      folded_frames(first != frames.end() ? std::vector(first, last) : frames);
  all.resize(std::min(most, all.size()));
  const auto deeper = first - frames.begin();
  if (deeper > 0 && first != frames.end()) {
    all.push_back(frames.front() + ", " + std::to_string(deeper) +
                  (deeper == 1 ? " frame" : " frames") + " further in");
  }
  return all;
}

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
