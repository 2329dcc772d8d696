#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/worker/native_stack.h"

namespace lockstep::internal {

// The description of a place in a program or a library, by its file.
struct Source {
  // Mangled, as in its table of symbols; empty if there is none.
  std::string function{};
  // "train.cpp:12"; if the compiler has put the function into others there,
  // "vector.h:40 inlined at train.cpp:12". Empty without debug information.
  std::string line{};
};

// Reads such files. A module does it, since it links libdw (elfutils); a frame
// of a stack that nobody looks at needs none.
class SourceReader {
 public:
  virtual ~SourceReader() = default;
  // Returns what is known of `place`, as in ModulePlace (native_stack.h), in
  // `file`, or in its debug information elsewhere on this host.
  virtual Source read(const std::string& file, uint64_t place) = 0;
};

// The function that the module exports, with C linkage. The caller owns the
// result.
using OpenSourceReader = SourceReader* (*)();
inline constexpr const char* kOpenSourceReader = "lockstep_open_source_reader";

// Finds functions and the lines of sources for the frames of stacks, in a
// process of its own beside the one that shows a stack: what a frame names may
// be a pipe, or a file that changes while it is read. If the module cannot be
// loaded, that process ends, or the time is over, frames stay as they are. One
// object remembers what it has found, since ranks that fail alike have the same
// frames. For one thread.
class SourceFinder {
 public:
  // `allowed`: how long all calls together may take.
  explicit SourceFinder(
      std::chrono::milliseconds allowed = std::chrono::seconds(5));
  ~SourceFinder();
  SourceFinder(const SourceFinder&) = delete;
  SourceFinder& operator=(const SourceFinder&) = delete;

  // Returns the frames `lines` (native_stack.h, frame_line()) for people:
  // "at::mm(...) +0x1c in libtorch_cpu.so", or, if the line is known,
  // "train() in train at train.cpp:12". A line that is not a frame stays as it
  // is. Throws nothing but std::bad_alloc.
  std::vector<std::string> texts(const std::vector<std::string>& lines);

 private:
  class Process;

  const Source& look_up(const std::string& file, uint64_t place);

  Deadline deadline_;
  std::unique_ptr<Process> process_{};
  bool is_open_ = false;
  std::map<std::pair<std::string, uint64_t>, Source> known_;
};

// Where the threads of a rank are, as it has told when it was asked
// (StatusBoard::ask_stacks()).
struct RankStacks {
  int rank = 0;
  pid_t pid = 0;
  std::string operation{};      // current_operation(); empty if there is none
  std::string missing{};        // why no thread was found, else empty
  std::string flight_record{};  // its path; empty if none was written
  std::vector<ThreadStack> threads{};
};

// Makes the frames of all threads readable (SourceFinder::texts()).
void explain(std::vector<RankStacks>& ranks);

// Sets threads and flight_record of `stacks` to what the rank has written to
// the folder of its attempt for request `number`, and removes the file. Returns
// false, and sets nothing, if there is no such file, or no whole one.
bool take_stacks(const std::filesystem::path& attempt, int32_t number,
                 RankStacks& stacks);

// Returns all stacks as lines of text for people: a paragraph for each rank.
std::string stacks_text(const std::vector<RankStacks>& ranks);

}  // namespace lockstep::internal
