#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/ddp_options.h"
#include "lockstep/parallel/ddp/ddp_state.h"
#include "lockstep/parallel/ddp/logging_data.h"
#include "lockstep/parallel/join/join.h"
#include "lockstep/parallel/module/wrapped_module.h"

namespace lockstep {

// Data-parallel training of one module on every rank: when backward() returns,
// its gradients are averaged over the ranks. It follows
// torch.nn.parallel.DistributedDataParallel (PyTorch documentation).
//
// `Module` is a module holder, a Sequential, a class that derives from
// torch::nn::Module, or a std::shared_ptr of one; a module without a holder is
// given as a std::shared_ptr. The module is shared, not copied. The wrapper has
// the members of a module (wrapped_module.h): optimizers take
// `model->parameters()`, and `model->forward(x)` is the same as `model(x)`. Its
// forward may take anything, and may return every type for which ForwardResult
// is defined (forward_result.h). What forward puts into arguments that it takes
// by reference, and what it changes in place, is as without the wrapper. If it
// has written a parameter, and there are several ranks or mixed_precision, the
// wrapper's forward throws std::logic_error.
//
// A backward pass averages if it goes through a forward of this wrapper that
// was made in grad mode and outside no_sync(). Other passes, such as those of
// the plain module, do not, and grad() never does (backward_tracker.h). If such
// a pass puts gradients into the parameters, and no forward of the wrapper was
// made since the last average or since they were last written (by a step), this
// is said once (TORCH_WARN).
//
// The constructor is collective. If buffers are broadcast, so are the first
// forward and each forward, also without grad, that follows a forward made in
// grad mode outside no_sync(). For any module, so is the first forward after
// the first averaging backward. Each rank must call backward as often as the
// others (or use join()), and forward, too, if buffers are broadcast; otherwise
// a backward may go through other numbers of forwards. Blocking: backward()
// returns when every gradient is final, or throws: c10::DistBackendError if
// something failed between the ranks, or std::runtime_error that names this
// rank and the parameters that got no gradient. No thread is started.
//
// The constructor throws std::invalid_argument, on every rank, if the ranks'
// models differ; it names rank and parameter.
//
// Gradients of Embedding and EmbeddingBag with sparse(true) stay sparse. A
// parameter that is used twice, or registered twice, counts once. If the module
// registers other parameters after the wrapper's constructor, or resizes one,
// the next forward in grad mode throws std::invalid_argument. If requires_grad
// of a parameter changes after the constructor, which must happen
// on every rank alike, the next forward includes it or leaves it out. One
// backward must not go through forwards from before and after such a change
// that train a parameter both: it throws std::logic_error on every rank. A
// parameter that several wrappers train is averaged by each of them
// (distributed-data-parallel.md lists what is not possible then:
// std::invalid_argument). The averaging has no derivative: gradients of a
// backward with create_graph have no graph through it.
//
// If an exception ends a forward or a backward, or destroys the results of a
// forward before their backward, the iteration is given up: gradients in
// buckets become undefined, and the next forward starts again, provided that
// every rank has given up. In shared memory, peers that wait for this rank
// throw at once; elsewhere they get NaN.
//
// Some ranks may run Python's DistributedDataParallel over the same model, in a
// group that init_process_group() describes, if the options are the same, no
// gradient is sparse, and no feature is used that only Lockstep has (join,
// shards, checks).
//
// Use from one thread. The wrapper must outlive the backward passes of its
// forwards.
template <typename Module>
class DistributedDataParallel
    : public WrappedModule<DistributedDataParallel<Module>, Module> {
 public:
  using WrappedModule<DistributedDataParallel, Module>::module;

  explicit DistributedDataParallel(
      const ModuleHandle<Module>& given,
      const DistributedDataParallelOptions& options = {})
      : WrappedModule<DistributedDataParallel, Module>(given),
        state_(std::make_unique<internal::DdpState>(*module(), options)) {}
  template <class = void>
  explicit DistributedDataParallel(  // no such option
      const ModuleHandle<Module>&, ...) = delete;

  // While the result lives, backward passes of forwards made under it
  // accumulate gradients on this rank only; the next averaging backward
  // averages the sum.
  NoSync no_sync() {
    bool& syncs = state_->require_backward_grad_sync;
    return NoSync(
        [&syncs, before = std::exchange(syncs, false)] { syncs = before; });
  }

  // Runs `body`, a training loop, in which this rank may do more or fewer
  // forward and backward passes than the others (join/join.h). With optimizers
  // that communicate use lockstep::join({&ddp.joinable(), &optimizer}, body).
  template <typename Body>
  void join(Body&& body, const JoinOptions& options = {}) {
    lockstep::join({&joinable()}, std::forward<Body>(body), options);
  }
  Joinable& joinable() { return *state_; }

  // `hook` reduces the buckets, instead of the averaging all-reduce; sparse
  // gradients are averaged as before. Call it once, before the first backward,
  // on every rank. Collective. Throws std::logic_error otherwise.
  void register_comm_hook(CommHook hook) {
    state_->register_comm_hook(std::move(hook));
  }

  // Gives each parameter an optimizer of its own, made by `make` for that
  // parameter. The optimizer steps in backward as soon as the gradient is
  // averaged; after the step the gradient is dropped. Gradients cannot be
  // clipped or unscaled, nor accumulated over several backward passes outside
  // no_sync(). Call it before the first backward.
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<at::Tensor> parameters)>;
  void apply_optimizer_in_backward(const MakeOptimizer& make) {
    state_->apply_optimizer_in_backward(make);
  }
  // Returns these optimizers, in the order of the trained parameters, for
  // learning rates and snapshots: they are items of TrainingState::items. They
  // live as long as the wrapper.
  std::vector<torch::optim::Optimizer*> get_in_backward_optimizers() const {
    return state_->get_in_backward_optimizers();
  }

  // Returns the data of this rank; times are those of the last sampled
  // iteration. Does not communicate.
  DDPLoggingData get_ddp_logging_data() const { return state_->logging_data(); }
  // Times are taken in each of the first 10 iterations, then in one of `rate`
  // (100).
  void set_ddp_runtime_logging_sample_rate(int64_t rate) {
    state_->set_sample_rate(rate);
  }

  // Returns the parameters' names by bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const {
    return state_->bucket_names();
  }

 private:
  friend struct internal::WrapperAccess;

  template <typename Forward, typename... Args>
  decltype(auto) run(const Forward& forward, Args&&... args) {
    return state_->run_forward(*module(), forward, std::forward<Args>(args)...);
  }

  std::unique_ptr<internal::DdpState> state_;
};

template <typename Module>
DistributedDataParallel(Module, ...) -> DistributedDataParallel<Module>;

}  // namespace lockstep
