#include "lockstep/parallel/pipeline/pipeline_failure.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/last_words.h"
#include "lockstep/comm/roll_call.h"

namespace lockstep::internal {
namespace {

constexpr const char* kKey = "pipeline_failure";

// The ranks that wait for a silent one run out of time one after the other,
// about as far apart as they began to wait.
constexpr std::chrono::seconds kAnswer{2};

// The first rank that fails writes; the store may be gone.
void write_failure(const std::vector<ProcessGroupPtr>& groups,
                   const std::string& text) {
  for (const ProcessGroupPtr& group : groups) {
    try {
      LastWords(*inside(group).store(), kKey).say(text);
    } catch (const std::exception&) {
      // The peers learn from the backend that this rank has left.
    }
  }
}

std::optional<std::string> read_failure(
    const std::vector<ProcessGroupPtr>& groups) {
  for (const ProcessGroupPtr& group : groups) {
    try {
      if (auto text = LastWords(*inside(group).store(), kKey).heard())
        return text;
    } catch (const std::exception&) {
      // The store is gone; the next group's may live.
    }
  }
  return std::nullopt;
}

// Returns what the first group knows that knows of peers that are gone.
std::string failed_peers(const std::vector<ProcessGroupPtr>& groups) {
  std::string words;
  for (const ProcessGroupPtr& group : groups) {
    if ((words = group->failed_peers()).empty()) continue;
    break;
  }
  return words;
}

// Asks all ranks of the pipeline, over the store, which of them have failed,
// too. Returns which do not answer: "rank 2 did not come in time"; "" if all
// do, or if the backend itself knows which rank it waits for.
std::string silent_peers(ProcessGroup& pipeline) {
  if (pipeline.size() == 1 || inside(pipeline).hears_departures()) return "";
  try {
    roll_call(pipeline, "", Deadline::after(kAnswer));
  } catch (const RollCallError& error) {
    return error.what();
  } catch (const std::exception&) {
    // The store is gone.
  }
  return "";
}

}  // namespace

void fail_together(const std::vector<ProcessGroupPtr>& groups,
                   const std::exception_ptr& failure,
                   const std::string& where) {
  ProcessGroup& pipeline = *groups.front();
  const int rank = pipeline.global_rank(pipeline.rank());
  const auto leave = [&](const std::string& text) {
    if (pipeline.size() == 1) return;  // no rank waits for this one
    write_failure(groups, text);
    for (const ProcessGroupPtr& group : groups) group->abort(text);
  };
  const std::string failed =
      c10::str("pipeline: rank ", rank, " failed ", where);
  try {
    std::rethrow_exception(failure);
  } catch (const c10::DistError& error) {
    const auto cause = read_failure(groups);
    // Ranks that do not talk with the one that failed or died learn of it from
    // this one, in the words that tell of that rank.
    std::string words = cause.value_or(failed_peers(groups));
    std::string silent;
    if (words.empty()) {
      silent = silent_peers(pipeline);
      words = failed + ": " + error.what_without_backtrace();
      if (!silent.empty()) words += "; of the pipeline's ranks, " + silent;
    }
    leave(words);
    if (!silent.empty()) throw c10::DistBackendError(words);
    if (!cause) throw;
    throw c10::DistBackendError(
        c10::str(*cause, " (noticed by rank ", rank, " ", where, ")"));
  } catch (const StageMistake& mistake) {
    const std::string text = failed + ": " + mistake.what();
    leave(text);
    throw std::invalid_argument(text);
  } catch (...) {
    leave(failed + ": " + words_of(failure));
    throw;
  }
  std::rethrow_exception(failure);
}

}  // namespace lockstep::internal
