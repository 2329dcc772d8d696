#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::internal {

// Finds the lines of sources for the frames of stacks, by the program addr2line
// (Debian: binutils), in the process that shows a stack and not in the one that
// has crashed. If there is no such program, if a module has no debug
// information, or when the time is over, frames stay without lines. One object
// remembers what it has found, since ranks that fail alike have the same
// frames. For one thread.
class SourceFinder {
 public:
  // `allowed`: how long all calls together may take. A program that includes
  // LibTorch has 100 MB of debug information, which takes a second to read.
  explicit SourceFinder(
      std::chrono::milliseconds allowed = std::chrono::seconds(3))
      : deadline_(Deadline::after(allowed)) {}

  // Returns the frames `lines` (native_stack.h, frame_line()) for people:
  // "at::mm(...) +0x1c in libtorch_cpu.so", or, if the line is known,
  // "train() +0x1c in train at train.cpp:12". A line that is no frame stays as
  // it is. Throws nothing but std::bad_alloc.
  std::vector<std::string> texts(const std::vector<std::string>& lines);

 private:
  struct Source {
    std::string function{};  // empty: not known
    std::string place{};     // "train.cpp:12"
  };
  void look_up(const std::string& module, const std::vector<uint64_t>& places);

  Deadline deadline_;
  std::map<std::pair<std::string, uint64_t>, Source> known_;
};

// Returns whether an ELF file of this machine has a table of source lines. The
// modules of LibTorch have none, and are too large to let addr2line find out.
bool has_source_lines(const std::string& file);

}  // namespace lockstep::internal
