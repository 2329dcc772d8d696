#include "lockstep/comm/process_group.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/backend_traits.h"

namespace lockstep {

ProcessGroup::ProcessGroup(std::string name, int rank,
                           std::vector<int> global_ranks,
                           std::chrono::milliseconds timeout,
                           c10::intrusive_ptr<c10d::Store> store,
                           std::shared_ptr<internal::LifeSigns> life_signs,
                           Backends backends, std::string backend_config,
                           bool checks_calls)
    : name_(std::move(name)),
      rank_(rank),
      global_ranks_(std::move(global_ranks)),
      timeout_(timeout),
      store_(std::move(store)),
      life_signs_(std::move(life_signs)),
      backends_(std::move(backends)),
      backend_config_(std::move(backend_config)),
      checks_calls_(checks_calls),
      flight_(internal::FlightRecorder::make({.name = name_,
                                              .rank = rank_,
                                              .ranks = global_ranks_,
                                              .backend = backend_config_})) {
  if (auto cpu = backends_.find(c10::kCPU); cpu != backends_.end()) {
    direct_reduce_ = dynamic_cast<internal::DirectReduce*>(cpu->second.get());
  }
}

ProcessGroup::~ProcessGroup() {
  if (!made_in_.is_foreign()) return;
  // The backends' destructors would wait for threads that only the parent has,
  // and write to sockets and memory that are the parent's.
  (void)std::make_unique<Backends>(std::move(backends_)).release();
  [[maybe_unused]] auto* const kept_store = store_.release();
}

void ProcessGroup::refuse_in_child() const {
  throw std::runtime_error(
      "group '" + name_ + "' belongs to the process that this one (pid " +
      std::to_string(::getpid()) +
      ") was forked from; use it there only, or call init_process_group() in "
      "the child, as a rank of a world of its own");
}

std::string ProcessGroup::failed_peers() const {
  std::vector<internal::LifeSigns::Gone> gone;
  if (life_signs_) gone = life_signs_->gone_for_good(global_ranks_);
  // Whether a rank that left in peace is missed is for the backend to judge: it
  // may have given all that its peers need.
  std::string words = internal::words_of(gone);
  if (closed_) return words;
  for (const auto& [type, backend] : backends_) {
    const auto* notices =
        dynamic_cast<const internal::PeerNotices*>(backend.get());
    if (notices == nullptr) continue;
    const auto departures = notices->departures();
    if (!departures.empty()) return departures;
  }
  return words;
}

uint64_t ProcessGroup::next_split(const std::vector<int>& ranks) {
  const std::lock_guard lock(splits_mutex_);
  return ++splits_[ranks];
}

bool ProcessGroup::hears_departures() const {
  const auto cpu = backends_.find(c10::kCPU);
  if (cpu == backends_.end()) return false;
  const auto* notices =
      dynamic_cast<const internal::PeerNotices*>(cpu->second.get());
  return notices != nullptr && notices->knows_all_peers();
}

int ProcessGroup::group_rank(int global_rank) const {
  auto found =
      std::find(global_ranks_.begin(), global_ranks_.end(), global_rank);
  if (found == global_ranks_.end()) {
    throw std::invalid_argument(
        "rank " + std::to_string(global_rank) + " is not a member of group '" +
        name_ + "', whose ranks are " + c10::str(global_ranks_));
  }
  return static_cast<int>(found - global_ranks_.begin());
}

int ProcessGroup::global_rank(int group_rank) const {
  if (group_rank < 0 || group_rank >= size()) {
    throw std::invalid_argument(
        "group rank " + std::to_string(group_rank) + " is not in group '" +
        name_ + "', whose ranks are 0 to " + std::to_string(size() - 1));
  }
  return global_ranks_[group_rank];
}

c10d::Backend& ProcessGroup::backend(c10::DeviceType type) const {
  require_own_process();
  if (closed_) {
    throw std::invalid_argument("group '" + name_ +
                                "' was destroyed; use a group that lives, or "
                                "destroy it after its last operation");
  }
  auto found = backends_.find(type);
  if (found == backends_.end()) {
    throw std::invalid_argument(
        "group '" + name_ + "' has no backend for tensors on " +
        c10::DeviceTypeName(type, /*lower_case=*/true) +
        ", its backends are \"" + backend_config_ +
        "\"; name one in init_process_group(\"device:backend,...\")");
  }
  return *found->second;
}

c10::Device ProcessGroup::control_device() const {
  if (closed_ || has_backend(c10::kCPU)) return c10::Device(c10::kCPU);
  return c10::Device(backends_.begin()->first);
}

void ProcessGroup::leave() {
  if (made_in_.is_foreign()) return;
  closed_ = true;
  direct_reduce_ = nullptr;
  if (aborted_) return;
  for (const auto& [type, backend] : backends_) {
    if (auto* notices = dynamic_cast<internal::PeerNotices*>(backend.get())) {
      notices->leave();
    }
  }
}

void ProcessGroup::await_peers(const internal::Deadline& deadline) const {
  if (made_in_.is_foreign() || aborted_) return;
  for (const auto& [type, backend] : backends_) {
    internal::traits_of(*backend).await_peers(deadline);
  }
}

void ProcessGroup::close() {
  if (made_in_.is_foreign()) return;
  leave();
  // A backend that was aborted may wait for its peers for ever.
  if (!aborted_) backends_.clear();
}

void ProcessGroup::abort(const std::string& cause) {
  if (made_in_.is_foreign()) return;
  aborted_ = true;
  std::string first = cause;
  if (first.empty()) {
    const std::lock_guard lock(cause_mutex_);
    first = cause_;
  }
  for (auto& [type, backend] : backends_) {
    auto* notices = dynamic_cast<internal::PeerNotices*>(backend.get());
    if (notices != nullptr && !first.empty()) {
      notices->abort_because(first);
    } else {
      backend->abort();
    }
  }
}

void ProcessGroup::keep_cause(const std::string& cause) {
  if (closed_ || made_in_.is_foreign()) return;
  {
    const std::lock_guard lock(cause_mutex_);
    if (cause_.empty()) cause_ = cause;
  }
  for (auto& [type, backend] : backends_) {
    auto* notices = dynamic_cast<internal::PeerNotices*>(backend.get());
    if (notices != nullptr) notices->keep_cause(cause);
  }
}

ProcessGroupPtr ProcessGroupPtr::not_a_member(std::string refusal) {
  ProcessGroupPtr handle;
  handle.refusal_ = std::make_shared<const std::string>(std::move(refusal));
  return handle;
}

void ProcessGroupPtr::refuse() const {
  throw std::invalid_argument(
      refusal_ ? *refusal_
               : "the handle of a process group is null; default_group() "
                 "returns the default group");
}

}  // namespace lockstep
