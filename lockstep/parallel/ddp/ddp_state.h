#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/ddp_options.h"
#include "lockstep/parallel/ddp/logging_data.h"
#include "lockstep/parallel/join/join.h"
#include "lockstep/parallel/module/forward_arguments.h"
#include "lockstep/parallel/module/forward_result.h"

namespace lockstep::internal {

// Floating-point parameters that have `dtype` while forward or backward uses
// them, and their own dtype at any other time. One thread at a time.
class LowPrecisionParameters {
 public:
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters,
                         at::ScalarType dtype);

  // lower_for_forward() casts the parameters; lower_for_backward() uses the
  // casts of the last forward. Calls nest: each needs its restore(), and only
  // the outermost has an effect. Both directions make LibTorch drop the
  // parameters' gradient accumulators.
  void lower_for_forward() { lower(/*casts=*/true); }
  void lower_for_backward() { lower(/*casts=*/false); }
  void restore();
  bool is_low() const { return depth_ > 0; }

 private:
  struct Parameter {
    at::Tensor parameter;
    at::Tensor master;  // its data at other times
    at::Tensor low;
  };
  void lower(bool casts);

  std::vector<Parameter> parameters_;
  int depth_ = 0;
};

// Casts floating-point tensors to `dtype`, and returns others unchanged.
at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype);

class Reducer;

// The part of DistributedDataParallel that does not depend on the module's
// type. Threads, blocking and errors are described there.
class DdpState final : public Joinable {
 public:
  // Collective.
  DdpState(torch::nn::Module& module, DistributedDataParallelOptions options);
  ~DdpState() override;

  // Surrounds the module's forward. Collective if there are buffers to
  // broadcast. returns() takes the result of forward, and what forward has put
  // into reference arguments.
  class ForwardPass {
   public:
    explicit ForwardPass(DdpState& state) : state_(state) {
      state_.before_forward();
      versions_ = state_.versions();
    }
    ForwardPass(const ForwardPass&) = delete;
    ForwardPass& operator=(const ForwardPass&) = delete;
    ~ForwardPass() {
      state_.after_forward(std::uncaught_exceptions() > exceptions_);
    }
    template <typename Result>
    void returns(Result& result) {
      visit_tensors(result, [this](auto& tensor) { take(tensor); });
    }
    // Throws std::logic_error if forward has written a parameter.
    void require_unwritten() const { state_.require_unwritten(versions_); }

   private:
    void take(at::Tensor& tensor);
    void take(const at::Tensor& tensor);
    DdpState& state_;
    std::vector<uint32_t> versions_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  // Runs `forward(module, args...)` with what the wrapper does before and after
  // it, and returns its result.
  template <typename Impl, typename Forward, typename... Args>
  decltype(auto) run_forward(Impl& module, const Forward& forward,
                             Args&&... args) {
    ForwardPass pass(*this);
    ForwardArguments<Args...> arguments(std::forward<Args>(args)...);
    if (lowers_parameters()) {
      arguments.replace([this](const std::vector<at::Tensor*>& tensors) {
        for (auto* tensor : tensors) *tensor = cast(*tensor);
      });
    }
    return call_then(
        [&]() -> decltype(auto) { return arguments.call(forward, module); },
        [&](auto&... result) {
          pass.require_unwritten();
          arguments.copy_changed();
          arguments.put_back();
          arguments.visit_written(
              [&](at::Tensor& tensor) { pass.returns(tensor); });
          (pass.returns(result), ...);
        });
  }

  // Returns an argument of forward as mixed_precision asks for it.
  at::Tensor cast(const at::Tensor& argument) const {
    return cast_floating(argument, *options_.mixed_precision->param_dtype);
  }

  void register_comm_hook(CommHook hook);
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
      std::vector<at::Tensor> parameters)>;
  void apply_optimizer_in_backward(const MakeOptimizer& make);
  std::vector<torch::optim::Optimizer*> get_in_backward_optimizers() const;

  DDPLoggingData logging_data() const;
  void set_sample_rate(int64_t rate);

  const torch::nn::Module& module() const { return module_; }
  // The reducer of the parameters that are trained now, and what it has.
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  std::vector<std::vector<std::string>> bucket_names() const;
  const ProcessGroupPtr& process_group() const {
    return options_.process_group;
  }
  // Returns whether parameters are low-precision copies from forward to the end
  // of backward.
  bool lowers_parameters() const { return low_.has_value(); }
  // Returns whether requires_grad, dtype or device of a parameter has changed
  // since the last forward, or since the constructor.
  bool trained_differ() const;
  // Notes that a forward of the wrapper is made, or what replaces it: until
  // parameters are written, backward passes of the plain module are expected.
  void note_forward();
  // Returns the versions of the parameters, before a forward; empty if forward
  // may write them. require_unwritten() throws std::logic_error if it has.
  std::vector<uint32_t> versions() const;
  void require_unwritten(const std::vector<uint32_t>& versions) const;
  // Returns whether an optimizer uses gradients in backward, or slices of them.
  bool has_optimizer() const { return gate_ || !optimizers_.empty(); }
  // `gate` is called first in every forward, and waits for what must be over
  // before parameters are read. While there is a gate, the set of trained
  // parameters must not change.
  void set_forward_gate(std::function<void()> gate) { gate_ = std::move(gate); }
  // Waits as a forward does before it reads parameters. For a forward of the
  // module itself in place of the wrapper's.
  void await_parameters() const {
    if (gate_) gate_();
  }

  const ProcessGroupPtr& join_process_group() const override {
    return options_.process_group;
  }
  void before_join() override;
  void shadow(const JoinIteration& iteration,
              const JoinOptions& options) override;
  void after_join(int last_joiner) override;

  bool require_backward_grad_sync = true;

 private:
  void before_forward();
  void after_forward(bool threw);
  bool sends_buffers() const {
    return options_.forward_sync_buffers.value_or(options_.broadcast_buffers);
  }
  void warn_of_foreign_gradient(const Reducer& reducer, size_t parameter);
  void find_tensors();
  void require_same_parameters() const;
  void verify_replicas() const;
  LowPrecisionParameters make_low_precision() const;
  std::vector<NamedParameter> trained() const;
  // `learnt`: as in ReducerOptions.
  std::unique_ptr<Reducer> make_reducer(
      std::optional<std::vector<std::vector<size_t>>> learnt = {});
  void retrain();
  void step_in_backward();
  void begin_again();
  bool same_on_all_ranks(bool known) const;
  void broadcast_from(int rank, bool parameters, bool buffers);
  void broadcast_buffers(int rank);
  double divisor(const JoinIteration& iteration,
                 const JoinOptions& options) const;

  torch::nn::Module& module_;
  DistributedDataParallelOptions options_;
  // All parameters that the module had when it was wrapped.
  std::vector<at::Tensor> registered_;
  std::vector<bool> trained_at_first_;  // of parameters_
  // Without ignored tensors; tied tensors once, by their first name.
  std::vector<NamedParameter> parameters_;
  std::vector<NamedParameter> buffers_;
  // Describes, by parameter, what the buckets are made for.
  struct Training {
    std::vector<const c10::TensorImpl*> tensors;
    std::vector<bool> trained;  // require grad
    std::vector<std::pair<at::ScalarType, at::Device>> kinds;
    std::vector<std::vector<int64_t>> sizes;
    bool operator==(const Training&) const = default;
  };
  Training training_now() const;
  Training training_;
  std::vector<bool> sparse_;
  CommHook hook_{};
  // Tells the reducers that they belong to one wrapper.
  const std::shared_ptr<const void> identity_ = std::make_shared<char>();
  // One reducer for each set of trained parameters, the most recently used
  // first, so that parameters may be frozen in every other step. Each has
  // buckets of its own.
  static constexpr size_t kMostReducers = 4;
  std::list<std::pair<Training, std::unique_ptr<Reducer>>> reducers_;
  Reducer* reducer_ = nullptr;
  // The order of the buckets, until begin_again() has made them.
  std::optional<std::vector<std::vector<size_t>>> learnt_{};
  std::optional<LowPrecisionParameters> low_{};
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::function<void()> gate_{};
  int64_t sample_rate_ = 100;
  bool beside_python_ = false;  // some ranks are not Lockstep's
  bool shadowed_ = false;       // since the join began
  // How many averages there were in the last forward, and the trained
  // parameters as they were: whether they have been written tells whether an
  // optimizer has stepped. Of the last one the first bytes are compared, too,
  // since torch::optim::SGD writes through data(), which version counters do
  // not see.
  struct Noted {
    int64_t averages = 0;
    uint64_t versions = 0;  // their sum
    std::array<char, 64> bytes{};
    bool operator==(const Noted&) const = default;
  };
  Noted noted_now() const;
  std::optional<Noted> noted_{};
  int foreign_pass_ = -1;  // the graph task that was looked at last
  bool warned_of_foreign_ = false;
  // As in Python, buffers are sent only after a forward that synchronised.
  bool require_forward_buffer_sync_ = true;
  // If the training can be healed.
  std::optional<OnReconfigured> on_reconfigured_{};
};

}  // namespace lockstep::internal
