#include "lockstep/comm/process_group.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/group_inside.h"

namespace lockstep {

static_assert(kDefaultTimeout == ::kBackendDefaultTimeout);

ProcessGroup::ProcessGroup(std::string name, int rank,
                           std::vector<int> global_ranks,
                           std::chrono::milliseconds timeout,
                           std::string backend_config, bool checks_calls)
    : name_(std::move(name)),
      rank_(rank),
      global_ranks_(std::move(global_ranks)),
      timeout_(timeout),
      backend_config_(std::move(backend_config)),
      checks_calls_(checks_calls) {}

std::string ProcessGroup::failed_peers() const {
  const auto& in = internal::inside(*this);
  std::vector<internal::LifeSigns::Gone> gone;
  if (in.now_.life_signs)
    gone = in.now_.life_signs->gone_for_good(global_ranks_);
  // Whether a rank that left normally is missed is for the backend to judge: it
  // may have given all that its peers need.
  const auto departures = in.departures();
  return departures.empty() ? internal::words_of(gone) : departures;
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

c10::Device ProcessGroup::control_device() const {
  const auto& in = internal::inside(*this);
  if (in.closed_ || in.now_.backends.empty() || in.has_backend(c10::kCPU)) {
    return c10::Device(c10::kCPU);
  }
  const auto& [type, backend] = *in.now_.backends.begin();
  return backend->getBoundDeviceId().value_or(c10::Device(type));
}

void ProcessGroup::abort(const std::string& cause) {
  auto& in = internal::inside(*this);
  if (in.is_foreign()) return;
  in.aborted_ = true;
  std::string first = cause;
  if (first.empty()) {
    const std::lock_guard lock(in.cause_mutex_);
    first = in.cause_;
  }
  std::exception_ptr error;
  for (auto& [type, backend] : in.now_.backends) {
    auto* notices = dynamic_cast<internal::PeerNotices*>(backend.get());
    // It has ended its operations already, and leave() allows no call.
    if (notices != nullptr && in.closed_) continue;
    try {
      if (notices != nullptr && !first.empty()) {
        notices->abort_because(first);
      } else {
        backend->abort();
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
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
