#include "lockstep/checkpoint/rank_failure.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/comm/errors.h"

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

void throw_if_any_failed(const std::string& path,
                         const std::vector<nlohmann::json>& all,
                         const std::exception_ptr& mine) {
  std::vector<size_t> failed;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].contains(kFailed)) failed.push_back(rank);
  }
  if (failed.empty()) return;
  if (mine) std::rethrow_exception(mine);
  RankFailure::from_text(all[failed.front()].at(kFailed).get<std::string>())
      ->throw_for(path, "was not saved: " + list_of_ranks(failed) + ": ");
}

std::string share_outcome(const Ranks& ranks, const std::string& path,
                          const std::string& text,
                          const std::exception_ptr& mine) {
  const std::string shared =
      ranks.share(mine ? RankFailure(mine).text() : " " + text, 0);
  if (mine) std::rethrow_exception(mine);
  if (shared.front() != ' ') {
    RankFailure::from_text(shared)->throw_for(path, "was not saved: rank 0: ");
  }
  return shared.substr(1);
}

}  // namespace lockstep::internal
