#include "tests/parallel/parity/training.h"

#include <torch/torch.h>

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/comm/init.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"
#include "tests/parallel/parity/models.h"
#include "tests/parallel/parity/optimizers.h"

namespace lockstep::internal::testing {
namespace {

DistributedDataParallelOptions ddp_options(const Case& test) {
  DistributedDataParallelOptions options;
  options.broadcast_buffers = test.broadcast_buffers;
  options.find_unused_parameters = test.find_unused_parameters;
  options.static_graph = test.static_graph;
  if (test.bucket_cap_mb > 0) options.bucket_cap_mb = test.bucket_cap_mb;
  if (test.mixed_precision) {
    options.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16,
                                             .reduce_dtype = at::kBFloat16,
                                             .buffer_dtype = at::kBFloat16};
  }
  return options;
}

CommHook make_hook(const Case& test) {
  if (test.hook == "allreduce") return allreduce_hook();
  if (test.hook == "fp16") return fp16_compress_hook();
  if (test.hook == "bf16") return bf16_compress_hook();
  if (test.hook == "power_sgd") {
    // Equal seeds give equal first Qs.
    return power_sgd_hook(std::make_shared<PowerSGDState>(PowerSGDOptions{
        .matrix_approximation_rank = test.power_sgd_rank,
        .start_power_sgd_iter = kStartPowerSgd,
        .min_compression_rate = 1,
        .batch_tensors_with_same_shape = test.batch_tensors_with_same_shape}));
  }
  throw std::invalid_argument("no parity hook '" + test.hook + "'");
}

// Returns the batches of this rank without end, epoch after epoch.
class Batches {
 public:
  explicit Batches(const Record& python)
      : dataset_(python.at("data"), python.at("target")) {}

  torch::data::Example<> next() {
    if (batch_) ++*batch_;
    while (!batch_ || *batch_ == loader_.end()) {
      batch_.reset();  // one pass at a time
      sampler_.set_epoch(epoch_++);
      batch_.emplace(loader_.begin());
    }
    return **batch_;
  }

 private:
  TensorDataset dataset_;
  DistributedSampler sampler_{kSamples, {.seed = kSamplerSeed}};
  DataLoader<TensorDataset> loader_{
      dataset_, sampler_, {.batch_size = kBatchSize}};
  std::optional<DataLoader<TensorDataset>::Iterator> batch_;
  int64_t epoch_ = 0;
};

// LibTorch's Module::to(dtype) would also convert counters.
void to_double(torch::nn::Module& module) {
  for (auto& tensor : module.parameters()) {
    tensor.set_data(tensor.data().to(torch::kDouble));
  }
  for (auto& tensor : module.buffers()) {
    if (tensor.is_floating_point()) tensor.set_data(tensor.to(torch::kDouble));
  }
}

std::shared_ptr<ParityModel> initial_model(const Case& test,
                                           const Record& python) {
  const std::string prefix = "initial.";
  NamedTensors state;
  for (const auto& [name, value] : python) {
    if (name.starts_with(prefix)) {
      state.emplace_back(name.substr(prefix.size()), value);
    }
  }
  auto net = make_model(test.model);
  if (test.dtype == "float64") to_double(*net);
  load_state_dict(*net, state);
  return net;
}

class Training {
 public:
  Training(const Case& test, const Record& python)
      : test_(test),
        net_(initial_model(test, python)),
        model_(net_, ddp_options(test)),
        optimizer_(make_optimizer(test, model_)),
        scaler_({.device = at::kCPU,
                 .init_scale = kInitScale,
                 .growth_interval = kGrowthInterval,
                 .enabled = test.grad_scaler}),
        batches_(python),
        steps_(kSteps - (get_rank() == 0 ? test.early : 0)) {
    if (!test.hook.empty()) model_.register_comm_hook(make_hook(test));
    for (const char* series : {"losses", "norms", "scales"}) {
      auto found = python.find(series);
      if (found == python.end()) continue;
      record_[series] = torch::zeros_like(found->second);
    }
  }

  Record run() {
    auto steps = [this] {
      for (step_ = 0; step_ < steps_; ++step_) step();
    };
    if (test_.early > 0) {
      model_.join(steps, {.divide_by_initial_world_size =
                              test_.divide_by_initial_world_size});
    } else {
      steps();
    }
    if (auto* sharded =
            dynamic_cast<internal::ShardedOptimizer*>(optimizer_.get())) {
      sharded->synchronize();
    }
    for (const auto& [name, value] : state_dict(*net_)) {
      record_["final." + name] = value.clone();
    }
    return std::move(record_);
  }

 private:
  double loss_factor() const {
    if (!test_.grad_scaler) return 1;
    for (const auto& [step, rank] : kInfiniteLosses) {
      if (step_ == step && get_rank() == rank) {
        return std::numeric_limits<double>::infinity();
      }
    }
    return 1;
  }

  at::Tensor loss_of_next_batch() {
    Autocast lowered(at::kCPU, at::kBFloat16, test_.autocast);
    auto batch = batches_.next();
    return loss_of(model_(batch.data), batch.target) /
           static_cast<double>(test_.accumulate);
  }

  void backward() {
    auto loss = loss_of_next_batch();
    record_["losses"][step_] += loss.detach();
    scaler_.scale(loss * loss_factor()).backward();
  }

  void clip() {
    if (test_.clip == "norm") {
      record_["norms"][step_] = clip_grad_norm_(*optimizer_, kMaxNorm);
    } else if (test_.clip == "value") {
      clip_grad_value_(*optimizer_, kClipValue);
    }
  }

  void step() {
    optimizer_->zero_grad();
    for (int64_t micro = 1; micro < test_.accumulate; ++micro) {
      auto on_this_rank_only = model_.no_sync();
      backward();
    }
    backward();
    if (!test_.clip.empty()) {
      scaler_.unscale_(*optimizer_);
      clip();
    }
    scaler_.step(*optimizer_);
    scaler_.update();
    if (test_.grad_scaler) record_["scales"][step_] = scaler_.get_scale();
  }

  const Case& test_;
  std::shared_ptr<ParityModel> net_;
  ParallelModel model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  GradScaler scaler_;
  Batches batches_;
  int64_t steps_;
  int64_t step_ = 0;
  Record record_;
};

}  // namespace

Record train(const Case& test, const Record& python) {
  return Training(test, python).run();
}

}  // namespace lockstep::internal::testing
