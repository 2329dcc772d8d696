#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "lockstep/base/process_mark.h"
#include "lockstep/comm/life_signs.h"
#include "lockstep/trace/flight_recorder.h"

namespace lockstep {

// The default timeout of collectives in Python's torch.distributed: 30 minutes
// (kBackendDefaultTimeout of c10d).
inline constexpr std::chrono::milliseconds kDefaultTimeout =
    ::kBackendDefaultTimeout;

namespace internal {
class Deadline;
class DirectReduce;
}  // namespace internal

inline constexpr const char* kDefaultGroupName = "default_pg";

// An ordered set of ranks that communicate: it has one c10d::Backend for each
// device type, and the store by which the ranks found each other. Made by
// init_process_group() and new_group(); shared by handle.
//
// Threads: the accessors may be called from any thread. Collectives of one
// group must be issued in the same order on every rank, so issue them from one
// thread or order them yourself.
//
// A child process that is forked later holds a copy that is of no use: its
// operations throw std::runtime_error, and its end leaves the parent's group
// alone.
class ProcessGroup {
 public:
  using Backends = std::map<c10::DeviceType, c10::intrusive_ptr<c10d::Backend>>;

  // `global_ranks[i]` is the rank in the default group of this group's rank i.
  // `life_signs` are those of the default group, or none.
  ProcessGroup(std::string name, int rank, std::vector<int> global_ranks,
               std::chrono::milliseconds timeout,
               c10::intrusive_ptr<c10d::Store> store,
               std::shared_ptr<internal::LifeSigns> life_signs,
               Backends backends, std::string backend_config,
               bool checks_calls);
  ~ProcessGroup();

  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  // "default_pg", or the number that Python gives a new group ("1", "2", ...).
  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(global_ranks_.size()); }
  const std::vector<int>& global_ranks() const { return global_ranks_; }

  // Returns the rank in this group of the default group's rank `global_rank`.
  // Throws std::invalid_argument if that is not a member.
  int group_rank(int global_rank) const;

  // Returns the rank in the default group of this group's rank `group_rank`.
  // Throws std::invalid_argument if there is none.
  int global_rank(int group_rank) const;

  // The timeout of collectives that are given none.
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Whether every rank's description of each collective (operation, number,
  // reduce operation, root, shapes, dtype) is compared before it starts, so
  // that ranks that disagree, or do not come, are named on every rank instead
  // of hanging or computing nonsense. For finding mistakes: it costs two
  // exchanges more for each call, over the store, and all ranks must be
  // Lockstep's. It is on if TORCH_DISTRIBUTED_DEBUG is DETAIL, as in Python, or
  // InitProcessGroupOptions::check_calls says so. Point-to-point operations are
  // not compared.
  bool checks_calls() const { return checks_calls_; }

  // Numbers the collectives of this group from 1, in the order in which they
  // are called; equal on all ranks as long as the ranks make the same calls.
  uint64_t next_sequence_number() { return ++sequence_number_; }
  // Numbers the collectives without reductions of buckets: CurrentCall::entry.
  uint64_t next_entry() { return ++entries_; }
  // Numbers the roll calls (roll_call.h).
  uint64_t next_roll_call() { return ++roll_calls_; }
  // Numbers the groups that split_group() makes of the same `ranks` of this
  // group. Only these ranks count, so that the others need not call.
  uint64_t next_split(const std::vector<int>& ranks);

  // The last operations of this group (docs/flight-recorder.md), recorded by
  // Operation. Never null; shared with operations that outlive the group.
  const std::shared_ptr<internal::FlightRecorder>& flight() const {
    return flight_;
  }

  // The group's own part of the store. A rank that asks in vain for a key is
  // told if a rank of the group is gone (watched_store.h).
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // Returns the peers that this rank knows, by any means, to be gone or to have
  // failed: "rank 3 died"; empty if all are well. For use after a failure. Any
  // thread may call; may ask the store.
  std::string failed_peers() const;

  // Whether this is the copy in a child process that was forked after the group
  // was made.
  bool is_foreign() const { return made_in_.is_foreign(); }
  // Throws std::runtime_error if is_foreign().
  void require_own_process() const {
    if (made_in_.is_foreign()) refuse_in_child();
  }

  // The backends that new groups get: "cpu:gloo" or "cpu:gloo,cuda:nccl".
  const std::string& backend_config() const { return backend_config_; }

  // Whether the CPU backend itself notices when any peer goes, and says so in
  // its errors.
  bool hears_departures() const;

  // Throws std::invalid_argument if the group has no backend for tensors of
  // `type` (it names the device types that there are) or was destroyed;
  // std::runtime_error in a forked child process.
  c10d::Backend& backend(c10::DeviceType type) const;
  bool has_backend(c10::DeviceType type) const {
    return backends_.contains(type);
  }

  // The CPU backend's shortest way to reduce; nullptr if it has none, or the
  // group was destroyed.
  internal::DirectReduce* direct_reduce() const { return direct_reduce_; }

  // The device of tensors that only the library sees: the CPU if the group has
  // a backend for it, otherwise the device type of its first backend.
  c10::Device control_device() const;

  // If ranks share memory, waits for pending operations and tells the peers
  // that this rank has left: operations in which they still wait for it fail at
  // once. Later calls throw an error that says so. No other thread may use the
  // group meanwhile.
  void leave();

  // Leaves the peers at once: operations in which they wait for this rank fail.
  // Operations that are pending here may stay pending. The group is of no use
  // afterwards. `cause` tells which rank failed first and how: peers that share
  // memory with this rank throw these words, up to 443 bytes. If it is empty
  // they throw what keep_cause() was given; if that is empty they name this
  // rank.
  void abort(const std::string& cause = {});

  // Says that an operation of this rank, in whatever group, failed because of
  // other ranks. If this rank then ends, peers that share memory with it blame
  // `cause` ("rank 3 died"), and not this rank. The first cause counts; the
  // group goes on. Any thread.
  void keep_cause(const std::string& cause);

  // Blocks until the peers have connected to this rank, too, or the deadline is
  // over. Returns at once if a peer is gone, or the group was aborted.
  void await_peers(const internal::Deadline& deadline) const;

  // Calls leave() and then releases the backends, unless they were aborted;
  // blocks as their destructors do.
  void close();

 private:
  [[noreturn]] void refuse_in_child() const;

  const internal::ProcessMark made_in_{};
  std::string name_;
  int rank_;
  std::vector<int> global_ranks_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<internal::LifeSigns> life_signs_;
  Backends backends_;
  internal::DirectReduce* direct_reduce_ = nullptr;  // one of the backends
  std::string backend_config_;
  bool checks_calls_;
  bool closed_ = false;
  bool aborted_ = false;
  std::mutex cause_mutex_;
  std::string cause_;  // the first one given to keep_cause()
  std::shared_ptr<internal::FlightRecorder> flight_;
  std::atomic<uint64_t> sequence_number_{0};
  std::atomic<uint64_t> entries_{0};
  std::atomic<uint64_t> roll_calls_{0};
  std::mutex splits_mutex_;
  std::map<std::vector<int>, uint64_t> splits_;
};

// A handle of a process group; copies share the group. It is one of three
// things:
//
// - a group that this rank is a member of;
// - null, the default, which stands for the default group wherever a group is
//   expected;
// - what new_group() and the functions like it return to a rank that is not in
//   the new group. As a condition it is false, as null is, but it does not
//   stand for the default group: whatever it is given to (a collective, an
//   option, a constructor), and `->`, throws std::invalid_argument that names
//   the ranks.
//
//   if (auto group = new_group({0, 1})) all_reduce(x, {.group = group});
class ProcessGroupPtr {
 public:
  ProcessGroupPtr() = default;
  ProcessGroupPtr(std::nullptr_t) {}
  ProcessGroupPtr(std::shared_ptr<ProcessGroup> group)
      : group_(std::move(group)) {}
  // The handle of a rank that is not a member. `refusal` is what is thrown.
  static ProcessGroupPtr not_a_member(std::string refusal);

  explicit operator bool() const { return group_ != nullptr; }
  ProcessGroup* get() const { return group_.get(); }
  // Throw std::invalid_argument if there is no group.
  ProcessGroup& operator*() const {
    if (!group_) refuse();
    return *group_;
  }
  ProcessGroup* operator->() const { return &**this; }

  // Throws std::invalid_argument if the handle was given to a rank that is not
  // a member of the group. Returns this handle, which may be null.
  const ProcessGroupPtr& require_member() const {
    if (refusal_) refuse();
    return *this;
  }

  void reset() { *this = ProcessGroupPtr(); }

  friend bool operator==(const ProcessGroupPtr&,
                         const ProcessGroupPtr&) = default;
  // Whether the handle is false as a condition.
  friend bool operator==(const ProcessGroupPtr& group, std::nullptr_t) {
    return !group;
  }

 private:
  [[noreturn]] void refuse() const;

  std::shared_ptr<ProcessGroup> group_{};
  std::shared_ptr<const std::string> refusal_{};  // if not a member
};

}  // namespace lockstep
