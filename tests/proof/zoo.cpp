// Trains an odd model of zoo.h in a wrapper, and writes losses, norms of
// gradients and parameters for proof.py.
//
//   proof_zoo CASES FOLDER
//   lockstep run --standalone --nproc-per-node=2 proof_zoo CASES FOLDER
//
// Each line of the file CASES is a name and options: "a --model=tied
// --wrapper=ddp". Rank 0 writes FOLDER/NAME.json and FOLDER/NAME.safetensors,
// as proof_train does. One process trains on the parts of two ranks.

#include "tests/proof/zoo.h"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/lockstep.h"
#include "lockstep/model_parallel.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kParts = 2;  // the ranks
constexpr int64_t kSteps = 20;
constexpr double kMaxNorm = 0.4;
const optim::AdamWOptions kAdamW{.lr = 0.01, .eps = 1e-6};
const optim::SGDOptions kSgd{.lr = 0.1};

struct Options {
  std::string model{};
  // alone, ddp, zero, shard, private or pipeline
  std::string wrapper{"alone"};
};

at::Tensor data_of(int64_t step, int64_t what) {
  torch::manual_seed(static_cast<uint64_t>(1000 + 2 * step + what));
  return torch::randn({kRows, kWidth}, at::kDouble);
}

// Both optimizers of a model with sparse gradients are SGD.
template <class Make>
auto with_optimizer(const Options& o, const Make& make) {
  if (o.model == "sparse") return make.template operator()<optim::SGD>(kSgd);
  return make.template operator()<optim::AdamW>(kAdamW);
}

class Training {
 public:
  explicit Training(const Options& o) : o_(o), model_(make_odd(o.model)) {
    if (o.wrapper == "ddp" || o.wrapper == "zero") {
      ddp_.emplace(model_,
                   DistributedDataParallelOptions{.find_unused_parameters =
                                                      o.model == "adaptive" ||
                                                      o.model == "branches"});
    } else if (o.wrapper == "shard" || o.wrapper == "private") {
      sharded_.emplace(
          model_, FullyShardOptions{.shared_memory = o.wrapper == "shard"});
    } else if (o.wrapper == "pipeline") {
      make_pipeline();
    }
    make_optimizers();
  }

  // Returns the loss over the whole batch, and sets the norm of the gradients.
  double step(int64_t step, double& norm) {
    for (auto& one : optimizers_) one->zero_grad();
    const double loss = forward_and_backward(step);
    // Sparse gradients have another optimizer, and the norm is that of one.
    norm = clip_grad_norm_(*optimizers_[0], kMaxNorm).item<double>();
    for (auto& one : optimizers_) one->step();
    model_->after_step();
    return loss;
  }

  const torch::nn::Module& module() const {
    return half_ ? *half_ : static_cast<const torch::nn::Module&>(*model_);
  }

 private:
  // The children and parameters of one half, with the names that they have.
  struct Half : torch::nn::Module {
    Half(std::shared_ptr<OddModel> of, bool is_first)
        : model(std::move(of)), first(is_first) {
      const std::string_view prefix = first ? "front" : "back";
      for (const auto& item : model->named_parameters(/*recurse=*/false)) {
        if (!item.key().starts_with(prefix)) continue;
        register_parameter(item.key(), item.value());
      }
      for (const auto& item : model->named_children()) {
        if (!item.key().starts_with(prefix)) continue;
        register_module(item.key(), item.value());
      }
    }
    at::Tensor forward(const at::Tensor& x) {
      return first ? model->front(x) : model->back(x);
    }
    std::shared_ptr<OddModel> model;
    bool first;
  };

  void make_pipeline() {
    half_ = std::make_shared<Half>(model_, get_rank() == 0);
    pipeline_.emplace(
        std::vector<PipelineStage>{{get_rank(), half_}},
        PipelineOptions{.schedule = schedule_1f1b(kParts, 4),
                        .loss = [model = model_](const at::Tensor& output,
                                                 const at::Tensor& target) {
                          return model->loss(output, target);
                        }});
  }

  void make_optimizers() {
    std::vector<at::Tensor> dense, sparse;
    for (const auto& item : module().named_parameters()) {
      const bool is_sparse =
          o_.model == "sparse" && item.key().starts_with("embedding");
      (is_sparse ? sparse : dense).push_back(item.value());
    }
    with_optimizer(o_, [&]<class Optimizer>(const auto& options) {
      if (o_.wrapper == "zero") {
        const std::vector<torch::optim::OptimizerParamGroup> groups{dense};
        optimizers_.push_back(
            std::make_unique<ZeroRedundancyOptimizer<Optimizer>>(*ddp_, groups,
                                                                 options));
      } else {
        optimizers_.push_back(std::make_unique<Optimizer>(dense, options));
      }
    });
    if (sparse.empty()) return;
    optimizers_.push_back(
        std::make_unique<torch::optim::SGD>(sparse, kSgd.to_torch()));
  }

  double forward_and_backward(int64_t step) {
    const auto x = data_of(step, 0), target = data_of(step, 1);
    if (o_.wrapper == "alone") return alone(x, target, step);
    at::Tensor loss;
    if (pipeline_) {
      loss = pipeline_->step({x}, target).loss;
      loss = loss.defined() ? loss.detach() : at::zeros({}, at::kDouble);
    } else {
      loss = part(x, target, step, get_rank());
      loss.backward();
      loss = loss.detach() / kParts;
    }
    all_reduce(loss);
    return loss.item<double>();
  }

  double alone(const at::Tensor& x, const at::Tensor& target, int64_t step) {
    at::Tensor loss;
    if (o_.model == "norm") {
      loss = model_->loss(model_->forward(x, step, states_[0]), target);
    } else {
      // A wrapper gives the buffers of rank 0 to all ranks.
      std::vector<at::Tensor> before, first;
      for (const auto& buffer : model_->buffers()) {
        before.push_back(buffer.clone());
      }
      const auto set = [&](const std::vector<at::Tensor>& values) {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < values.size(); ++i) {
          model_->buffers()[i].set_data(values[i].clone());
        }
      };
      for (int rank = 0; rank < kParts; ++rank) {
        set(before);
        const auto one = part(x, target, step, rank) / kParts;
        loss = loss.defined() ? loss + one : one;
        if (rank > 0) continue;
        for (const auto& buffer : model_->buffers()) {
          first.push_back(buffer.clone());
        }
      }
      set(first);
    }
    loss.backward();
    return loss.item<double>();
  }

  // The loss of a rank's part of the batch.
  at::Tensor part(const at::Tensor& x, const at::Tensor& target, int64_t step,
                  int rank) {
    constexpr int64_t kRowsOfRank = kRows / kParts;
    const auto mine = [&](const at::Tensor& all) {
      return all.narrow(0, rank * kRowsOfRank, kRowsOfRank);
    };
    auto& state = states_[static_cast<size_t>(rank)];
    if (state.defined()) state = state.detach();
    // For dropout.
    torch::manual_seed(static_cast<uint64_t>(5000 + 2 * step + rank));
    at::Tensor output;
    if (ddp_) {
      output = (*ddp_)(mine(x), step, state);
    } else if (sharded_) {
      output = (*sharded_)(mine(x), step, state);
    } else {
      output = model_->forward(mine(x), step, state);
    }
    return model_->loss(output, mine(target));
  }

  const Options o_;
  std::shared_ptr<OddModel> model_;
  std::shared_ptr<Half> half_;
  std::optional<DistributedDataParallel<OddModel>> ddp_;
  std::optional<FullyShard<OddModel>> sharded_;
  std::optional<Pipeline> pipeline_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::vector<at::Tensor> states_ = std::vector<at::Tensor>(kParts);
};

void train(const std::string& name, const Options& o, const fs::path& folder) {
  Training training(o);
  std::vector<double> losses, norms;
  for (int64_t step = 0; step < kSteps; ++step) {
    double norm = 0;
    losses.push_back(training.step(step, norm));
    norms.push_back(norm);
  }
  NamedTensors whole;
  if (o.model == "complex") {  // which safetensors cannot hold
    for (const auto& item : training.module().named_parameters()) {
      const auto value = item.value().detach();
      whole.emplace_back(item.key(), value.is_complex()
                                         ? torch::view_as_real(value).clone()
                                         : value);
    }
  } else {
    whole = full_state_dict(training.module());
  }
  // FullyShard has one name for a weight with two.
  std::erase_if(whole, [](const auto& item) {
    return !item.second.is_floating_point() || item.first == "output";
  });
  if (get_rank() != 0) return;
  save_tensors(folder / (name + ".safetensors"), whole);
  std::ofstream(folder / (name + ".json"))
      << nlohmann::json{{"losses", losses}, {"norms", norms}};
}

Options parse(const std::string& line) {
  Options o;
  CLI::App app;
  app.add_option("--model", o.model);
  app.add_option("--wrapper", o.wrapper);
  app.add_option("--data")->expected(1);  // for proof.py
  app.parse(line);
  return o;
}

int run(const fs::path& cases, const fs::path& folder) {
  auto group = init_process_group("", {.timeout = std::chrono::seconds(60)});
  torch::set_num_threads(1);
  std::ifstream lines(cases);
  for (std::string line; std::getline(lines, line);) {
    const auto space = std::min(line.find(' '), line.size());
    const std::string name = line.substr(0, space);
    try {
      train(name, parse(line.substr(space)), folder);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "proof_zoo: %s, rank %d: %s\n", name.c_str(),
                   get_rank(), error.what());
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: proof_zoo CASES FOLDER\n");
    return 2;
  }
  return lockstep::internal::testing::run(argv[1], argv[2]);
}
