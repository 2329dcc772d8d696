#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// The arguments of torch.distributed.init_process_group (PyTorch documentation,
// "Distributed communication package", Initialization).
struct InitProcessGroupOptions {
  // ---- How the ranks find each other ----

  // Where the ranks meet. Most programs leave it, and are started by a
  // launcher. Must be empty if `store` is given. Empty means env://.
  //   env://                 RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or
  //                          else what srun, mpirun or mpiexec say. If there
  //                          is neither this process is a world of its own; if
  //                          only some are set, an error names the others.
  //                          Under `lockstep run` the ranks meet at a store of
  //                          the launcher's if no Python rank can be among
  //                          them (docs/launcher.md, "The workers' store").
  //                          With "mpi" the ranks are MPI's if neither RANK nor
  //                          WORLD_SIZE is set (docs/mpi.md).
  //   tcp://host:port        rank and world_size below, or ?rank=R&world_size=N
  //   file:///path           a file on a file system that all ranks share
  std::string init_method{};

  // How long init_process_group waits for the other ranks, and the timeout of
  // every collective that is given none. Lower it if a hang should be noticed
  // sooner; raise it if one rank may work for long while the others wait. More
  // than 0; what is longer than 24 days means 24 days. None means 30 minutes
  // (as in Python, but for NCCL, where Python takes 10).
  std::optional<std::chrono::milliseconds> timeout{};

  // The number of ranks, and the rank of this process. For tcp://, file:// and
  // `store`; with env:// they replace RANK and WORLD_SIZE. -1 means that
  // init_method says it.
  int world_size{-1};
  int rank{-1};

  // A store that all ranks share, instead of an init_method; rank and
  // world_size are then required.
  c10::intrusive_ptr<c10d::Store> store{};

  // ---- Debugging (not in Python) ----

  // Whether the ranks compare their calls: see ProcessGroup::checks_calls().
  // The same on all ranks, which refuse to join otherwise. Set it to true if
  // ranks hang or get nonsense. None means true if TORCH_DISTRIBUTED_DEBUG is
  // DETAIL (in any case of its letters; other than OFF, INFO and DETAIL is
  // refused).
  std::optional<bool> check_calls{};

  // Whether an exception that nobody catches is reported in one line on stderr
  // and to the launcher (record.h), instead of with LibTorch's stack frames. A
  // terminate handler that the program has set is called after that. Set it to
  // false to leave the handling of such exceptions alone.
  bool report_uncaught{true};
};

// Destroys the default group when it goes out of scope, unless
// destroy_process_group() has. If an exception is being thrown then, pending
// operations fail instead of being waited for, and so do those of the peers
// that wait for this rank.
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
// `backend` is a name ("gloo"), a device map ("cpu:gloo,cuda:nccl"), or empty:
// choose by device. Blocks until every rank has come, for `options.timeout` at
// most.
//
// Uses the keys that Python's torch.distributed uses, so that Python ranks
// which name the same device map are in the same group. Their prefixes are
// "default_pg" (not if `options.store` is given), "0/", and one for the device
// type.
//
// SIGPIPE is ignored from here on, unless the program handles it. Python does
// the same: a peer that dies closes connections that this rank may write to.
//
// SIGUSR1 writes the flight record from here on, unless the program handles or
// ignores it (docs/flight-recorder.md).
//
// In a standby process (lockstep run --standby, docs/standby.md) this first
// blocks until the launcher gives the process its rank, without a deadline. It
// then sets RANK and the other variables of a worker by setenv(), so no other
// thread may read the environment meanwhile. A program that asks for its rank
// or device before this call gets std::invalid_argument there.
//
// Throws std::invalid_argument for a mistake of the caller or its environment
// (unknown backend, initialised twice, missing variable, rank not in the world,
// another rank with the same number or another world size), and c10::DistError
// with the ranks that are absent when the time is over. A rank on the same host
// that dies after it has come is named within a second. So is a rank that
// fails, on any host, and with its reason.
ProcessGroupGuard init_process_group(
    const std::string& backend = {},
    const InitProcessGroupOptions& options = {});

// Destroys `group`; if none is given, the default group and all others. Blocks
// until pending operations have ended. For the default group it then blocks
// until the other ranks destroy theirs, so that no rank loses the store that
// rank 0 hosts: 5 s at most, and not if a rank is known to have died or failed.
// If the store is a file, was given, or is hosted by torchrun, it blocks until
// the ranks have connected to each other, for as long at most.
// If an exception is being thrown, it does not wait for the other ranks, and
// leaves as a rank that has failed.
//
// Another group may be destroyed as soon as it is made: this then blocks until
// its ranks have connected to each other, for the group's timeout at most, and
// not if one of its ranks is known to be gone.
//
// Peers that still wait for this rank fail: at once in shared memory and in
// calls that use the store, after a second on Gloo, whose connections are
// closed last.
//
// Throws std::runtime_error if there is no default group, and
// std::invalid_argument if `group` was destroyed already, or this rank is not a
// member of it.
//
// In a child process that was forked after init_process_group() this does
// nothing: the group is the parent's.
void destroy_process_group(ProcessGroupPtr group = nullptr);

bool is_initialized();

// The default group. Throws std::runtime_error if there is none.
ProcessGroupPtr default_group();

// Return the rank of this process in `group` (none means the default group),
// and the group's size. Throw std::runtime_error if no group is given and the
// default group is not initialised, and std::invalid_argument if this rank is
// not a member of `group`.
int get_rank(const ProcessGroupPtr& group = nullptr);
int get_world_size(const ProcessGroupPtr& group = nullptr);

// Returns this process's number on its host: LOCAL_RANK, or else what
// srun, mpirun or mpiexec say. If neither is set, returns 0 if the process is
// alone and throws std::invalid_argument if it is not.
int get_local_rank();

// Returns the device that this rank should compute on: number LOCAL_RANK of the
// accelerator that LibTorch sees (cuda:LOCAL_RANK where there are GPUs of
// NVIDIA's), otherwise the CPU. Throws std::invalid_argument if there is an
// accelerator, but no device for this LOCAL_RANK, and whatever get_local_rank()
// throws.
c10::Device local_device();

// The arguments of torch.distributed.new_group that have a meaning here. Most
// programs need none of them.
struct NewGroupOptions {
  // The timeout of the new group's collectives. More than 0. None means the
  // default group's.
  std::optional<std::chrono::milliseconds> timeout{};

  // As for init_process_group. Set it if the new group should use another
  // backend. Empty means the default group's.
  std::string backend{};
};

// Makes a group of `ranks` of the default group, in ascending order (none means
// all of them). Every rank of the default group must call this in the same
// order, whether it is a member or not. On a rank that is not a member it
// returns a handle that is false as a condition, and that throws
// std::invalid_argument wherever it is used (ProcessGroupPtr):
//
//   if (auto group = new_group({0, 1})) all_reduce(x, {.group = group});
//
// Blocks until all members have called it. Throws c10::DistBackendError when
// the time is over, and within a second if a member on this host dies or
// leaves, or any member fails.
ProcessGroupPtr new_group(std::vector<int> ranks = {},
                          const NewGroupOptions& options = {});

// Calls new_group() for each set of ranks, in order; the sets must not share a
// rank. Returns this rank's own group, or what new_group() returns on a rank
// that is not a member, if it is in none.
ProcessGroupPtr new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewGroupOptions& options = {});

// Makes groups of `group_size` consecutive ranks (one group for each host, if
// group_size is the number of ranks on a host). The world size must be a
// multiple of group_size.
ProcessGroupPtr new_subgroups(int group_size,
                              const NewGroupOptions& options = {});

struct SplitGroupOptions {
  // The group to divide. Null means the default group.
  ProcessGroupPtr parent{};

  // As in NewGroupOptions. None and empty mean those of the parent.
  std::optional<std::chrono::milliseconds> timeout{};
  std::string backend{};
};

// Divides a group: `split_ranks` are disjoint sets of ranks *of the parent* (as
// in Python). The ranks of a set must call equally often with this set; ranks
// that are in no set need not call. Returns the group of this rank's set, or
// what new_group() returns on a rank that is not a member, if it is in none.
ProcessGroupPtr split_group(const std::vector<std::vector<int>>& split_ranks,
                            const SplitGroupOptions& options = {});

namespace internal {

// Finds the group with which a function works. Returns `given`, or the
// default group if it is null. Throws what default_group() throws, and
// std::invalid_argument if this rank is not a member of `given`.
ProcessGroupPtr group_or_default(ProcessGroupPtr given);

// The same for what also works in a process without groups: returns null there.
ProcessGroupPtr group_if_any(ProcessGroupPtr given);

struct ExistingGroups {
  // The default group and the others that this rank is a member of, in the
  // order in which they were made.
  std::vector<ProcessGroupPtr> groups{};
  // How many groups were made since init_process_group(), those included that
  // this rank is not a member of; torch.distributed.get_pg_count().
  int count = 0;
};

// Any thread may call.
ExistingGroups existing_groups();

}  // namespace internal

}  // namespace lockstep
