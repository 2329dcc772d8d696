#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/fsdp/fully_shard_options.h"
#include "lockstep/parallel/module/forward_arguments.h"
#include "lockstep/parallel/module/forward_result.h"

namespace lockstep::internal {

class FlatParameters;
class ShardingRoot;
struct UnitCall;

// The part of FullyShard that does not depend on the module's type: the
// parameters of one unit, which are gathered, used and freed together. Threads,
// blocking and errors are described at FullyShard; ShardingRoot decides what
// happens when.
class ShardedUnit : public std::enable_shared_from_this<ShardedUnit> {
 public:
  // Collective. Takes all parameters of `module` that no other unit has.
  static std::shared_ptr<ShardedUnit> make(torch::nn::Module& module,
                                           FullyShardOptions options);
  ShardedUnit(const ShardedUnit&) = delete;
  ShardedUnit& operator=(const ShardedUnit&) = delete;
  ~ShardedUnit();

  const FullyShardOptions& options() const { return options_; }
  const std::shared_ptr<ShardingRoot>& root() const { return root_; }
  // Names the unit in errors: "unit blocks.1", by its module's place in the
  // outermost one.
  std::string name() const;
  // Whether no other unit contains this one.
  bool is_outermost() const;

  using Flats = std::vector<std::unique_ptr<FlatParameters>>;
  const Flats& flats() const { return flats_; }
  // Returns the name of the first parameter that has a full gradient; null if
  // none has.
  const std::string* with_gradient() const;
  // The number of ranks over which the full parameters are divided between
  // forward and backward. If it is 1, they stay whole.
  int ranks_after_forward() const;

  // The functions of the same names of FullyShard.
  void set_reshard_after_forward(ReshardAfterForward reshard_after_forward,
                                 bool recurse);
  // Returns the value before.
  bool set_requires_gradient_sync(bool requires_gradient_sync);
  void start_unshard();
  void wait_unshard();
  void reshard();
  void zero_kept_gradients(bool set_to_none);

  // Throws std::invalid_argument if the module has other parameters than when
  // it was sharded.
  void require_same_parameters() const;

  // Called by autograd (unit_hooks.h).
  void before_backward(UnitCall& call);
  void after_backward(UnitCall& call);
  void gradient_came();

  // Makes a UnitCall of the running forward.
  std::shared_ptr<UnitCall> make_call(int64_t forward);
  // The calls whose graphs live.
  std::vector<std::shared_ptr<UnitCall>> live_calls();

  // The state that ShardingRoot keeps here.
  // Between unshard() and reshard().
  bool held = false;
  // The running backward goes through this unit and has not left it.
  bool in_backward = false;
  // The running backward, or the last one, came to it through a result.
  bool entered = false;
  // The number of its forwards that are running, unless in micro-batches.
  int running = 0;

 private:
  explicit ShardedUnit(FullyShardOptions options);
  void find(torch::nn::Module& module);
  void adopt(const std::vector<std::shared_ptr<ShardedUnit>>& nested);

  const FullyShardOptions options_;
  std::optional<ReshardAfterForward> reshard_after_forward_;
  std::string path_;  // in the outermost module; empty if it is that one
  // This unit's module and those in it.
  std::vector<const torch::nn::Module*> modules_;
  std::weak_ptr<torch::nn::Module> module_;
  // All parameters of the module, which were shards when it was sharded.
  std::vector<at::Tensor> registered_;
  Flats flats_;
  std::shared_ptr<ShardingRoot> root_;
  std::vector<std::weak_ptr<ShardedUnit>> nested_;  // at any depth
  std::vector<std::weak_ptr<UnitCall>> calls_;
};

// Surrounds one forward of a unit; collective. end() is called when forward has
// returned; otherwise an exception has ended it.
class UnitForward {
 public:
  explicit UnitForward(std::shared_ptr<ShardedUnit> unit);
  UnitForward(const UnitForward&) = delete;
  UnitForward& operator=(const UnitForward&) = delete;
  ~UnitForward();

  // `inputs`: the tensors among the arguments, which may be replaced.
  void take_inputs(const std::vector<at::Tensor*>& inputs);
  // Called for each tensor that forward returns, or has put into the caller's
  // arguments, in which ForwardArguments has put back what take_inputs()
  // replaced: first will_return() for all of them, then returns().
  void will_return(const at::Tensor& result);
  void returns(at::Tensor& result);
  void returns(const at::Tensor& result);
  void end();

 private:
  struct Input {
    at::Tensor given;   // by the caller
    at::Tensor taken;   // by forward
    int64_t version;    // of `taken`, before forward
    const void* graph;  // its grad_fn() then
  };
  // Whether the result needs an alias, or a hook.
  bool watches(const at::Tensor& result);
  bool shares_memory(const at::Tensor& result) const;
  void finish_written_inputs();

  const std::shared_ptr<ShardedUnit> unit_;
  std::shared_ptr<UnitCall> call_;  // null means without grad
  std::vector<Input> inputs_;
  std::vector<at::Tensor> returned_;  // as forward returned them
  std::vector<std::pair<at::Tensor, at::Tensor>> results_;  // and what replaces
  bool has_graph_ = false;
  bool ended_ = false;
};

// Runs `forward(module, args...)` as one forward of the unit, and returns its
// result.
template <typename Impl, typename Forward, typename... Args>
decltype(auto) run_unit(const std::shared_ptr<ShardedUnit>& unit, Impl& module,
                        const Forward& forward, Args&&... args) {
  UnitForward pass(unit);
  ForwardArguments<Args...> arguments(std::forward<Args>(args)...);
  arguments.replace([&](const std::vector<at::Tensor*>& tensors) {
    pass.take_inputs(tensors);
  });
  return call_then(
      [&]() -> decltype(auto) { return arguments.call(forward, module); },
      [&](auto&... result) {
        const auto note = [&](auto& tensor) { pass.will_return(tensor); };
        const auto visit = [&](auto& tensor) { pass.returns(tensor); };
        arguments.put_back();
        arguments.visit_written(note);
        (visit_tensors(result, note), ...);
        arguments.visit_written(visit);
        (visit_tensors(result, visit), ...);
        pass.end();
      });
}

}  // namespace lockstep::internal
