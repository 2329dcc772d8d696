#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Stacks of C++ threads by glibc (backtrace(3)), which walks the unwind tables
// that every program of GCC and Clang has. Names are those of exported symbols:
// all of LibTorch's. The process that shows a stack finds the others
// (launch/source_finder.h).
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

}  // namespace lockstep::internal
