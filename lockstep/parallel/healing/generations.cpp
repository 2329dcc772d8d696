#include "lockstep/parallel/healing/generations.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/reconfigure.h"

namespace lockstep::internal {
namespace {

// How long a rank whose group failed waits for the launcher to say that a rank
// is replaced: if it knows that one is gone, and if it does not. The launcher
// waits for a standby process for 30 s, and then ends the attempt.
constexpr std::chrono::seconds kReplacedWithin{60};
constexpr std::chrono::seconds kLearnedWithin{10};
// How often a rank that waits looks whether another's training has ended.
constexpr std::chrono::seconds kLookEvery{1};
// How long the launcher's store may take for an answer: also while it is lost
// with its host, and the agents meet at another one.
constexpr std::chrono::milliseconds kStoreTimeout{20'000};

c10::intrusive_ptr<LauncherStore> launcher_store() {
  const auto socket = get_env("LOCKSTEP_STORE");
  if (!socket) {
    throw std::invalid_argument(
        "HealedTraining: the ranks of this job do not meet at the launcher's "
        "store, which healing needs; leave out --worker-store and "
        "LOCKSTEP_WORKER_STORE");
  }
  return c10::make_intrusive<LauncherStore>(*socket, kStoreTimeout);
}

// Returns the causes without what peers have said of them.
std::string own_words(std::string causes) {
  for (size_t at; (at = causes.find(": rank ")) != causes.npos;) {
    causes.erase(at, causes.find("; rank ", at) - at);
  }
  return causes;
}

}  // namespace

Generations::Generations() : store_(launcher_store()) {
  const int joined = generation_joined();
  if (joined > 0) places_ = notice_of(joined).places;
  if (places_.empty()) {
    places_.resize(static_cast<size_t>(get_world_size()));
    std::iota(places_.begin(), places_.end(), 0);
  }
  place_ = places_.at(static_cast<size_t>(get_rank()));
  if (groups_are_apart()) number_ = joined - 1;
}

GenerationNotice Generations::notice_of(int generation) {
  return generation_notice_of(store_->get_to_str(generation_key(generation)));
}

std::vector<int> Generations::members(const GenerationNotice& notice) const {
  std::vector<int> members;
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (std::ranges::count(notice.places, places_[rank]) > 0) {
      members.push_back(static_cast<int>(rank));
    }
  }
  return members;
}

void Generations::look(bool joins) {
  if (is_superseded()) throw Superseded();
  if (joins && store_->check({training_ended_key()})) {
    tell_agent_heals(false);  // another process would find the same
    throw std::runtime_error(
        "HealedTraining: this process takes the place of a rank that died, "
        "and another rank has ended its training meanwhile; all ranks begin "
        "again from the last snapshot");
  }
}

bool Generations::comes_within(const std::string& key,
                               std::chrono::milliseconds time) {
  try {
    store_->wait({key}, time);
    return true;
  } catch (const c10::DistError&) {
    return false;
  }
}

// Also if the launcher has gone.
bool Generations::training_has_ended() {
  try {
    return store_->check({training_ended_key()});
  } catch (const c10::DistError&) {
    return true;
  }
}

bool Generations::is_superseded() {
  return store_->check({generation_key(number_ + 1)});
}

GenerationNotice Generations::await(const std::exception_ptr& failure,
                                    bool is_next) {
  const bool knows = !failure || is_next || groups_are_apart() ||
                     !default_group()->failed_peers().empty();
  const auto deadline =
      Deadline::after(knows ? kReplacedWithin : kLearnedWithin);
  const std::string next = generation_key(number_ + 1);
  // No time at all would mean no limit to the store.
  while (!comes_within(next, std::clamp<std::chrono::milliseconds>(
                                 deadline.remaining(),
                                 std::chrono::milliseconds(1), kLookEvery))) {
    if (!deadline.expired() && !training_has_ended()) continue;
    if (failure) std::rethrow_exception(failure);
    throw std::runtime_error(
        "HealedTraining: this process takes the place of a rank that died, "
        "and the launcher has not announced it");
  }
  GenerationNotice notice;
  std::string causes;
  do {
    notice = notice_of(++number_);
    require_own_place(notice);
    causes += (causes.empty() ? "" : "; ") + own_words(notice.cause);
  } while (is_superseded());
  notice.cause = std::move(causes);
  tell_agent(notice);
  return notice;
}

void Generations::tell_agent(const GenerationNotice& notice) const {
  const auto& places = notice.places.empty() ? places_ : notice.places;
  const auto rank = std::ranges::lower_bound(places, place_) - places.begin();
  tell_agent_generation(number_, static_cast<int>(rank),
                        static_cast<int>(places.size()));
}

void Generations::require_own_place(const GenerationNotice& notice) const {
  if (number_ <= generation_joined()) return;
  if (std::ranges::count(notice.lost, place_) == 0) return;
  throw std::runtime_error(
      "HealedTraining: the job goes on without this process, whose node was "
      "given up: " +
      notice.cause);
}

void Generations::end_training() {
  try {
    store_->set(training_ended_key(), std::vector<uint8_t>{1});
  } catch (const c10::DistError&) {
    // The launcher has gone.
  }
}

}  // namespace lockstep::internal
