#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/comm/life_signs.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/trace/flight_recorder.h"

namespace lockstep::internal {

class Deadline;
class DirectReduce;

// The part of a process group that only the library uses: the backends, the
// store by which the ranks found each other, numbers of calls, their records,
// and how the group ends. Every ProcessGroup is one.
class GroupInside final : public ProcessGroup {
 public:
  using Backends = std::map<c10::DeviceType, c10::intrusive_ptr<c10d::Backend>>;

  // The things that a group has until one of its ranks is lost (reconfigure.h).
  struct Generation {
    c10::intrusive_ptr<c10d::Store> store{};  // the group's own part
    std::shared_ptr<LifeSigns> life_signs{};  // of the default group, or none
    Backends backends{};
    bool apart = false;  // groups_are_apart()
  };

  // `global_ranks[i]` is the rank in the default group of this group's rank i.
  GroupInside(std::string name, int rank, std::vector<int> global_ranks,
              std::chrono::milliseconds timeout, Generation generation,
              std::string backend_config, bool checks_calls);
  ~GroupInside();

  // Fails the pending operations of this rank, and those in which peers wait
  // for it, and releases all that the group has. The group is of no use until
  // begin_generation(). No other thread may use the group meanwhile.
  void end_generation();
  // Gives the ranks the numbers that they have in a world of `members`, of
  // which this rank is one; both arguments are origins(), in ascending order.
  // Returns false if a rank of this group is not among them, unless the group
  // has `all` ranks: only such a group goes on with fewer. The others are lost,
  // and their use throws LostGroupError.
  bool renumber(const std::vector<int>& members, const std::vector<int>& all);
  // Whether renumber() has returned false.
  bool is_lost() const { return !why_lost_.empty(); }
  // The ranks of the group, by the numbers that they had when this process made
  // its default group.
  const std::vector<int>& origins() const { return origins_; }
  // For a group that is new: its ranks are those of `world`, the default group.
  void set_world(const GroupInside& world);
  // Gives the group new backends. Calls are numbered from 1 again, and the
  // flight record begins anew: otherwise the numbers of two generations would
  // be compared with each other.
  void begin_generation(Generation generation);
  // Whether this rank has made the group without the others.
  bool is_apart() const { return now_.apart; }

  // The group's own part of the store. A rank that asks in vain for a key is
  // told if a rank of the group is gone (watched_store.h). Throws
  // c10::DistBackendError after end_generation().
  const c10::intrusive_ptr<c10d::Store>& store() const {
    if (!now_.store) refuse_without_generation();
    return now_.store;
  }

  // Throws std::invalid_argument if the group has no backend for tensors of
  // `type` (it names the device types that there are) or was destroyed;
  // c10::DistBackendError after end_generation(); std::runtime_error in a
  // forked child process.
  c10d::Backend& backend(c10::DeviceType type) const;
  bool has_backend(c10::DeviceType type) const {
    return now_.backends.contains(type);
  }

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
  const std::shared_ptr<FlightRecorder>& flight() const { return flight_; }

  // Whether this is the copy in a child process that was forked after the group
  // was made.
  bool is_foreign() const { return made_in_.is_foreign(); }
  // Throws std::runtime_error if is_foreign().
  void require_own_process() const {
    if (is_foreign()) refuse_in_child();
  }

  // Returns what the backends say about peers that are gone or have failed
  // (PeerNotices::departures()); empty if all are well, or the group was
  // destroyed. Any thread.
  std::string departures() const;
  // Returns whether failed_peers() has something to say, as far as this rank
  // knows at once: asks no store and waits for no lock. Any thread.
  bool misses_peers() const;

  // Whether the CPU backend itself notices when any peer goes, and says so in
  // its errors.
  bool hears_departures() const;

  // The CPU backend's shortest way to reduce; nullptr if it has none, or the
  // group was destroyed.
  DirectReduce* direct_reduce() const { return direct_reduce_; }

  // If ranks share memory, waits for pending operations and tells the peers
  // that this rank has left: operations in which they still wait for it fail at
  // once. Later calls throw an error that says so. No other thread may use the
  // group meanwhile.
  void leave();

  // Says that an operation of this rank, in whatever group, failed because of
  // other ranks. If this rank then ends, peers that share memory with it blame
  // `cause` ("rank 3 died"), and not this rank. The first cause counts; the
  // group goes on. Any thread.
  void keep_cause(const std::string& cause);

  // Blocks until the peers have connected to this rank, too, or the deadline is
  // over. Returns at once if a peer is gone, or the group was aborted.
  void await_peers(const Deadline& deadline) const;

  // Calls leave() and then shuts down and releases the backends, unless they
  // were aborted; blocks as their shutdown() and destructors do.
  void close();

 private:
  friend class lockstep::ProcessGroup;

  [[noreturn]] void refuse_in_child() const;
  [[noreturn]] void refuse_without_generation() const;

  const ProcessMark made_in_{};
  std::vector<int> origins_;
  std::string why_lost_{};  // empty if it is not lost
  Generation now_;
  DirectReduce* direct_reduce_ = nullptr;  // one of the backends
  bool closed_ = false;
  bool aborted_ = false;
  std::mutex cause_mutex_;
  std::string cause_;  // the first one given to keep_cause()
  std::shared_ptr<FlightRecorder> flight_;
  std::atomic<uint64_t> sequence_number_{0};
  std::atomic<uint64_t> entries_{0};
  std::atomic<uint64_t> roll_calls_{0};
  std::mutex splits_mutex_;
  std::map<std::vector<int>, uint64_t> splits_;
};

inline GroupInside& inside(ProcessGroup& group) {
  return static_cast<GroupInside&>(group);
}
inline const GroupInside& inside(const ProcessGroup& group) {
  return static_cast<const GroupInside&>(group);
}
inline GroupInside& inside(const ProcessGroupPtr& group) {
  return inside(*group);
}

}  // namespace lockstep::internal
