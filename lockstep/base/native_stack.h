#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

// Stacks of C++ threads by glibc (backtrace(3)), which walks the unwind tables
// that every program of GCC and Clang has. Names are those of exported symbols:
// all of LibTorch's, and those of a program that was linked with -rdynamic.
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
// a signal has interrupted; null: none. May be called in a signal handler.
void write_stack(const NativeStack& stack, int fd,
                 const void* interrupted) noexcept;

// Returns a frame of this process so that it can be understood later, by
// another process: "/path/of/module(symbol+0x1c) [0x1234]". The last number is
// the place in the file of the module, for addr2line: of the call, unless the
// frame was `interrupted`, as the return address may belong to the next line,
// or be the first byte of the next function. Returns "[0x7f...]" if no module
// has the address.
std::string frame_line(void* address, bool interrupted);

// The module of a frame_line() and the place in its file.
struct ModulePlace {
  std::string module{};
  uint64_t offset = 0;
};
// Returns nothing if `line` is no frame_line() with a module.
std::optional<ModulePlace> module_place(std::string_view line);

// Returns a frame_line() for people: "at::mm(...) +0x1c in libtorch_cpu.so". If
// the line has no symbol: "`function` in libtorch_cpu.so", or if `function` is
// empty "libtorch_cpu.so +0x1234". Another line is returned as it is.
std::string frame_text(std::string_view line, std::string_view function = {});

}  // namespace lockstep::internal
