#include "lockstep/checkpoint/rank_failure.h"

#include <stdexcept>

#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/comm/words_of.h"

namespace lockstep::internal {
namespace {

bool is_invalid_argument(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::invalid_argument&) {
    return true;
  } catch (...) {
    return false;
  }
}

// The first character of the text tells which it is.
constexpr char kMistake = '?';
constexpr char kFailure = '!';

}  // namespace

RankFailure::RankFailure(const std::exception_ptr& failure)
    : RankFailure(is_invalid_argument(failure), words_of(failure)) {}

std::optional<RankFailure> RankFailure::from_text(const std::string& text) {
  if (text.empty()) return std::nullopt;
  return RankFailure(text.front() == kMistake, text.substr(1));
}

std::string RankFailure::text() const {
  return (is_mistake_ ? kMistake : kFailure) + words_;
}

void RankFailure::throw_for(const std::string& path,
                            const std::string& problem) const {
  const SnapshotError error(path, problem + words_, "");
  if (is_mistake_) throw std::invalid_argument(error.what());
  throw error;
}

}  // namespace lockstep::internal
