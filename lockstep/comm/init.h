#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// After torch.distributed.init_process_group (PyTorch documentation,
// "Distributed communication package", Initialization).
struct InitProcessGroupOptions {
  // How the ranks find each other:
  //   env://                 RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If
  //                          none of them is set this process is a world of
  //                          its own; if some are, an error names the others.
  //                          With "mpi" the ranks are MPI's if neither RANK nor
  //                          WORLD_SIZE is set (docs/mpi.md).
  //   tcp://host:port        rank and world_size below, or ?rank=R&world_size=N
  //   file:///path           a file on a file system that all ranks share
  // Must be empty if `store` is given. Empty means env://.
  std::string init_method{};
  // Of init_process_group itself (how long to wait for the others) and of
  // every collective without a timeout of its own. More than 0; what is longer
  // than 24 days means 24 days.
  std::chrono::milliseconds timeout{kDefaultTimeout};
  int world_size{-1};
  int rank{-1};
  // A store that all ranks share, instead of an init_method; rank and
  // world_size are required then.
  c10::intrusive_ptr<c10d::Store> store{};
  // See ProcessGroup::checks_calls(); the same on all ranks. Unset: as
  // TORCH_DISTRIBUTED_DEBUG=DETAIL says.
  std::optional<bool> check_calls{};
  // Whether an exception that nobody catches is told in one line on stderr and
  // to the launcher (record.h), instead of with LibTorch's frames. A terminate
  // handler that the program has set is called after that. False leaves the
  // handling of such exceptions alone.
  bool report_uncaught{true};
};

// Destroys the default group when it goes out of scope, unless
// destroy_process_group() did. While an exception is being thrown, pending
// operations are failed, not waited for, and so are those of the peers that
// wait for this rank.
//
// A guard stands for its group wherever a ProcessGroupPtr is expected:
//
//   auto group = init_process_group();
//   all_reduce(tensor, {.group = group});
class [[nodiscard]] ProcessGroupGuard {
 public:
  explicit ProcessGroupGuard(ProcessGroupPtr group);
  ProcessGroupGuard(ProcessGroupGuard&&) noexcept = default;
  ProcessGroupGuard& operator=(ProcessGroupGuard&&) = delete;
  ~ProcessGroupGuard();

  const ProcessGroupPtr& get() const { return group_; }
  operator const ProcessGroupPtr&() const& { return group_; }
  // The guard that init_process_group() returned must be kept in a variable: a
  // temporary one destroys the group at the end of its expression.
  operator const ProcessGroupPtr&() const&& = delete;
  ProcessGroup* operator->() const { return group_.get(); }

 private:
  ProcessGroupPtr group_;
  int exceptions_at_start_;
};

// Makes the default process group of this process.
//
// `backend`: a name ("gloo"), a device map ("cpu:gloo,cuda:nccl"), or empty:
// by device. Blocks until every rank is there, for `options.timeout` at most.
//
// Uses the keys that Python's torch.distributed uses (prefixes "default_pg",
// "0/", and one for the device type), so that Python ranks which name the same
// device map stand in the same group.
//
// SIGPIPE is ignored from here on, unless the program handles it: as Python
// does, for a peer that dies closes connections that this rank may write to.
//
// SIGUSR1 writes the flight record from here on, unless the program handles or
// ignores it (docs/flight-recorder.md).
//
// Throws std::invalid_argument for a mistake of the caller or its environment
// (unknown backend, initialised twice, missing variable, rank not in the
// world, another rank with the same number or another world size), and
// c10::DistError with the ranks that are absent when the time is over. A rank
// of the same host that dies meanwhile, after it has come, is named within a
// second; so is one that fails, on every host, with its reason.
ProcessGroupGuard init_process_group(
    const std::string& backend = {},
    const InitProcessGroupOptions& options = {});

// Destroys `group`; with none, the default group and all others. Blocks until
// operations that are pending end, and, for the default group, until the other
// ranks destroy theirs, so that none loses the store that rank 0 hosts: 5 s at
// most, and not if a rank is known to have died or failed.
//
// Peers that still wait for this rank fail: at once in shared memory and in
// calls that go over the store, after a second on Gloo, where connections are
// closed last.
//
// In a child that was forked since init_process_group() this does nothing: the
// group is the parent's.
void destroy_process_group(ProcessGroupPtr group = nullptr);

bool is_initialized();

// The default group. Throws std::runtime_error if there is none.
ProcessGroupPtr default_group();

// The rank of this process in `group` (none: the default group). Without an
// initialised default group these throw std::runtime_error, as in Python.
int get_rank(const ProcessGroupPtr& group = nullptr);
int get_world_size(const ProcessGroupPtr& group = nullptr);

// LOCAL_RANK, else mpirun's OMPI_COMM_WORLD_LOCAL_RANK: this process's number
// on its host. 0 where both are unset and the process is alone. Throws
// std::invalid_argument otherwise.
int get_local_rank();

// The device this rank should compute on: cuda:LOCAL_RANK where LibTorch sees
// that GPU, else the CPU. Throws std::invalid_argument if there are GPUs, but
// not one for this LOCAL_RANK.
c10::Device local_device();

struct NewGroupOptions {
  // The default group's, where 0.
  std::chrono::milliseconds timeout{0};
  // As for init_process_group; the default group's, where empty.
  std::string backend{};
};

// A group of the default group's ranks `ranks` (sorted; none: all of them).
// Every rank of the default group must call this in the same order, members or
// not; returns nullptr where this rank is no member. Blocks until all members
// have called it; throws c10::DistBackendError when the time is over, and
// within a second if a member on this host dies or leaves, or any member fails.
ProcessGroupPtr new_group(std::vector<int> ranks = {},
                          const NewGroupOptions& options = {});

// new_group() for each set of ranks, in order; the sets must not share a rank.
// Returns this rank's own group, or nullptr if it is in none.
ProcessGroupPtr new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewGroupOptions& options = {});

// Groups of `group_size` ranks, neighbours in rank (with group_size the ranks
// of a host, one group a host). The world size is a multiple of it.
ProcessGroupPtr new_subgroups(int group_size,
                              const NewGroupOptions& options = {});

struct SplitGroupOptions {
  ProcessGroupPtr parent{};  // none: the default group
  // Those of the parent, where 0 and where empty.
  std::chrono::milliseconds timeout{0};
  std::string backend{};
};

// Divides a group: `split_ranks` are disjoint sets of ranks *of the parent*
// (as in Python), the same on every rank of it; only they need call. Returns
// this rank's own part, or nullptr if it is in none.
ProcessGroupPtr split_group(const std::vector<std::vector<int>>& split_ranks,
                            const SplitGroupOptions& options = {});

}  // namespace lockstep
