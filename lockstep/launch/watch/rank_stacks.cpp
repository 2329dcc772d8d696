#include "lockstep/launch/watch/rank_stacks.h"

#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "lockstep/base/shown_text.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/launch/watch/source_finder.h"
#include "lockstep/worker/native_stack.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {
namespace {

// A thread takes some kilobytes, and a rank has some hundred threads at most.
constexpr size_t kMostStacksBytes = 64 << 20;

}  // namespace

bool take_stacks(const std::filesystem::path& attempt, int32_t number,
                 RankStacks& stacks) {
  using nlohmann::json;
  const std::string name = StatusBoard::stacks_file(number, stacks.rank);
  const auto bytes = read_left_file(attempt, name, kMostStacksBytes);
  const json written =
      json::parse(bytes.value_or(""), nullptr, /*allow_exceptions=*/false);
  std::error_code ignored;
  std::filesystem::remove(attempt / name, ignored);
  try {
    std::vector<ThreadStack> threads;
    for (const json& thread : written.at("threads")) {
      threads.push_back(
          {.thread = thread.at("thread"),
           .name = thread.at("name"),
           .frames = thread.at("frames").get<std::vector<std::string>>(),
           .missing = thread.at("missing")});
    }
    stacks.flight_record = written.at("flight_record");
    stacks.threads = std::move(threads);
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

void explain(std::vector<RankStacks>& ranks) {
  SourceFinder sources;
  for (RankStacks& rank : ranks) {
    for (ThreadStack& thread : rank.threads) {
      thread.frames = sources.texts(thread.frames);
    }
  }
}

std::string stacks_text(const std::vector<RankStacks>& ranks) {
  std::string text;
  for (const RankStacks& rank : ranks) {
    text += "rank " + std::to_string(rank.rank) + ", process " +
            std::to_string(rank.pid);
    if (!rank.operation.empty()) text += ", in " + rank.operation;
    text += rank.missing.empty() ? "\n" : ": " + rank.missing + "\n";
    for (const ThreadStack& thread : rank.threads) {
      text += "  thread " + std::to_string(thread.thread) + ", " + thread.name;
      text += thread.missing.empty() ? "\n" : ": " + thread.missing + "\n";
      for (const auto& frame : folded_frames(thread.frames)) {
        text += "    " + frame + "\n";
      }
    }
    text += '\n';
  }
  return shown_text(text);
}

}  // namespace lockstep::internal
