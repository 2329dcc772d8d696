#include "lockstep/comm/group_inside.h"

#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "lockstep/comm/backend_traits.h"

namespace lockstep::internal {

GroupInside::GroupInside(std::string name, int rank,
                         std::vector<int> global_ranks,
                         std::chrono::milliseconds timeout,
                         c10::intrusive_ptr<c10d::Store> store,
                         std::shared_ptr<LifeSigns> life_signs,
                         Backends backends, std::string backend_config,
                         bool checks_calls)
    : ProcessGroup(std::move(name), rank, std::move(global_ranks), timeout,
                   std::move(backend_config), checks_calls),
      store_(std::move(store)),
      backends_(std::move(backends)),
      life_signs_(std::move(life_signs)),
      flight_(FlightRecorder::make({.name = name_,
                                    .rank = rank_,
                                    .ranks = global_ranks_,
                                    .backend = backend_config_})) {
  if (auto cpu = backends_.find(c10::kCPU); cpu != backends_.end()) {
    direct_reduce_ = dynamic_cast<DirectReduce*>(cpu->second.get());
  }
}

GroupInside::~GroupInside() {
  if (!is_foreign()) return;
  // The backends' destructors would wait for threads that only the parent has,
  // and write to sockets and memory that are the parent's.
  (void)std::make_unique<Backends>(std::move(backends_)).release();
  [[maybe_unused]] auto* const kept_store = store_.release();
}

c10d::Backend& GroupInside::backend(c10::DeviceType type) const {
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

void GroupInside::refuse_in_child() const {
  throw std::runtime_error(
      "group '" + name_ + "' belongs to the process that this one (pid " +
      std::to_string(::getpid()) +
      ") was forked from; use it there only, or call init_process_group() in "
      "the child, as a rank of a world of its own");
}

uint64_t GroupInside::next_split(const std::vector<int>& ranks) {
  const std::lock_guard lock(splits_mutex_);
  return ++splits_[ranks];
}

bool GroupInside::hears_departures() const {
  const auto cpu = backends_.find(c10::kCPU);
  if (cpu == backends_.end()) return false;
  const auto* notices = dynamic_cast<const PeerNotices*>(cpu->second.get());
  return notices != nullptr && notices->knows_all_peers();
}

void GroupInside::leave() {
  if (is_foreign()) return;
  closed_ = true;
  direct_reduce_ = nullptr;
  if (aborted_) return;
  for (const auto& [type, backend] : backends_) {
    if (auto* notices = dynamic_cast<PeerNotices*>(backend.get())) {
      notices->leave();
    }
  }
}

void GroupInside::await_peers(const Deadline& deadline) const {
  if (is_foreign() || aborted_) return;
  for (const auto& [type, backend] : backends_) {
    traits_of(*backend).await_peers(deadline);
  }
}

void GroupInside::close() {
  if (is_foreign()) return;
  leave();
  // A backend that was aborted may wait for its peers for ever.
  if (aborted_) return;
  for (const auto& [type, backend] : backends_) {
    if (!traits_of(*backend).needs_shutdown()) continue;
    try {
      backend->shutdown();
    } catch (const std::exception&) {
      // Operations of it have failed, and their works threw that.
    }
  }
  backends_.clear();
}

void GroupInside::keep_cause(const std::string& cause) {
  if (closed_ || is_foreign()) return;
  {
    const std::lock_guard lock(cause_mutex_);
    if (cause_.empty()) cause_ = cause;
  }
  for (auto& [type, backend] : backends_) {
    auto* notices = dynamic_cast<PeerNotices*>(backend.get());
    if (notices != nullptr) notices->keep_cause(cause);
  }
}

}  // namespace lockstep::internal
