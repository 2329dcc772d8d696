#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Stacks of C++ threads by glibc (backtrace(3)), which walks the unwind tables
// that every program of GCC and Clang has. Names are those of exported symbols:
// all of LibTorch's. The process that shows a stack finds the others
// (launch/watch/source_finder.h).
namespace lockstep::internal {

// Return addresses, the innermost first.
struct NativeStack {
  static constexpr int kMost = 96;
  std::array<void*, kMost> addresses{};
  int size = 0;
};

// Loads what capture_stack() needs. Call it once before a signal handler does.
void prepare_stacks();

// Returns the stack of the calling thread. May be called in a signal handler
// after prepare_stacks(); the frames of the handler are then the first ones.
NativeStack capture_stack() noexcept;

// Writes frame_line() of each frame to `fd`. `interrupted` is the address that
// a signal has interrupted; null if there is none. May be called in a signal
// handler.
void write_stack(const NativeStack& stack, int fd,
                 const void* interrupted) noexcept;

// Returns a frame of this process so that it can be understood later, by
// another process: "/path/of/module(symbol+0x1c) [0x1234]". The last number is
// the place in the file of the module: of the call, unless the
// frame was `interrupted`, as the return address may belong to the next line,
// or be the first byte of the next function. Returns "[0x7f...]" if no module
// has the address.
std::string frame_line(void* address, bool interrupted);

// The module of a frame_line() and the place in its file.
struct ModulePlace {
  std::string module{};
  uint64_t offset = 0;
};
// Returns nothing if `line` is not a frame_line() with a module.
std::optional<ModulePlace> module_place(std::string_view line);

// Returns a frame_line() for people: "at::mm(...) +0x1c in libtorch_cpu.so". If
// the line has no symbol: "`function` in libtorch_cpu.so", demangled, or if
// `function` is empty "libtorch_cpu.so +0x1234". Another line is returned as it
// is.
std::string frame_text(std::string_view line, std::string_view function = {});

// Returns the frames `frames` of a stack, as frame_text() has them. Of four or
// more in a row of LibTorch, Lockstep or the system only the first and the
// last, which the program has called, with "... 12 frames of libraries" between
// them.
std::vector<std::string> folded_frames(const std::vector<std::string>& frames);

// Returns the same from the program's first function on to its last, `most` at
// most, and then the innermost frame: "at::mm(...) +0x1c in libtorch_cpu.so, 14
// frames further in". All frames, folded, if none is of the program.
std::vector<std::string> shown_frames(const std::vector<std::string>& frames,
                                      size_t most);

// A text of at most kBytes that a signal handler can build; more is cut off.
template <size_t kBytes>
class HandlerText {
 public:
  void add(std::string_view text) {
    const size_t count = std::min(text.size(), kBytes - size_);
    std::copy_n(text.begin(), count, bytes_.begin() + size_);
    size_ += count;
  }
  template <class Integer>
  void add_number(Integer value, int base = 10) {
    std::array<char, 24> digits;
    const auto end =
        std::to_chars(digits.data(), digits.data() + digits.size(), value, base)
            .ptr;
    add({digits.data(), static_cast<size_t>(end - digits.data())});
  }
  std::string_view view() const { return {bytes_.data(), size_}; }

 private:
  std::array<char, kBytes> bytes_;
  size_t size_ = 0;
};

struct ThreadStack {
  pid_t thread = 0;
  std::string name{};                 // of the thread, as `ps -L` shows it
  std::vector<std::string> frames{};  // frame_line(), the innermost first
  std::string missing{};              // why no frame was found, else empty
};

// Returns the stacks of all threads of this process but the calling one, which
// runs no user's code. Each thread writes down its own stack in a handler of
// the signal stack_signal(); a thread that does not within 200 ms, because it
// blocks the signal or is stuck in the kernel, has no frames.
//
// A system call that the signal interrupts is restarted, or fails with EINTR,
// as signal(7) says. The handler is installed only during the call. If the
// program handles the signal itself, no thread has frames. Any thread; one at a
// time.
std::vector<ThreadStack> thread_stacks();

int stack_signal();  // SIGRTMAX - 4

// Returns the stacks as a JSON list of objects with "thread", "name", "frames"
// and "missing".
std::string to_json(const std::vector<ThreadStack>& stacks);

}  // namespace lockstep::internal
