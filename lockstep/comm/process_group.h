#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// The default timeout of collectives, as in Python's torch.distributed.
inline constexpr std::chrono::milliseconds kDefaultTimeout =
    std::chrono::minutes(30);

namespace internal {
class GroupInside;
}  // namespace internal

inline constexpr const char* kDefaultGroupName = "default_pg";

// An ordered set of ranks that communicate, with one backend for each device
// type. Made by init_process_group() and new_group(); shared by handle.
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

  // Returns the peers that this rank knows, by any means, to be gone or to have
  // failed: "rank 3 died"; empty if all are well. For use after a failure. Any
  // thread may call; may ask the store, for a second at most.
  std::string failed_peers() const;

  // The backends that new groups get: "cpu:gloo" or "cpu:gloo,cuda:nccl".
  const std::string& backend_config() const { return backend_config_; }

  // Returns a device whose tensors the group's collectives take: the CPU if the
  // group has a backend for it, otherwise the device, with number, of its first
  // backend.
  c10::Device control_device() const;

  // Leaves the peers at once: operations in which they wait for this rank fail.
  // Operations that are pending here may stay pending. The group is of no use
  // afterwards. `cause` tells which rank failed first and how: peers that share
  // memory with this rank throw these words, up to 443 bytes. If it is empty
  // they are told why an operation of this rank failed before, if another rank
  // was the cause, and otherwise they name this rank. Passes on what a backend
  // throws, after all backends were aborted.
  void abort(const std::string& cause = {});

 private:
  friend class internal::GroupInside;

  ProcessGroup(std::string name, int rank, std::vector<int> global_ranks,
               std::chrono::milliseconds timeout, std::string backend_config,
               bool checks_calls);
  ~ProcessGroup() = default;

  std::string name_;
  int rank_;
  std::vector<int> global_ranks_;
  std::chrono::milliseconds timeout_;
  std::string backend_config_;
  bool checks_calls_;
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
