#include "tests/parallel/fuzz/programs/trained.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "lockstep/parallel/join/join.h"
#include "lockstep/parallel/join/joined_optimizer.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/parallel/fuzz/programs/program_reference.h"

namespace lockstep::internal::fuzz {
namespace {

at::ScalarType dtype_of(const Program& program) {
  return program.precision == Precision::float64 ? at::kDouble : at::kFloat;
}

std::shared_ptr<ProgramNet> make_net(
    const Program& program, uint64_t values,
    const std::optional<FullyShardOptions>& units = {}) {
  return std::make_shared<ProgramNet>(program, 0, program.layers.size(), values,
                                      dtype_of(program), units);
}

void double_gradients(const Program& program, const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    const auto layer = std::stoul(item.key().substr(5));
    if (!program.layers.at(layer).has_hook) continue;
    item.value().register_hook(
        [](at::Tensor gradient) { return 2 * gradient; });
  }
}

// The groups of an optimizer, as a program with lockstep::optim names them.
template <class Group>
std::vector<Group> groups_of(const Program& program,
                             const torch::nn::Module& module) {
  std::vector<Group> groups(kGroups);
  for (const auto& item : module.named_parameters()) {
    groups[static_cast<size_t>(group_of_parameter(program, item.key()))]
        .params.push_back(item.value());
  }
  groups[1].weight_decay = 0;
  groups[2].lr = kProgramRate / 2;
  return groups;
}

// Calls `make` with the options and the groups of the program's optimizer.
template <class Make>
auto with_stepper(const Program& program, const torch::nn::Module& module,
                  const Make& make) {
  if (program.stepper == Stepper::adamw) {
    return make.template operator()<optim::AdamW>(
        optim::AdamWOptions{.lr = kProgramRate,
                            .eps = kProgramEpsilon,
                            .weight_decay = kProgramDecay},
        groups_of<optim::AdamWGroup>(program, module));
  }
  return make.template operator()<optim::SGD>(
      optim::SGDOptions{.lr = kProgramRate,
                        .momentum = program.stepper == Stepper::momentum
                                        ? kProgramMomentum
                                        : 0,
                        .weight_decay = kProgramDecay},
      groups_of<optim::SGDGroup>(program, module));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const Program& program, const torch::nn::Module& module) {
  return with_stepper(
      program, module,
      []<class Optimizer>(const auto& options, const auto& groups)
          -> std::unique_ptr<torch::optim::Optimizer> {
        return std::make_unique<Optimizer>(groups, options);
      });
}

DistributedDataParallelOptions ddp_options(const Program& program) {
  DistributedDataParallelOptions options;
  options.find_unused_parameters = program.finds_unused;
  options.gradient_as_bucket_view = program.gradient_as_bucket_view;
  if (program.precision == Precision::bfloat16) {
    options.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16};
  }
  return options;
}

FullyShardOptions shard_options(const Program& program) {
  FullyShardOptions options;
  options.shared_memory = program.shares_memory;
  if (!program.reshards) options.reshard_after_forward = false;
  if (program.precision == Precision::bfloat16) {
    options.mp_policy.param_dtype = at::kBFloat16;
  }
  return options;
}

class TrainedByDdp final : public Trained {
 public:
  TrainedByDdp(const Program& program, uint64_t values)
      : program_(program),
        // Rank 0's values are those of all ranks.
        model_(make_net(program, values + static_cast<uint64_t>(get_rank())),
               ddp_options(program)) {
    double_gradients(program, *module());
    if (!is_zero(program.wrapping)) {
      optimizer_ = make_optimizer(program, *module());
      return;
    }
    optimizer_ = with_stepper(
        program, *module(),
        [&]<class Optimizer>(const auto& options, const auto& groups)
            -> std::unique_ptr<torch::optim::Optimizer> {
          std::vector<torch::optim::OptimizerParamGroup> whole;
          for (auto group : groups) {
            std::erase_if(group.params,
                          [](const auto& p) { return !p.requires_grad(); });
            whole.push_back(group.to_torch(options.to_torch()));
          }
          return std::make_unique<ZeroRedundancyOptimizer<Optimizer>>(
              model_, whole, options,
              ZeroRedundancyOptions{.shared_parameters =
                                        program.wrapping ==
                                        Wrapping::zero_shared});
        });
  }

  at::Tensor forward(Idiom idiom, at::Tensor& x, const Batch& batch,
                     Variables& variables) override {
    return call_model(model_, idiom, program_.argument, x, batch, variables);
  }
  void zero_grad(bool set_to_none) override { model_->zero_grad(set_to_none); }
  void without_sync(const std::function<void()>& body) override {
    const auto guard = model_.no_sync();
    body();
  }
  void join(const std::function<void()>& body) override {
    if (auto* sharded = dynamic_cast<Joinable*>(optimizer_.get())) {
      lockstep::join({&model_.joinable(), sharded}, body);
      return;
    }
    JoinedOptimizer joined(*optimizer_);
    lockstep::join({&model_.joinable(), &joined}, body);
  }
  std::shared_ptr<torch::nn::Module> module() const override {
    return model_.module();
  }
  void synchronize() override {
    auto* sharded = dynamic_cast<ShardedOptimizer*>(optimizer_.get());
    if (sharded) sharded->synchronize();
  }

 private:
  const Program program_;
  DistributedDataParallel<ProgramNet> model_;
};

class TrainedInShards final : public Trained {
 public:
  TrainedInShards(const Program& program, uint64_t values)
      : program_(program),
        model_(make_net(program, values, shard_options(program)),
               shard_options(program)) {
    double_gradients(program, *module());
    optimizer_ = make_optimizer(program, *module());
  }

  at::Tensor forward(Idiom idiom, at::Tensor& x, const Batch& batch,
                     Variables& variables) override {
    return call_model(model_, idiom, program_.argument, x, batch, variables);
  }
  void zero_grad(bool set_to_none) override { model_->zero_grad(set_to_none); }
  void without_sync(const std::function<void()>& body) override {
    const auto guard = model_.no_sync();
    body();
  }
  std::shared_ptr<torch::nn::Module> module() const override {
    return model_.ptr();
  }

 private:
  const Program program_;
  FullyShard<ProgramNet> model_;
};

class TrainedInStages final : public Trained {
 public:
  TrainedInStages(const Program& program, uint64_t values)
      : whole_(std::make_shared<torch::nn::Module>()) {
    const bool plain = program.stages == Stages::plain;
    PipelineOptions options{
        .schedule =
            plain ? schedule_1f1b(program.world_size, program.micro_batches)
                  : schedule_looped_bfs(1, program.micro_batches, 2),
        .loss = [](const at::Tensor& output, const at::Tensor& target) {
          return (output.to(at::kDouble) - target).square().mean();
        }};
    std::vector<PipelineStage> stages;
    if (plain) {
      stages.push_back(make_stage(program, get_rank(), values));
    } else {
      options.group = alone_ = split_group({{get_rank()}});
      for (int index : {0, 1}) {
        stages.push_back(make_stage(program, index, values));
      }
    }
    pipeline_.emplace(stages, options);
    double_gradients(program, *whole_);
    optimizer_ = make_optimizer(program, *whole_);
  }
  ~TrainedInStages() override {
    pipeline_.reset();
    if (alone_) destroy_process_group(std::move(alone_));
  }

  at::Tensor forward(Idiom, at::Tensor& x, const Batch&, Variables&) override {
    const auto result = pipeline_->eval({x});
    return result.outputs.empty() ? at::Tensor() : result.outputs[0];
  }
  at::Tensor train(const at::Tensor& x, const at::Tensor& target) override {
    return pipeline_->step({x}, target).loss;
  }
  void without_sync(const std::function<void()>& body) override { body(); }
  std::shared_ptr<torch::nn::Module> module() const override { return whole_; }

 private:
  PipelineStage make_stage(const Program& program, int index, uint64_t values) {
    const auto layers = program.layers.size();
    const auto stage = static_cast<size_t>(index);
    const auto count = stage_count(program);
    const bool replicated = program.stages == Stages::replicated;
    // Rank 0's values are those of all replicas.
    if (replicated) values += static_cast<uint64_t>(get_rank());
    std::optional<FullyShardOptions> units;
    if (program.stages == Stages::divided) units = shard_options(program);
    const auto net = std::make_shared<ProgramNet>(
        program, stage * layers / count, (stage + 1) * layers / count, values,
        dtype_of(program), units);
    for (const auto& layer : net->named_children()) {
      whole_->register_module(layer.key(), layer.value());
    }
    if (units) return {index, FullyShard<ProgramNet>(net, *units)};
    if (!replicated) return {index, net};
    replicas_.push_back(std::make_unique<DistributedDataParallel<ProgramNet>>(
        net, ddp_options(program)));
    return {index, *replicas_.back()};
  }

  std::shared_ptr<torch::nn::Module> whole_;  // has the layers of all stages
  ProcessGroupPtr alone_;
  std::vector<std::unique_ptr<DistributedDataParallel<ProgramNet>>> replicas_;
  std::optional<Pipeline> pipeline_;
};

}  // namespace

std::unique_ptr<Trained> make_trained(const Program& program, uint64_t values) {
  switch (program.wrapping) {
    case Wrapping::fully_shard:
      return std::make_unique<TrainedInShards>(program, values);
    case Wrapping::pipeline:
      return std::make_unique<TrainedInStages>(program, values);
    default:
      return std::make_unique<TrainedByDdp>(program, values);
  }
}

}  // namespace lockstep::internal::fuzz
