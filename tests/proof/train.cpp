// Trains the transformer of transformer.h, divided as options say, and writes
// losses, norms of gradients and parameters for proof.py.
//
//   proof_train CASES FOLDER
//   lockstep run --standalone --nproc-per-node=4 proof_train CASES FOLDER
//
// Each line of the file CASES is a name and options, for as many ranks as there
// are: "hybrid --data=2 --shard=2". The options are those of Options below.
// Rank 0 writes FOLDER/NAME.json, with the loss and the norm of each step, and
// FOLDER/NAME.safetensors with the whole parameters afterwards.

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
#include <utility>
#include <vector>

#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/lockstep.h"
#include "lockstep/model_parallel.h"
#include "tests/proof/transformer.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

// Some steps are clipped, others are not.
constexpr double kMaxNorm = 0.4;

struct Options {
  // How many ranks divide what.
  int data{1}, shard{1}, tensor{1}, pipeline{1}, context{1};
  // FullyShard: one copy of the parameters on this host, and ZeRO-3.
  bool private_memory{false}, keep_unsharded{false};
  // The optimizer's state is divided over data x context: "private", or with
  // "shared" parameters.
  std::string zero{};
  bool sequence_parallel{false};
  std::string schedule{"1F1B"};
  int stages_per_rank{1}, micro_batches{4};
  std::string order{"zigzag"};  // or "plain", or "heads"
  bool checkpoint{false}, tied{false}, non_causal{false};

  // The model and its data.
  std::string dtype{"float64"};
  int blocks{4};
  int64_t batch{16}, length{16};
  int steps{20};
  std::string first{};         // a file that gets the first values and the data
  std::string load{}, save{};  // folders of snapshots, before and after
};

Options parse(const std::string& line) {
  Options o;
  CLI::App app;
  app.add_option("--data", o.data);
  app.add_option("--shard", o.shard);
  app.add_option("--tensor", o.tensor);
  app.add_option("--pipeline", o.pipeline);
  app.add_option("--context", o.context);
  app.add_flag("--private", o.private_memory);
  app.add_flag("--keep-unsharded", o.keep_unsharded);
  app.add_option("--zero", o.zero);
  app.add_flag("--sequence-parallel", o.sequence_parallel);
  app.add_option("--schedule", o.schedule);
  app.add_option("--stages-per-rank", o.stages_per_rank);
  app.add_option("--micro-batches", o.micro_batches);
  app.add_option("--order", o.order);
  app.add_flag("--checkpoint", o.checkpoint);
  app.add_flag("--tied", o.tied);
  app.add_flag("--non-causal", o.non_causal);
  app.add_option("--dtype", o.dtype);
  app.add_option("--blocks", o.blocks);
  app.add_option("--batch", o.batch);
  app.add_option("--length", o.length);
  app.add_option("--steps", o.steps);
  app.add_option("--first", o.first);
  app.add_option("--load", o.load);
  app.add_option("--save", o.save);
  app.parse(line);
  return o;
}

// The whole batch of a step, [rows, length + 1]: equal on all ranks.
at::Tensor batch_of(const Options& o, int64_t step) {
  torch::manual_seed(1000 + static_cast<uint64_t>(step));
  return torch::randint(kVocabulary, {o.batch, o.length + 1}, at::kLong);
}

// A rank's part of the model, wrapped for what its ranks do together.
class DividedModel {
 public:
  // Collective. The one place where all kinds of parallelism meet.
  explicit DividedModel(const Options& o)
      : mesh_(init_device_mesh({{"pipeline", o.pipeline},
                                {"data", o.data},
                                {"context", o.context},
                                {"shard", o.shard},
                                {"tensor", o.tensor}})) {
    // Ranks with equal parameters, and ranks with different tokens.
    const auto replicas =
        mesh_.flatten({"data", "context"}, "replicas").group();
    averaged_over_ = replicas->size() * o.shard;
    tokens_ = o.batch * o.length;

    // Layers divide themselves over these groups.
    division_.tensor = mesh_.group("tensor");
    division_.sequence_parallel = o.sequence_parallel;
    division_.context = mesh_.group("context");
    division_.order =
        o.order == "plain" ? ContextOrder::plain : ContextOrder::zigzag;
    division_.exchange_heads = o.order == "heads";
    division_.is_causal = !o.non_causal;
    division_.length = o.length;
    division_.dtype = o.dtype == "float64" ? at::kDouble : at::kFloat;
    division_.checkpoint = o.checkpoint;
    if (o.shard > 1) {
      division_.shard = {.group = mesh_.group("shard"),
                         .replicate_group = replicas,
                         .shared_memory = !o.private_memory};
      if (o.keep_unsharded) division_.shard->reshard_after_forward = false;
    }

    // The stages of this rank: one without a pipeline. Each is sharded, or
    // averages its gradients over the replicas.
    const auto schedule = make_pipeline_schedule(
        o.schedule, o.pipeline, o.micro_batches, o.stages_per_rank);
    const auto facts = check_pipeline_schedule(schedule);
    std::vector<PipelineStage> stages;
    for (int stage = 0; stage < facts.stages; ++stage) {
      if (facts.rank_of_stage[static_cast<size_t>(stage)] !=
          mesh_.local_rank("pipeline")) {
        continue;
      }
      const auto make = [&] {
        const Layers layers{.first = stage == 0,
                            .begin = stage * o.blocks / facts.stages,
                            .end = (stage + 1) * o.blocks / facts.stages,
                            .last = stage == facts.stages - 1,
                            .tied = o.tied};
        return Stage(division_, layers);
      };
      if (division_.shard) {
        sharded_.emplace_back(make, *division_.shard);
        add_children(*sharded_.back().ptr());
        stages.emplace_back(stage, sharded_.back());
      } else if (replicas->size() > 1) {
        replicated_.push_back(std::make_unique<DistributedDataParallel<Stage>>(
            make(), DistributedDataParallelOptions{.process_group = replicas}));
        add_children(*replicated_.back()->module());
        stages.emplace_back(stage, *replicated_.back());
      } else {
        whole_.push_back(make());
        add_children(*whole_.back());
        stages.emplace_back(stage, whole_.back());
      }
    }
    if (o.pipeline == 1) return;
    std::vector<TiedWeight> tied;
    if (o.tied) {
      tied.push_back({.holders = {{0, "embedding.weight"},
                                  {facts.stages - 1, "embedding.weight"}}});
    }
    pipeline_.emplace(
        stages, PipelineOptions{.schedule = schedule,
                                .loss =
                                    [this](const at::Tensor& logits,
                                           const at::Tensor& targets) {
                                      return loss_of(logits, targets);
                                    },
                                .scale_gradients = false,  // the loss is a sum
                                .tied_weights = tied,
                                .group = mesh_.group("pipeline")});
  }
  // The loss of a pipeline refers to this object.
  DividedModel(const DividedModel&) = delete;
  DividedModel& operator=(const DividedModel&) = delete;

  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& o) {
    // Gradients that are zero but for rounding must not become steps.
    const optim::AdamWOptions adamw{.lr = 0.01, .eps = 1e-6};
    if (!o.zero.empty()) {
      return std::make_unique<ZeroRedundancyOptimizer<optim::AdamW>>(
          *replicated_.at(0), adamw,
          ZeroRedundancyOptions{.shared_parameters = o.zero == "shared"});
    }
    return std::make_unique<optim::AdamW>(parameters_, adamw);
  }

  // Forward and backward of this rank's part of `batch`. Returns the mean loss
  // over the whole batch, on all ranks.
  double step(const at::Tensor& batch) {
    const int64_t rows =
        batch.size(0) / (mesh_.size("data") * mesh_.size("shard"));
    const int64_t place = mesh_.local_rank("data") * mesh_.size("shard") +
                          mesh_.local_rank("shard");
    const at::Tensor mine = batch.narrow(0, place * rows, rows);
    // Targets are shifted before sequences are cut.
    const auto part = [&](int64_t begin) {
      return context_shard(
          mine.narrow(1, begin, batch.size(1) - 1), 1,
          {.group = division_.context, .order = division_.order});
    };
    at::Tensor loss = run(part(0), part(1));
    // Every rank of a tensor group has the same loss; with a pipeline only the
    // last stage has one.
    loss = loss.defined() ? loss.detach().to(at::kDouble) /
                                (averaged_over_ * mesh_.size("tensor"))
                          : at::zeros({}, at::kDouble);
    all_reduce(loss);
    return loss.item<double>();
  }

  // All layers of this rank.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  at::Tensor run(const at::Tensor& inputs, const at::Tensor& targets) {
    if (pipeline_) return pipeline_->step({inputs}, targets).loss;
    at::Tensor logits;
    if (!sharded_.empty()) {
      logits = sharded_[0](inputs);
    } else if (!replicated_.empty()) {
      logits = (*replicated_[0])(inputs);
    } else {
      logits = whole_[0](inputs);
    }
    at::Tensor loss = loss_of(logits, targets);
    loss.backward();
    return loss;
  }

  // The mean over all tokens of the batch, of which this rank has some: what
  // averages gradients divides by the number of ranks.
  at::Tensor loss_of(const at::Tensor& logits,
                     const at::Tensor& targets) const {
    return nn::vocab_parallel_cross_entropy(
               logits, targets,
               {.group = division_.tensor, .reduction = torch::kSum}) *
           (static_cast<double>(averaged_over_) / static_cast<double>(tokens_));
  }

  void add_children(const torch::nn::Module& stage) {
    for (const auto& parameter : stage.parameters()) {
      parameters_.push_back(parameter);
    }
    for (const auto& child : stage.named_children()) {
      // Two stages of this rank may hold a tied embedding; both are stepped.
      if (module_->named_children().contains(child.key())) continue;
      module_->register_module(child.key(), child.value());
    }
  }

  DeviceMesh mesh_;
  Division division_;
  int averaged_over_{1};
  int64_t tokens_{0};
  std::vector<FullyShard<Stage>> sharded_;
  std::vector<std::unique_ptr<DistributedDataParallel<Stage>>> replicated_;
  std::vector<Stage> whole_;
  std::optional<Pipeline> pipeline_;
  std::vector<at::Tensor> parameters_;
  std::shared_ptr<torch::nn::Module> module_ =
      std::make_shared<torch::nn::Module>();
};

void write_first(const Options& o, const torch::nn::Module& module) {
  NamedTensors first;
  for (const auto& item : module.named_parameters()) {
    first.emplace_back(item.key(), item.value().detach());
  }
  std::vector<at::Tensor> batches;
  for (int64_t step = 0; step < o.steps; ++step) {
    batches.push_back(batch_of(o, step));
  }
  first.emplace_back("batches", torch::stack(batches));
  save_tensors(o.first, first);
}

void train(const std::string& name, const Options& o, const fs::path& folder) {
  DividedModel model(o);
  const auto optimizer = model.make_optimizer(o);
  if (!o.first.empty()) write_first(o, *model.module());
  TrainingState state{.model = model.module(), .optimizer = optimizer.get()};
  if (!o.load.empty()) load_snapshot(o.load, state, {.will_save = false});
  std::vector<double> losses, norms;
  for (; state.step < o.steps; ++state.step) {
    optimizer->zero_grad();
    losses.push_back(model.step(batch_of(o, state.step)));
    norms.push_back(clip_grad_norm_(*optimizer, kMaxNorm).item<double>());
    optimizer->step();
  }
  auto* shared =
      dynamic_cast<ZeroRedundancyOptimizer<optim::AdamW>*>(optimizer.get());
  if (shared) shared->synchronize();
  if (!o.save.empty()) save_snapshot(o.save, state);
  const NamedTensors whole = full_state_dict(*model.module());
  if (get_rank() != 0) return;
  save_tensors(folder / (name + ".safetensors"), whole);
  std::ofstream(folder / (name + ".json")) << nlohmann::json{
      {"losses", losses}, {"norms", norms}, {"torch", TORCH_VERSION}};
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
      std::fprintf(stderr, "proof_train: %s, rank %d: %s\n", name.c_str(),
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
    std::fprintf(stderr, "usage: proof_train CASES FOLDER\n");
    return 2;
  }
  return lockstep::internal::testing::run(argv[1], argv[2]);
}
