#include "lockstep/parallel/pipeline/pipeline_failure.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "lockstep/comm/words_of.h"
#include "lockstep/parallel/pipeline/stage_mistake.h"

namespace lockstep::internal {
namespace {

constexpr const char* kKey = "pipeline_failure";

// The first rank that fails writes; the store may be gone.
void write_failure(const std::vector<ProcessGroupPtr>& groups,
                   const std::string& text) {
  for (const ProcessGroupPtr& group : groups) {
    try {
      const auto store = group->store();
      if (!store->check({kKey})) {
        store->set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
      }
    } catch (const std::exception&) {
      // The peers learn from the backend that this rank has left.
    }
  }
}

std::optional<std::string> read_failure(
    const std::vector<ProcessGroupPtr>& groups) {
  for (const ProcessGroupPtr& group : groups) {
    try {
      const auto store = group->store();
      if (!store->check({kKey})) continue;
      const std::vector<uint8_t> bytes = store->get(kKey);
      return std::string(bytes.begin(), bytes.end());
    } catch (const std::exception&) {
      continue;
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

}  // namespace

void fail_together(const std::vector<ProcessGroupPtr>& groups,
                   const std::exception_ptr& failure,
                   const std::string& where) {
  const ProcessGroup& pipeline = *groups.front();
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
    if (words.empty()) words = failed + ": " + error.what_without_backtrace();
    leave(words);
    if (!cause) throw;
    TORCH_CHECK_WITH(DistBackendError, false, *cause, " (noticed by rank ",
                     rank, " ", where, ")");
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
