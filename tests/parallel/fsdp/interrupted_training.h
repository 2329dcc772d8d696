#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/parallel/fsdp/fully_shard.h"

// A training with FullyShard in which ranks fail. It does what HealedTraining
// does, with files: each rank writes its part of the state before each step,
// and reads it when its groups were made again.
namespace lockstep::internal::testing {

struct InterruptedForm {
  const char* backend = "lockstep";
  bool shared_memory = true;
  bool two_hosts = false;  // of which each has half of the ranks
  bool replicas = false;   // each half of the ranks divides the parameters
  std::optional<ReshardAfterForward> reshard_after_forward{};
  bool low_precision = false;  // in forward and backward
  bool scales = false;         // with GradScaler and clipping
  bool accumulates = false;    // two batches for a step
  int64_t width = 9;           // which the ranks cannot divide evenly
};

// The forms by the names that programs take.
inline const std::map<std::string, InterruptedForm>& interrupted_forms() {
  static const std::map<std::string, InterruptedForm> forms{
      {"common", {}},
      {"common-low", {.low_precision = true, .scales = true}},
      {"gathered", {.shared_memory = false, .accumulates = true}},
      {"gloo", {.backend = "gloo", .low_precision = true, .scales = true}},
      {"kept", {.shared_memory = false, .reshard_after_forward = false}},
      {"neighbours", {.shared_memory = false, .reshard_after_forward = 2}},
      {"replicas", {.two_hosts = true, .replicas = true, .scales = true}},
      {"hosts", {.two_hosts = true}},
  };
  return forms;
}

// A place where a rank fails.
struct Interruption {
  int step;
  char moment;  // 'f', in a forward; 'b', in a backward; 's', before the step
  int rank;
};

// Called at each moment of each step; what it throws ends the step.
inline std::function<void(int step, char moment)> at_moment;
inline int step_now = 0;

struct InterruptedBlockImpl : torch::nn::Module {
  explicit InterruptedBlockImpl(int64_t width, bool is_interrupted)
      : is_interrupted_(is_interrupted) {
    up = register_module("up", torch::nn::Linear(width, 3 * width - 1));
    down = register_module("down", torch::nn::Linear(3 * width - 1, width));
    frozen = register_parameter("frozen", torch::full({width}, 0.5),
                                /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = up(x * frozen).tanh();
    if (is_interrupted_ && at::GradMode::is_enabled()) {
      // As of SyncBatchNorm: ranks that gather the next unit before this, and
      // those that do so later, would disagree.
      const auto ones = at::ones({1});
      all_reduce(ones);
      at_moment(step_now, 'f');
      hidden.register_hook(
          [](const at::Tensor& /*gradient*/) { at_moment(step_now, 'b'); });
    }
    return x + down(hidden);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  at::Tensor frozen;

 private:
  const bool is_interrupted_;
};
TORCH_MODULE(InterruptedBlock);

struct InterruptedNetImpl : torch::nn::Module {
  InterruptedNetImpl(const FullyShardOptions& options, int64_t width) {
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back([&] { return InterruptedBlock(width, i == 1); },
                          options);
      register_module("block" + std::to_string(i), blocks.back().ptr());
    }
    head = register_module("head", torch::nn::Linear(width, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<FullyShard<InterruptedBlock>> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(InterruptedNet);

// Called before init_process_group().
inline void take_host(const InterruptedForm& form, int rank, int size) {
  if (!form.two_hosts) return;
  ::setenv("LOCKSTEP_HOST_ID", 2 * rank < size ? "a" : "b", 1);
}

class InterruptedTraining {
 public:
  // `folder`: one for each training; all its ranks have the same.
  InterruptedTraining(const InterruptedForm& form, std::filesystem::path folder)
      : form_(form),
        folder_(std::move(folder)),
        model_(make_model()),
        optimizer_(model_->parameters(),
                   torch::optim::AdamWOptions(0.01).weight_decay(0.1)),
        scaler_({.init_scale = 256, .growth_interval = 3}) {
    std::filesystem::create_directories(folder_);
  }

  // Trains from the step to which this rank has come.
  void run(int steps) {
    for (; step_ < steps; ++step_) {
      step_now = step_;
      write_record();
      train();
    }
    barrier();
  }

  // After reconfigure(): all ranks go back to a step of which each has the
  // state.
  void resume() {
    int64_t last = 0;
    while (std::filesystem::exists(record(last + 1))) ++last;
    for (const auto& theirs : gather_numbers(default_group(), {last})) {
      last = std::min(last, theirs[0]);
    }
    step_ = static_cast<int>(last);
    read_record();
    run_reconfigured();
  }

  // Returns the bytes of this rank's parts; of the whole, on rank 0; of a loss;
  // and of the parts as they come out of a snapshot. Collective.
  std::string result() {
    std::string bytes = own_bytes();
    for (const auto& item : full_state_dict(*model_.ptr())) {
      append(bytes, item.second);
    }
    const at::NoGradGuard no_grad;
    append(bytes, model_(batch(1000)));
    const auto path = (folder_ / "snapshots/").string();
    TrainingState state{.model = model_.ptr(), .optimizer = &optimizer_};
    save_snapshot(path, state);
    for (auto& shard : model_->parameters()) shard.zero_();
    load_snapshot(path, state);
    return bytes + own_bytes();
  }

 private:
  FullyShard<InterruptedNet> make_model() const {
    FullyShardOptions options{
        .reshard_after_forward = form_.reshard_after_forward,
        .shared_memory = form_.shared_memory};
    const int size = get_world_size();
    if (form_.replicas) {
      std::vector<std::vector<int>> rows(2), columns(size / 2);
      for (int rank = 0; rank < size; ++rank) {
        rows[2 * rank / size].push_back(rank);
        columns[rank % (size / 2)].push_back(rank);
      }
      options.group = new_subgroups_by_enumeration(rows);
      options.replicate_group = new_subgroups_by_enumeration(columns);
    }
    if (form_.low_precision) {
      options.mp_policy = {.param_dtype = at::kBFloat16,
                           .reduce_dtype = at::kFloat};
    }
    torch::manual_seed(3);
    return FullyShard<InterruptedNet>(
        [&] { return InterruptedNet(options, form_.width); }, options);
  }

  at::Tensor batch(int number) const {
    torch::manual_seed(static_cast<uint64_t>(100 * number + get_rank()));
    return torch::randn({6, form_.width});
  }

  void train() {
    optimizer_.zero_grad();
    if (form_.accumulates) {
      const auto local = model_.no_sync();
      backward(2 * step_);
    }
    backward(2 * step_ + 1);
    at_moment(step_, 's');
    if (!form_.scales) {
      optimizer_.step();
      return;
    }
    scaler_.unscale_(optimizer_);
    clip_grad_norm_(optimizer_, 0.2);
    scaler_.step(optimizer_);
    scaler_.update();
  }

  void backward(int number) {
    const auto loss = model_(batch(number)).square().mean();
    (form_.scales ? scaler_.scale(loss) : loss).backward();
  }

  std::filesystem::path record(int64_t step) const {
    return folder_ /
           ("rank" + std::to_string(get_rank()) + "." + std::to_string(step));
  }

  void write_record() const {
    const auto path = record(step_).string();
    torch::save(optimizer_, path + ".optimizer");
    std::ofstream(path + ".scaler") << to_json(scaler_.state_dict().value());
    std::vector<at::Tensor> shards;
    for (const auto& shard : model_->parameters()) {
      shards.push_back(shard.detach().clone());
    }
    torch::save(shards, path + ".shards");
    std::filesystem::rename(path + ".shards", path);
  }

  void read_record() {
    const auto path = record(step_).string();
    torch::load(optimizer_, path + ".optimizer");
    std::string scaler;
    std::getline(std::ifstream(path + ".scaler"), scaler);
    scaler_.load_state_dict(grad_scaler_state_from_json(scaler));
    std::vector<at::Tensor> saved;
    torch::load(saved, path);
    const at::NoGradGuard no_grad;
    auto shards = model_->parameters();
    for (size_t i = 0; i < shards.size(); ++i) shards[i].copy_(saved[i]);
  }

  static void append(std::string& bytes, const at::Tensor& tensor) {
    const auto whole = tensor.detach().contiguous();
    bytes.append(static_cast<const char*>(whole.const_data_ptr()),
                 whole.nbytes());
  }
  std::string own_bytes() const {
    std::string bytes;
    for (const auto& shard : model_->parameters()) append(bytes, shard);
    return bytes;
  }

  const InterruptedForm form_;
  const std::filesystem::path folder_;
  FullyShard<InterruptedNet> model_;
  torch::optim::AdamW optimizer_;
  GradScaler scaler_;
  int step_ = 0;
};

}  // namespace lockstep::internal::testing
