#include "lockstep/comm/shm/backend.h"

#include <ATen/ATen.h>

#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/comm/shm/arguments.h"
#include "lockstep/comm/shm/messages.h"
#include "lockstep/comm/shm/piece.h"
#include "lockstep/comm/shm/protocol/core.h"
#include "lockstep/comm/shm/sparse.h"

namespace lockstep::internal::shm {

using c10d::OpType;
using Tensors = Backend::Tensors;
using Use = Piece::Use;

namespace {

// Tells the group's Standstill about collectives that run without the caller's
// thread.
class StandstillWatcher final : public WorkQueueWatcher {
 public:
  explicit StandstillWatcher(std::shared_ptr<Group> group)
      : group_(std::move(group)) {}
  void queued() override {
    standstill().thread_comes();
    standstill().queued();
  }
  void ended() override { standstill().dequeued(); }
  void caller_waits() override { standstill().caller_waits(); }
  void caller_goes_on() override { standstill().caller_goes_on(); }

 private:
  Standstill& standstill() { return group_->core().standstill; }
  const std::shared_ptr<Group> group_;
};

}  // namespace

Backend::Backend(const Membership& membership, milliseconds timeout)
    : c10d::Backend(membership.meeting.rank, membership.meeting.size),
      group_(std::make_shared<Group>(membership)),
      messages_(std::make_shared<Messages>(group_, timeout)),
      shared_(std::make_shared<SharedTensors>()),
      timeout_(timeout),
      queue_(std::in_place, "shm queue",
             std::make_shared<StandstillWatcher>(group_)) {}

Backend::~Backend() { leave(); }

std::string Backend::departures() const {
  return translated([&] { return group_->departures(); });
}

void Backend::leave() {
  queue_.reset();
  messages_->close();
  group_->leave();
}

void Backend::close_queue(const std::function<void()>& tell_peers) {
  queue_->close(std::make_exception_ptr(c10::DistBackendError(
                    "the group was aborted on this rank")),
                tell_peers);
}

void Backend::abort() {
  close_queue([&] { group_->hang_up("the group was aborted"); });
}

void Backend::abort_because(const std::string& cause) {
  close_queue([&] { group_->pass_on(cause); });
}

void Backend::keep_cause(const std::string& cause) {
  group_->keep_cause(cause);
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors,
                                    const c10d::AllreduceOptions& options) {
  const auto& tensor = single("all_reduce", tensors);
  if (tensor.defined() && tensor.layout() != at::kStrided) {
    return allreduce_sparse(tensors, options);
  }
  const Piece data("all_reduce", tensor, Use::update);
  const auto by =
      require_reduction("all_reduce", tensor.scalar_type(), options.reduceOp);
  return issue(OpType::ALLREDUCE, options, tensors,
               [data, by](Group& group, const Deadline& deadline) {
                 group.all_reduce(data.data(), data.count(), by.dtype, by.op,
                                  left(deadline));
                 data.write_back();
               });
}

void Backend::all_reduce_direct(void* data, int64_t count, at::ScalarType dtype,
                                c10d::ReduceOp::RedOpType op,
                                milliseconds timeout) {
  const auto by = require_reduction("all_reduce", dtype, op);
  run_in_turn(timeout, [&](milliseconds left) {
    group_->all_reduce(data, static_cast<size_t>(count), by.dtype, by.op, left);
  });
}

Backend::WorkPtr Backend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto tensor = single("all_reduce", tensors);
  const auto op = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp);
  require_sparse(tensor, op);
  return issue(OpType::_ALLREDUCE_SPARSE, options, tensors,
               [tensor, average = op == c10d::ReduceOp::AVG](
                   Group& group, const Deadline& deadline) {
                 const c10::NoGradGuard no_grad;
                 tensor.copy_(sum_sparse(group, tensor, average, deadline));
               });
}

Backend::WorkPtr Backend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Reduction> by;
  for (const auto& tensor : tensors) {
    by.push_back(require_reduction("all_reduce_coalesced", tensor.scalar_type(),
                                   options.reduceOp));
  }
  return issue(OpType::ALLREDUCE_COALESCED, options, tensors,
               [data = pieces("all_reduce_coalesced", tensors, Use::update),
                by](Group& group, const Deadline& deadline) {
                 for (size_t i = 0; i < data.size(); ++i) {
                   group.all_reduce(data[i].data(), data[i].count(),
                                    by[i].dtype, by[i].op, left(deadline));
                 }
                 write_back(data);
               });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors,
                                 const c10d::ReduceOptions& options) {
  const auto& tensor = single("reduce", tensors);
  const int root = checked_rank("reduce", options.rootRank, getSize());
  // The tensors of the other ranks stay as they are.
  const Piece data("reduce", tensor,
                   root == getRank() ? Use::update : Use::read);
  const auto by =
      require_reduction("reduce", tensor.scalar_type(), options.reduceOp);
  return issue(OpType::REDUCE, options, tensors,
               [data, by, root](Group& group, const Deadline& deadline) {
                 group.reduce(data.data(), data.count(), by.dtype, by.op, root,
                              left(deadline));
                 data.write_back();
               });
}

namespace {

// One reduce_scatter, whose inputs are separate tensors or parts of one tensor.
struct Scattering {
  Piece output;
  Pieces held;  // keeps the inputs alive
  std::vector<const void*> inputs;
  std::vector<size_t> counts;
  Reduction by;

  void run(Group& group, const Deadline& deadline) const {
    group.reduce_scatter(output.data(), inputs, counts, by.dtype, by.op,
                         left(deadline));
    output.write_back();
  }
};

Scattering scatter_list(const Tensors& inputs, const at::Tensor& output,
                        const c10d::ReduceOp& op, int rank) {
  constexpr const char* kName = "reduce_scatter";
  Scattering scattering{
      .output = Piece(kName, output, Use::write),
      .held = pieces(kName, inputs, Use::read),
      .inputs = {},
      .counts = {},
      .by = require_reduction(kName, output.scalar_type(), op)};
  for (size_t i = 0; i < inputs.size(); ++i) {
    require_same_dtype(kName, inputs[i], output);
    scattering.inputs.push_back(scattering.held[i].data());
    scattering.counts.push_back(scattering.held[i].count());
    scattering.output.part_from(scattering.held[i],
                                static_cast<int>(i) == rank);
  }
  require_elements(kName, output,
                   static_cast<int64_t>(scattering.counts[rank]));
  return scattering;
}

Scattering scatter_whole(const at::Tensor& input, const at::Tensor& output,
                         const c10d::ReduceOp& op, int rank, int size) {
  constexpr const char* kName = "reduce_scatter_tensor";
  Scattering scattering{
      .output = Piece(kName, output, Use::write),
      .held = {Piece(kName, input, Use::read)},
      .inputs = {},
      .counts = std::vector<size_t>(size, output.numel()),
      .by = require_reduction(kName, output.scalar_type(), op)};
  require_same_dtype(kName, input, output);
  require_elements(kName, input, output.numel() * size);
  for (const auto& part : parts_of(scattering.held[0], scattering.counts)) {
    scattering.inputs.push_back(part.data);
  }
  // If the output is this rank's own part of the input, the operation is in
  // place and needs no copy.
  if (scattering.output.data() != scattering.inputs[rank]) {
    scattering.output.part_from(scattering.held[0], false);
  }
  return scattering;
}

}  // namespace

Backend::WorkPtr Backend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs,
    const c10d::ReduceScatterOptions& options) {
  const auto& output = single("reduce_scatter", outputs);
  const auto& list = one_a_rank("reduce_scatter", inputs, getSize());
  return issue(OpType::REDUCE_SCATTER, options, outputs,
               [all = scatter_list(list, output, options.reduceOp, getRank())](
                   Group& group, const Deadline& deadline) {
                 all.run(group, deadline);
               });
}

Backend::WorkPtr Backend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  return issue(
      OpType::_REDUCE_SCATTER_BASE, options, {output},
      [all = scatter_whole(input, output, options.reduceOp, getRank(),
                           getSize())](Group& group, const Deadline& deadline) {
        all.run(group, deadline);
      });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return issue(OpType::BARRIER, options, {},
               [](Group& group, const Deadline& deadline) {
                 group.barrier(left(deadline));
               });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return messages_->send(single("send", tensors), to, tag);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return messages_->receive("recv", single("recv", tensors),
                            checked_rank("recv", from, getSize()), tag);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return messages_->receive("recv", single("recv", tensors), Group::kAnySource,
                            tag);
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0 || !options.device().is_cpu()) {
    throw std::invalid_argument(
        c10::str("allocateTensor: ", size, " elements on ", options.device(),
                 "; \"shm\" allocates 0 or more on cpu"));
  }
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  if (bytes == 0) return at::empty({size}, options);
  void* data = translated([&] { return group_->allocate_registered(bytes); });
  shared_->add(data, bytes);
  // Holds the group until its memory is given back.
  auto give_back = [group = group_, shared = shared_](void* given) {
    shared->remove(given);
    group->free_registered(given);
  };
  return at::from_blob(data, {size}, std::move(give_back), options);
}

bool Backend::shares(const void* data, size_t bytes) const {
  return shared_->hold(data, bytes);
}

void SharedTensors::add(const void* data, size_t bytes) {
  std::lock_guard lock(mutex_);
  sizes_[static_cast<const std::byte*>(data)] = bytes;
}

void SharedTensors::remove(const void* data) {
  std::lock_guard lock(mutex_);
  sizes_.erase(static_cast<const std::byte*>(data));
}

bool SharedTensors::hold(const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  std::lock_guard lock(mutex_);
  auto behind = sizes_.upper_bound(begin);
  if (behind == sizes_.begin()) return false;
  const auto& [start, size] = *std::prev(behind);
  return begin + bytes <= start + size;
}

}  // namespace lockstep::internal::shm
