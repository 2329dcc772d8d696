#include "lockstep/comm/group_inside.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <c10/util/Exception.h>

#include "lockstep/base/number_list.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/reconfigure.h"

namespace lockstep::internal {

GroupInside::GroupInside(std::string name, int rank,
                         std::vector<int> global_ranks,
                         std::chrono::milliseconds timeout,
                         Generation generation, std::string backend_config,
                         bool checks_calls)
    : ProcessGroup(std::move(name), rank, std::move(global_ranks), timeout,
                   std::move(backend_config), checks_calls),
      origins_(global_ranks_) {
  begin_generation(std::move(generation));
}

void GroupInside::begin_generation(Generation generation) {
  now_ = std::move(generation);
  const auto cpu = now_.backends.find(c10::kCPU);
  direct_reduce_ = cpu == now_.backends.end()
                       ? nullptr
                       : dynamic_cast<DirectReduce*>(cpu->second.get());
  aborted_ = false;
  {
    const std::lock_guard lock(cause_mutex_);
    cause_.clear();
  }
  flight_ = FlightRecorder::make({.name = name_,
                                  .rank = rank_,
                                  .ranks = global_ranks_,
                                  .backend = backend_config_});
  sequence_number_ = entries_ = roll_calls_ = 0;
}

void GroupInside::end_generation() {
  if (!now_.backends.empty()) {
    try {
      abort();
    } catch (const std::exception&) {
      // A connection of a backend is broken already.
    }
  }
  direct_reduce_ = nullptr;
  now_.backends.clear();
  now_.store.reset();
  now_.life_signs.reset();
}

bool GroupInside::renumber(const std::vector<int>& members,
                           const std::vector<int>& all) {
  if (is_lost()) return false;
  std::vector<int> left;
  std::vector<int> numbers;
  std::vector<int> lost;
  for (size_t at = 0; at < origins_.size(); ++at) {
    const auto member = std::ranges::find(members, origins_[at]);
    if (member == members.end()) {
      lost.push_back(global_ranks_[at]);
    } else {
      left.push_back(origins_[at]);
      numbers.push_back(static_cast<int>(member - members.begin()));
    }
  }
  if (!lost.empty() && origins_ != all) {
    why_lost_ = "group '" + name_ + "' of " +
                name_numbers("rank", global_ranks_) + " has lost " +
                name_numbers("rank", lost) +
                ", and the job goes on with fewer ranks (--heal=shrink); use "
                "the default group, or give --heal";
    return false;
  }
  if (!lost.empty()) {
    const std::lock_guard lock(splits_mutex_);
    splits_.clear();  // the same numbers are other ranks now
  }
  const int own = origins_[static_cast<size_t>(rank_)];
  rank_ = static_cast<int>(std::ranges::find(left, own) - left.begin());
  global_ranks_ = std::move(numbers);
  origins_ = std::move(left);
  return true;
}

void GroupInside::set_world(const GroupInside& world) {
  for (int& origin : origins_) {
    origin = world.origins_[static_cast<size_t>(origin)];
  }
}

GroupInside::~GroupInside() {
  if (!is_foreign()) return;
  // The backends' destructors would wait for threads that only the parent has,
  // and write to sockets and memory that are the parent's.
  (void)std::make_unique<Generation>(std::move(now_)).release();
}

c10d::Backend& GroupInside::backend(c10::DeviceType type) const {
  require_own_process();
  if (closed_) {
    throw std::invalid_argument("group '" + name_ +
                                "' was destroyed; use a group that lives, or "
                                "destroy it after its last operation");
  }
  if (now_.backends.empty()) refuse_without_generation();
  auto found = now_.backends.find(type);
  if (found == now_.backends.end()) {
    throw std::invalid_argument(
        "group '" + name_ + "' has no backend for tensors on " +
        c10::DeviceTypeName(type, /*lower_case=*/true) +
        ", its backends are \"" + backend_config_ +
        "\"; name one in init_process_group(\"device:backend,...\")");
  }
  return *found->second;
}

void GroupInside::refuse_in_child() const {
  throw std::runtime_error(
      "group '" + name_ + "' belongs to the process that this one (pid " +
      std::to_string(::getpid()) +
      ") was forked from; use it there only, or call init_process_group() in "
      "the child, as a rank of a world of its own");
}

void GroupInside::refuse_without_generation() const {
  if (is_lost()) throw LostGroupError(why_lost_);
  throw c10::DistBackendError(
      "group '" + name_ +
      "' has lost a rank, and reconfigure() has not made it again");
}

uint64_t GroupInside::next_split(const std::vector<int>& ranks) {
  const std::lock_guard lock(splits_mutex_);
  return ++splits_[ranks];
}

std::string GroupInside::departures() const {
  if (closed_) return {};
  for (const auto& [type, backend] : now_.backends) {
    const auto* notices = dynamic_cast<const PeerNotices*>(backend.get());
    if (notices == nullptr) continue;
    auto departures = notices->departures();
    if (!departures.empty()) return departures;
  }
  return {};
}

bool GroupInside::misses_peers() const {
  return (now_.life_signs && now_.life_signs->misses_any(global_ranks_)) ||
         !departures().empty();
}

bool GroupInside::hears_departures() const {
  const auto cpu = now_.backends.find(c10::kCPU);
  if (cpu == now_.backends.end()) return false;
  const auto* notices = dynamic_cast<const PeerNotices*>(cpu->second.get());
  return notices != nullptr && notices->knows_all_peers();
}

void GroupInside::leave() {
  if (is_foreign()) return;
  closed_ = true;
  direct_reduce_ = nullptr;
  if (aborted_) return;
  for (const auto& [type, backend] : now_.backends) {
    if (auto* notices = dynamic_cast<PeerNotices*>(backend.get())) {
      notices->leave();
    }
  }
}

void GroupInside::await_peers(const Deadline& deadline) const {
  if (is_foreign() || aborted_) return;
  for (const auto& [type, backend] : now_.backends) {
    traits_of(*backend).await_peers(deadline);
  }
}

void GroupInside::close() {
  if (is_foreign()) return;
  leave();
  // A backend that was aborted may wait for its peers for ever.
  if (aborted_) return;
  for (const auto& [type, backend] : now_.backends) {
    if (!traits_of(*backend).needs_shutdown()) continue;
    try {
      backend->shutdown();
    } catch (const std::exception&) {
      // Operations of it have failed, and their works threw that.
    }
  }
  now_.backends.clear();
}

void GroupInside::keep_cause(const std::string& cause) {
  if (closed_ || is_foreign()) return;
  {
    const std::lock_guard lock(cause_mutex_);
    if (cause_.empty()) cause_ = cause;
  }
  for (auto& [type, backend] : now_.backends) {
    auto* notices = dynamic_cast<PeerNotices*>(backend.get());
    if (notices != nullptr) notices->keep_cause(cause);
  }
}

}  // namespace lockstep::internal
