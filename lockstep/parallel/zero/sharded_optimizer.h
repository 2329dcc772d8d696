#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/gradient_shards.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/join/join.h"
#include "lockstep/parallel/zero/partition.h"
#include "lockstep/parallel/zero/updated_parameters.h"
#include "lockstep/parallel/zero/zero_redundancy_options.h"

namespace lockstep::internal {

class DdpState;
class ParameterNames;

// The part of ZeroRedundancyOptimizer that does not depend on the optimizer's
// type.
class ShardedOptimizer : public torch::optim::Optimizer,
                         public GradientShards,
                         public OptimizerShards,
                         public Joinable {
 public:
  using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  at::Tensor step(LossClosure closure = nullptr) override;

  // Hides LibTorch's function, which is not virtual: a group that is added
  // through a reference to the base class takes effect at the next step().
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  void synchronize();

  const ProcessGroupPtr& shard_group() const override { return group_; }
  std::vector<at::Tensor> gradient_shards() override;

  const ProcessGroupPtr& join_process_group() const override { return group_; }
  void shadow(const JoinIteration& iteration,
              const JoinOptions& options) override;
  void after_join(int last_joiner) override;

  void consolidate_state_dict(int to = 0);
  const OptimizerState& state_dict() const;
  bool has_state_dict() const { return state_dict_.has_value(); }
  void load_state_dict(const OptimizerState& state);
  void load_state_dict(const OptimizerState& state,
                       const torch::nn::Module& module);

  State shards() override;
  std::unique_ptr<PreparedOptimizer> prepare_load(
      const OptimizerState& groups, const OptimizerState& local) override;

  // Both throw std::logic_error: an archive of LibTorch's would hold only one
  // rank's part.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // Makes the real optimizer for some groups.
  using Make = std::function<OptimizerPtr(const ParamGroups& groups)>;

  // `ddp`: null if the optimizer gets whole gradients. `groups`: none means one
  // group of everything that `ddp` trains.
  ShardedOptimizer(Make make, bool element_wise,
                   std::optional<ParamGroups> groups,
                   ZeroRedundancyOptions options, DdpState* ddp);

  const torch::optim::Optimizer& inner() const { return *inner_; }
  // Makes the real optimizer for the user's parameters, without state.
  OptimizerPtr make_plain() const;
  // Loads the state of an optimizer that make_plain() has made.
  void load_plain(const torch::optim::Optimizer& plain);

 private:
  class PreparedShards;
  // Where a parameter was when it was last looked at, and the sizes and strides
  // with which it was divided.
  struct Memory {
    const void* address;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };

  void bind(DdpState& ddp);
  void begin_again();
  void share_parameters();
  void register_parameters(const std::vector<at::Tensor>& parameters);
  void take_group(const torch::optim::OptimizerParamGroup& group);
  void adopt_groups();
  void check_new_groups() const;
  void require_dense_gradients() const;
  void agree_on_new_groups(std::exception_ptr mistake) const;
  void take_part_in_step();
  void follow_memory();
  void check_layout(size_t parameter) const;
  void raise_version(size_t parameter) const;
  void set_options(const torch::optim::Optimizer& plain);
  void take_state(const OptimizerState& state, const ParameterNames* names);
  void copy_options();
  void step_pieces();
  void step_final(const std::vector<size_t>& parameters);
  std::vector<NumberedPiece> numbered_pieces() const;
  std::vector<at::Tensor> grouped_parameters() const;
  template <typename T>
  std::vector<T> of_grouped(const std::vector<T>& by_parameter) const;

  Make make_;
  ZeroRedundancyOptions options_;
  ProcessGroupPtr group_;
  bool has_ddp_;
  bool cut_;
  Partition partition_;
  // Those of the wrapper's module; none if there is no wrapper.
  std::shared_ptr<const ParameterNames> names_;
  // The parameters that the wrapper trains and reduces in shards; the groups
  // must have all of them.
  std::vector<NamedParameter> sharded_;

  // The next members are indexed by parameter, in the order of registration.
  std::vector<at::Tensor> parameters_;
  std::vector<Ranges> ranges_;
  std::vector<Memory> memory_;
  // Null if this rank has no piece.
  std::vector<std::unique_ptr<ParameterPiece>> pieces_;
  std::vector<bool> grouped_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_;

  size_t adopted_ = 0;  // number of parameter groups that inner_ has
  OptimizerPtr inner_;
  std::optional<ParameterGather> gather_;
  std::shared_ptr<SharedParameters> shared_;
  std::optional<OptimizerState> state_dict_;
  // For the callbacks in DDP: expired when this object is gone.
  std::shared_ptr<ShardedOptimizer*> self_;
  // The wrapper: expired when it is gone, because only its gate owns this.
  std::weak_ptr<DdpState*> ddp_;
  // If the training can be healed.
  std::optional<OnReconfigured> on_reconfigured_{};
};

}  // namespace lockstep::internal
