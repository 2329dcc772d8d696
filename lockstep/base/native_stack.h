#pragma once

#include <array>
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

// Writes one line for each frame, "module(symbol+0x1c) [0x7f...]", to `fd`. May
// be called in a signal handler.
void write_stack(const NativeStack& stack, int fd) noexcept;

// Returns a line of write_stack() for people: "at::mm(...) +0x1c in
// libtorch_cpu.so", or "libtorch_cpu.so +0x1234" if the symbol is not known.
std::string frame_text(std::string_view line);
// Returns the same for an address of this process.
std::string frame_text(void* address);

}  // namespace lockstep::internal
