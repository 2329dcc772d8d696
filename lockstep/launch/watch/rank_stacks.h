#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/worker/native_stack.h"

namespace lockstep::internal {

// Where the threads of a rank are, as it has told when it was asked
// (StatusBoard::ask_stacks()).
struct RankStacks {
  int rank = 0;
  pid_t pid = 0;
  std::string operation{};      // current_operation(); empty if there is none
  std::string missing{};        // why there are no threads; empty if there are
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
