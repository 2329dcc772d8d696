#include "lockstep/parallel/join/join.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>

#include "lockstep/comm/collectives.h"

namespace lockstep {

Join::Join(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)), options_(options) {
  if (joinables_.empty()) {
    throw std::invalid_argument(
        "join: there is nothing to join; give at least a "
        "DistributedDataParallel");
  }
  if (std::ranges::find(joinables_, nullptr) != joinables_.end()) {
    throw std::invalid_argument(
        "join: one of the joinables is null; give pointers to objects that "
        "outlive the join");
  }
  group_ = joinables_[0]->join_process_group();
  for (auto* joinable : joinables_) {
    if (joinable->join_process_group() != group_) {
      throw std::invalid_argument(
          "join: the joinables belong to several process groups; all joinables "
          "of one join must have the same group");
    }
    if (joinable->join_ != nullptr) {
      throw std::invalid_argument(
          "join: one of the joinables is in a join already; end that join "
          "first");
    }
  }
  if (!options_.enable) return;
  for (auto* joinable : joinables_) joinable->before_join();
  for (auto* joinable : joinables_) joinable->join_ = this;
}

Join::~Join() {
  for (auto* joinable : joinables_) {
    if (joinable->join_ == this) joinable->join_ = nullptr;
  }
}

const JoinIteration& Join::begin_iteration(const Joinable& joinable,
                                           bool synchronizes, bool trains) {
  if (&joinable != joinables_[0]) {
    if (iteration_.active.empty()) {
      throw std::logic_error(
          "join: the joinable that communicates first in an iteration must be "
          "named first; name a DistributedDataParallel before its optimizer");
    }
    return iteration_;
  }
  iteration_ = exchange(synchronizes ? 3 : trains ? 2 : 1);
  const int size = group_->size();
  if (options_.throw_on_early_termination &&
      static_cast<int>(iteration_.active.size()) < size) {
    for (int rank = 0, at = 0; rank < size; ++rank) {
      if (iteration_.active[at] == rank) {
        if (at + 1 < static_cast<int>(iteration_.active.size())) ++at;
        continue;
      }
      throw std::runtime_error(c10::str(
          "join: rank ", group_->global_rank(rank),
          " has no more inputs, and throw_on_early_termination ends the "
          "others"));
    }
  }
  return iteration_;
}

JoinIteration Join::exchange(int mine) {
  // The options travel with what this rank does.
  constexpr int kDivides = 4;
  constexpr int kThrows = 8;
  const int options = (options_.divide_by_initial_world_size ? kDivides : 0) +
                      (options_.throw_on_early_termination ? kThrows : 0);
  auto flags = at::zeros({group_->size()}, at::kInt);
  flags[group_->rank()] = mine + options;
  flags = flags.to(group_->control_device());
  all_reduce(flags, {.group = group_});
  flags = flags.cpu();
  JoinIteration iteration;
  const auto* of = flags.const_data_ptr<int>();
  for (int rank = 0; rank < group_->size(); ++rank) {
    const int differs = (of[rank] ^ of[0]) & (kDivides + kThrows);
    if (differs != 0) {
      throw std::invalid_argument(c10::str(
          "join: ranks ", group_->global_rank(0), " and ",
          group_->global_rank(rank), " have different values of JoinOptions::",
          (differs & kDivides) != 0 ? "divide_by_initial_world_size"
                                    : "throw_on_early_termination",
          "; give all ranks the same options"));
    }
    const int does = of[rank] % kDivides;
    if (does > 0) iteration.active.push_back(rank);
    if (does > 1) iteration.trains = true;
    if (does > 2) iteration.synchronizes = true;
  }
  return iteration;
}

void Join::finish() {
  if (!options_.enable) return;
  // A rank that never had inputs has not seen any iteration yet.
  int last_joiner = iteration_.active.empty() ? 0 : iteration_.active.back();
  while (true) {
    auto iteration = exchange(0);
    if (iteration.active.empty()) break;
    last_joiner = iteration.active.back();
    if (options_.throw_on_early_termination) {
      throw std::runtime_error(
          c10::str("join: rank ", group_->global_rank(group_->rank()),
                   " has no more inputs, and throw_on_early_termination ends "
                   "the others"));
    }
    for (auto* joinable : joinables_) joinable->shadow(iteration, options_);
  }
  for (auto* joinable : joinables_) joinable->after_join(last_joiner);
}

}  // namespace lockstep
