#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/hybrid/topology.h"
#include "lockstep/comm/shm/piece.h"
#include "lockstep/comm/shm/protocol/group.h"
#include "lockstep/comm/work_queue.h"

namespace lockstep::internal::hybrid {

// The connections of a rank.
struct Links {
  std::shared_ptr<shm::Group> local;  // none if it is alone on its host
  // Gloo with the ranks in the same position on the other hosts; none on ranks
  // beyond Topology::lanes().
  c10::intrusive_ptr<c10d::Backend> lane;
  std::string lane_peers{};                // "2, 5", in the default group
  c10::intrusive_ptr<c10d::Backend> flat;  // Gloo with all ranks
};

// For several hosts with several ranks on at least one of them. Whatever can be
// done inside a host is done in shared memory, so that every byte crosses the
// network as seldom as it can.
//
//   all_reduce, reduce, reduce_scatter: each host reduces inside, one slice for
//     each lane; each lane all-reduces its slice between the hosts; each host
//     gathers the slices inside. With L ranks on each of H hosts and S bytes,
//     a host's link carries 2 S (H - 1) / H in each direction; a ring over all
//     ranks would need 2 S (L H - 1) / (L H). It is done in parts, so that
//     memory and network work at the same time. Bit-equal on all ranks.
//   broadcast: inside the root's host, between the hosts, inside the others.
//   all_gather: inside, then each host's block once to each other host.
//   barrier: inside, between, inside.
//   gather, scatter, all_to_all, sparse all_reduce, messages: Gloo between all
//     ranks, because no byte crosses the network twice there.
//
// A failure breaks the group: this rank leaves both its host's memory and its
// connections, so that its peers fail too. Calls are compared (operation,
// sizes, dtype) within each host.
//
// Blocking, threads and errors are those of shm/backend.h.
class Backend final : public c10d::Backend,
                      public PeerNotices,
                      public BackendTraits {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  Backend(int rank, int size, Topology topology, Links links,
          std::chrono::milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "lockstep"; }

  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void abort() override;

  std::string departures() const override;
  bool knows_all_peers() const override { return false; }
  void abort_because(const std::string& cause) override;
  void keep_cause(const std::string& cause) override;
  void leave() override;
  void await_peers(const Deadline& deadline) const override;

 private:
  using ReduceOpType = c10d::ReduceOp::RedOpType;

  // Runs `operation(const Deadline&)` in its turn, in the caller or on the
  // queue's thread.
  template <typename CallOptions, typename Operation>
  WorkPtr issue(c10d::OpType type, const CallOptions& options, Tensors results,
                Operation operation);
  // Does the same for an operation that Gloo does alone: `operation()` returns
  // its work.
  template <typename CallOptions, typename Operation>
  WorkPtr forward(c10d::OpType type, const CallOptions& options,
                  Tensors results, Operation operation);
  // With Blame::others, `reason` names the rank that failed first, and the
  // peers on this host get it as it is.
  enum class Blame { self, others };
  void break_down(const std::string& reason, Blame blame);
  void abort(const std::string& reason, Blame blame);
  // Waits for the end of a lane's operation; errors name the lane's ranks.
  void finish_lane(const WorkPtr& work, const Deadline& deadline) const;

  // `data` is flat and contiguous. The result is on the ranks of `only_host`,
  // or on all ranks if there is none.
  void all_reduce(const at::Tensor& data, ReduceOpType op,
                  std::optional<int> only_host, const Deadline& deadline);
  void all_gather(const at::Tensor& input,
                  const std::function<void(int rank, const at::Tensor&)>& take,
                  const Deadline& deadline);
  void broadcast(const at::Tensor& data, int root, const Deadline& deadline);
  void broadcast_inside(const at::Tensor& data, int local_root,
                        const Deadline& deadline);

  int host_of(int rank) const;
  int local_size() const {
    return static_cast<int>(topology_.hosts[topology_.host].size());
  }

  const Topology topology_;
  Links links_;
  const std::chrono::milliseconds timeout_;
  std::optional<WorkQueue> queue_;
};

}  // namespace lockstep::internal::hybrid
