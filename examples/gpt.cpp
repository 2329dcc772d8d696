// Trains a GPT on the bytes of a text, and lets it go on with the text. The
// model can be divided over the ranks in every way that Lockstep knows, and the
// ways can be combined; the losses are those of one process.
//
//   build/bin/gpt
//   build/bin/lockstep run --standalone --nproc-per-node=2 build/bin/gpt
//   ... --nproc-per-node=2 build/bin/gpt --shard 2 --checkpoint
//   ... --nproc-per-node=4 build/bin/gpt --pipeline 2 --tensor 2
//   build/bin/gpt --compare 2 --steps 30
//
// Ranks that no option takes train on different sequences, each with the whole
// model; those of --shard do so with a part of each parameter (FSDP). The ranks
// of --context-parallel have parts of each sequence, those of --tensor parts of
// each layer, those of --pipeline parts of the list of layers.
//
// With --snapshot, SIGTERM and Ctrl-C end it after the step, and after a last
// snapshot.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <lockstep/model_parallel.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = lockstep::nn;
using torch::Tensor;

constexpr int64_t kBytes = 256;  // the vocabulary

struct Options {
  int64_t layers = 6, heads = 6, width = 192;
  int64_t context = 128;      // tokens of a sequence
  int64_t batch_size = 16;    // sequences of a step, all ranks together
  int64_t micro_batches = 0;  // 0 means 2 for each rank of the pipeline, or 1
  int64_t steps = 300;
  double lr = 2e-3;
  int64_t seed = 0;
  std::string text = LOCKSTEP_GPT_TEXT;
  int shard = 1, pipeline = 1, context_parallel = 1, tensor = 1;
  std::string schedule = "1F1B";
  int stages_per_rank = 1;
  bool no_shared_memory = false, checkpoint = false, bf16 = false;
  std::string snapshot;
  int64_t save_every = 0;
  int64_t sample = 200;
  std::string report;
  int compare = 0;
};

// Which ranks do what.
struct Plan {
  explicit Plan(const Options& options)
      : mesh(lockstep::init_device_mesh({{"pipeline", options.pipeline},
                                         {"data", -1},  // all other ranks
                                         {"shard", options.shard},
                                         {"context", options.context_parallel},
                                         {"tensor", options.tensor}})),
        // These have equal parameters, and average their gradients.
        replicas(mesh.flatten({"data", "context"}, "replicas").group()),
        shard(mesh.group("shard")),
        tensor(mesh.group("tensor")),
        context{.group = mesh.group("context"),
                .order = lockstep::ContextOrder::zigzag} {}

  lockstep::DeviceMesh mesh;
  lockstep::ProcessGroupPtr replicas, shard, tensor;
  lockstep::ContextShardOptions context;  // which tokens a rank has
};

// A layer of a transformer. Each rank of the tensor group has some of the heads
// and of the hidden features; each rank of the context group some of the
// tokens.
struct BlockImpl : torch::nn::Module {
  BlockImpl(const Options& options, const Plan& plan)
      : head_width(options.width / options.heads),
        tensor(plan.tensor),
        context(plan.context) {
    const int64_t width = options.width;
    const nn::ColumnParallelLinearOptions part{.group = tensor,
                                               .reduce_input_gradient = false};
    const auto norm = [&] {
      return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
    };
    norm1 = register_module("norm1", norm());
    query =
        register_module("query", nn::ColumnParallelLinear(width, width, part));
    key = register_module("key", nn::ColumnParallelLinear(width, width, part));
    value =
        register_module("value", nn::ColumnParallelLinear(width, width, part));
    projection = register_module(
        "projection", nn::RowParallelLinear(width, width, {.group = tensor}));
    norm2 = register_module("norm2", norm());
    up = register_module(
        "up", nn::ColumnParallelLinear(width, 4 * width, {.group = tensor}));
    down = register_module(
        "down", nn::RowParallelLinear(4 * width, width, {.group = tensor}));
  }

  // x: [sequences, tokens, width].
  Tensor forward(Tensor x) {
    x = x + attention(lockstep::copy_to_tensor_group(norm1(x), tensor));
    return x + down(torch::gelu(up(norm2(x))));
  }
  Tensor attention(const Tensor& x) {
    const auto heads = [this](const Tensor& features) {
      return features.unflatten(2, {-1, head_width}).transpose(1, 2);
    };
    const auto y = lockstep::ring_attention(
        heads(query(x)), heads(key(x)), heads(value(x)),
        {.group = context.group, .is_causal = true, .order = context.order});
    return projection(y.transpose(1, 2).flatten(2));
  }

  int64_t head_width;
  lockstep::ProcessGroupPtr tensor;
  lockstep::ContextShardOptions context;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::ColumnParallelLinear query{nullptr}, key{nullptr}, value{nullptr};
  nn::ColumnParallelLinear up{nullptr};
  nn::RowParallelLinear projection{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

lockstep::FullyShardOptions shard_options(const Options& options,
                                          const Plan& plan) {
  return {
      .group = plan.shard,
      .replicate_group = plan.replicas->size() > 1 ? plan.replicas : nullptr,
      .shared_memory = !options.no_shared_memory};
}

// Some of the layers, with the embedding before the first one and the output
// after the last one. One stage of one has the whole model. Each rank makes all
// layers and keeps its own, so that the first values do not depend on stages.
struct StageImpl : torch::nn::Module {
  StageImpl(const Options& options, const Plan& plan, int stage, int stages)
      : bf16(options.bf16), sequence(options.context), context(plan.context) {
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    const bool first = stage == 0, last = stage + 1 == stages;
    torch::nn::Embedding bytes(kBytes, options.width);
    torch::nn::Embedding places(sequence, options.width);
    torch::nn::init::normal_(bytes->weight, 0, 0.02);
    torch::nn::init::normal_(places->weight, 0, 0.02);
    if (first) {
      tokens = register_module(
          "tokens", nn::VocabParallelEmbedding(bytes, {.group = plan.tensor}));
      positions = register_module("positions", places);
    }
    for (int64_t i = 0; i < options.layers; ++i) {
      const auto make = [&] { return Block(options, plan); };
      if (i * stages / options.layers == stage) {
        add("block" + std::to_string(i), make, options, plan);
      } else {
        make();
      }
    }
    nn::ColumnParallelLinear output(options.width, kBytes,
                                    {.group = plan.tensor, .bias = false});
    if (last) {
      norm = register_module(
          "norm",
          torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
      head = register_module("head", output);
    }
  }

  // Takes bytes [sequences, tokens] or the result of the stage before
  // [sequences, tokens, width]; returns the latter, or this rank's part of the
  // logits [sequences, tokens, part of 256].
  Tensor forward(Tensor x) {
    std::optional<lockstep::Autocast> mixed;
    if (bf16) mixed.emplace(torch::kCPU, torch::kBFloat16);
    if (tokens) {
      x = tokens(x) + positions(lockstep::context_positions(sequence, context));
    }
    for (auto& block : blocks) x = block(x);
    return head ? head(norm(x)) : x;
  }

  // Adds a block in the form that the options ask for.
  template <typename Make>
  void add(const std::string& name, const Make& make, const Options& options,
           const Plan& plan) {
    std::function<Tensor(const Tensor&)> call;
    if (options.shard > 1) {
      lockstep::FullyShard<Block> block(make, shard_options(options, plan));
      register_module(name, block.ptr());
      call = [block](const Tensor& x) mutable { return block(x); };
    } else {
      Block block = make();
      register_module(name, block);
      call = [block](const Tensor& x) mutable { return block(x); };
    }
    if (!options.checkpoint) {
      blocks.push_back(call);
    } else {
      blocks.push_back(
          [call](const Tensor& x) { return lockstep::checkpoint(call, x); });
    }
  }

  bool bf16;
  int64_t sequence;
  lockstep::ContextShardOptions context;
  nn::VocabParallelEmbedding tokens{nullptr};
  torch::nn::Embedding positions{nullptr};
  std::vector<std::function<Tensor(const Tensor&)>> blocks;
  torch::nn::LayerNorm norm{nullptr};
  nn::ColumnParallelLinear head{nullptr};
};
TORCH_MODULE(Stage);

// A stage that averages its gradients, in one of two forms.
struct ParallelStage {
  std::shared_ptr<StageImpl> module;
  std::function<Tensor(const Tensor&)> forward;
  lockstep::PipelineStage stage;
};

ParallelStage make_stage(const Options& options, const Plan& plan, int stage,
                         int stages) {
  const auto make = [&] { return Stage(options, plan, stage, stages); };
  if (options.shard > 1) {
    lockstep::FullyShard<Stage> model(make, shard_options(options, plan));
    return {model.ptr(), [model](const Tensor& x) mutable { return model(x); },
            lockstep::PipelineStage(stage, model)};
  }
  auto model = std::make_shared<lockstep::DistributedDataParallel<Stage>>(
      make(),
      lockstep::DistributedDataParallelOptions{.process_group = plan.replicas});
  return {model->module(), [model](const Tensor& x) { return (*model)(x); },
          lockstep::PipelineStage(stage, *model)};
}

// The parts of the model on this rank, and how they compute.
class Model {
 public:
  Model(const Options& options, Plan& plan)
      : plan_(plan),
        tokens_(options.context),
        micro_batches_(options.micro_batches) {
    if (micro_batches_ == 0) {
      micro_batches_ = options.pipeline > 1 ? 2 * options.pipeline : 1;
    }
    const auto schedule = lockstep::make_pipeline_schedule(
        options.pipeline > 1 ? options.schedule : "GPipe", options.pipeline,
        static_cast<int>(micro_batches_),
        options.pipeline > 1 ? options.stages_per_rank : 1);
    const auto ranks =
        lockstep::check_pipeline_schedule(schedule).rank_of_stage;
    const int stages = static_cast<int>(ranks.size());
    for (int stage = 0; stage < stages; ++stage) {
      if (ranks[stage] != plan.mesh.local_rank("pipeline")) continue;
      stages_.push_back(make_stage(options, plan, stage, stages));
      for (const auto& child : stages_.back().module->named_children()) {
        module_->register_module(child.key(), child.value());
      }
    }
    if (micro_batches_ == 1 && stages == 1) return;
    std::vector<lockstep::PipelineStage> pipeline_stages;
    for (auto& part : stages_) pipeline_stages.push_back(part.stage);
    pipeline_.emplace(
        pipeline_stages,
        lockstep::PipelineOptions{
            .schedule = schedule,
            .loss = [this](
                        const Tensor& logits,
                        const Tensor& target) { return loss(logits, target); },
            .return_outputs = false,
            .group = plan.mesh.group("pipeline")});
  }

  // Forward and backward of this rank's sequences [sequences, tokens]; returns
  // the mean loss over all ranks.
  Tensor step(const Tensor& data, const Tensor& target) {
    const auto x = part_of(data), y = part_of(target);
    Tensor mean;
    if (pipeline_) {
      mean = pipeline_->step({x}, y).loss;
    } else {
      mean = loss(stages_[0].forward(x), y);
      mean.backward();
    }
    return mean.defined() ? mean.detach() : mean;
  }

  // The logits [rows, 256] of the byte after each row of `data`, [rows,
  // tokens], equal on all ranks; as many rows as there are micro-batches.
  Tensor next(const Tensor& data) {
    const torch::NoGradGuard no_grad;
    auto logits = torch::zeros({data.size(0), kBytes});
    Tensor all;
    if (!pipeline_) {
      all = stages_[0].forward(part_of(data));
    } else if (auto outputs = pipeline_->eval({part_of(data)}).outputs;
               !outputs.empty()) {
      all = outputs[0];
    }
    if (all.defined()) {
      all = lockstep::gather_from_tensor_group(all, 2, plan_.tensor);
      all = lockstep::context_unshard(all, 1, plan_.context);
      logits = all.select(1, -1).to(torch::kFloat) / ranks_with_loss();
    }
    // The ranks of other stages add zeros.
    lockstep::all_reduce(logits);
    return logits;
  }

  // The mean of what step() has returned on the ranks, on all of them.
  double mean_over_ranks(const Tensor& loss) const {
    auto mean = torch::zeros({}, torch::kDouble);
    if (loss.defined()) mean += loss / ranks_with_loss();
    lockstep::all_reduce(mean);
    return mean.item<double>();
  }

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  int64_t micro_batches() const { return micro_batches_; }

 private:
  // This rank's share of the mean loss over all tokens of the sequences: the
  // mean over the ranks of the context group is that loss. They may have
  // different numbers of tokens, so the mean over a rank's own would not do.
  Tensor loss(const Tensor& logits, const Tensor& target) const {
    const auto sum = nn::vocab_parallel_cross_entropy(
        logits, target, {.group = plan_.tensor, .reduction = torch::kSum});
    return sum * plan_.mesh.size("context") / (target.size(0) * tokens_);
  }
  Tensor part_of(const Tensor& sequences) const {
    return lockstep::context_shard(sequences, 1, plan_.context);
  }
  int ranks_with_loss() const {
    return plan_.mesh.size() / plan_.mesh.size("pipeline");
  }

  Plan& plan_;
  int64_t tokens_;  // of a sequence, on all ranks together
  int64_t micro_batches_;
  // The part of the model that this rank has, with the names of the whole.
  std::shared_ptr<torch::nn::Module> module_ =
      std::make_shared<torch::nn::Module>("Gpt");
  std::vector<ParallelStage> stages_;
  std::optional<lockstep::Pipeline> pipeline_;  // or one stage, called directly
};

// Matrices decay, biases and norms do not.
lockstep::optim::AdamW make_optimizer(const torch::nn::Module& model,
                                      double lr) {
  std::vector<Tensor> matrices, others;
  for (const auto& parameter : model.named_parameters()) {
    const auto& name = parameter.key();
    const bool decays =
        name.ends_with("weight") && name.find("norm") == name.npos;
    (decays ? matrices : others).push_back(parameter.value());
  }
  const auto group = [lr](std::vector<Tensor> parameters, double decay) {
    auto options = std::make_unique<torch::optim::AdamWOptions>(lr);
    options->betas({0.9, 0.95}).weight_decay(decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters),
                                             std::move(options));
  };
  return lockstep::optim::AdamW({group(matrices, 0.1), group(others, 0)});
}

// Returns bytes that the model adds to the beginning of the text, drawn by
// their probabilities.
std::string sample(Model& model, const lockstep::TokenDataset& text,
                   int64_t count) {
  torch::manual_seed(1);  // all ranks draw the same
  auto window = text.get(0).data.repeat({model.micro_batches(), 1});
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    const auto weights = torch::softmax(model.next(window) / 0.8, 1);
    const auto next = torch::multinomial(weights, 1);
    bytes += static_cast<char>(next[0].item<int64_t>());
    window = torch::cat({window.narrow(1, 1, window.size(1) - 1), next}, 1);
  }
  return bytes;
}

void check(const Options& options) {
  const auto require_multiple = [](int64_t value, const char* name,
                                   int64_t divisor, const char* of) {
    if (value % divisor == 0) return;
    throw std::invalid_argument(
        std::string(name) + " is " + std::to_string(value) +
        "; give a multiple of " + of + ", which is " + std::to_string(divisor));
  };
  require_multiple(options.width, "--width", options.heads, "--heads");
  require_multiple(options.heads, "--heads", options.tensor, "--tensor");
  const int64_t stages =
      options.pipeline > 1 ? options.pipeline * options.stages_per_rank : 1;
  if (options.layers < stages) {
    throw std::invalid_argument(
        "--layers is " + std::to_string(options.layers) +
        "; give at least as many as the pipeline has stages, which are " +
        std::to_string(stages));
  }
}

struct Outcome {
  std::vector<double> losses;        // after every tenth step, and the last
  std::vector<double> step_seconds;  // of each step of this run
  double tokens_per_second = 0;      // by the median of the steps
  // The most that the tensors of any rank took, with its part of the memory
  // that ranks share.
  int64_t peak_memory_bytes = 0;
};

void write_report(const std::string& path, const Outcome& outcome) {
  const nlohmann::json report{{"ranks", lockstep::get_world_size()},
                              {"losses", outcome.losses},
                              {"step_seconds", outcome.step_seconds},
                              {"tokens_per_second", outcome.tokens_per_second},
                              {"peak_memory_bytes", outcome.peak_memory_bytes}};
  std::ofstream file(path);
  if (!(file << report.dump(2) << '\n' << std::flush)) {
    throw std::runtime_error("cannot write the report to " + path);
  }
}

int64_t peak_memory() {
  auto own = torch::tensor(lockstep::max_memory_allocated());
  auto shared = torch::tensor(lockstep::max_shared_memory_allocated());
  lockstep::all_reduce(own, {.op = lockstep::ReduceOp::MAX});
  lockstep::all_reduce(shared);
  return own.item<int64_t>() +
         shared.item<int64_t>() / lockstep::get_world_size();
}

Outcome train(const Options& options) {
  check(options);
  const auto world = lockstep::init_process_group();
  const bool prints = lockstep::get_rank() == 0 && options.compare == 0;
  Plan plan(options);
  const int64_t shard = plan.mesh.size("shard");
  const int64_t replicas = plan.mesh.size("data") * shard;
  if (options.batch_size % replicas != 0) {
    throw std::invalid_argument(
        "--batch-size is " + std::to_string(options.batch_size) +
        "; give a multiple of the " + std::to_string(replicas) +
        " ranks along data and shard");
  }
  const lockstep::TokenDataset text(options.text, options.context,
                                    {.dtype = torch::kByte});
  const auto sequences = static_cast<int64_t>(text.size());
  if (sequences < options.batch_size) {
    throw std::invalid_argument(
        options.text + " has " + std::to_string(sequences) + " sequences of " +
        std::to_string(options.context) + " bytes, fewer than --batch-size, " +
        std::to_string(options.batch_size));
  }
  lockstep::DistributedSampler sampler(
      sequences, {.num_replicas = replicas,
                  .rank = plan.mesh.local_rank("data") * shard +
                          plan.mesh.local_rank("shard"),
                  .seed = options.seed,
                  .drop_last = true});
  lockstep::DataLoader loader(
      text, sampler,
      {.batch_size = options.batch_size / replicas, .drop_last = true});

  Model model(options, plan);
  auto optimizer = make_optimizer(*model.module(), options.lr);
  const int64_t warm_up = options.steps / 20 + 1;
  lockstep::optim::SequentialLR scheduler(
      optimizer,
      {.schedulers = {lockstep::optim::LinearLROptions{.start_factor = 0.1,
                                                       .total_iters = warm_up},
                      lockstep::optim::CosineAnnealingLROptions{
                          .T_max =
                              std::max<int64_t>(1, options.steps - warm_up),
                          .eta_min = options.lr / 10}},
       .milestones = {warm_up}});
  lockstep::TrainingState state{.model = model.module(),
                                .optimizer = &optimizer,
                                .scheduler = &scheduler};
  if (!options.snapshot.empty() &&
      lockstep::load_snapshot(options.snapshot + "/", state)) {
    sampler.load_state_dict(state.sampler_state);
    if (prints) std::printf("resuming after step %ld\n", long{state.step});
  }
  const auto is_due = [&](int64_t every) {
    return state.step == options.steps ||
           (every > 0 && state.step % every == 0);
  };

  using Clock = std::chrono::steady_clock;
  Outcome outcome;
  while (state.step < options.steps) {
    sampler.set_epoch(state.next_epoch());
    for (auto& batch : loader) {
      const auto start = Clock::now();
      optimizer.zero_grad();
      const auto loss = model.step(batch.data, batch.target);
      lockstep::clip_grad_norm_(optimizer, 1.0);
      optimizer.step();
      scheduler.step();
      ++state.step;
      outcome.step_seconds.push_back(
          std::chrono::duration<double>(Clock::now() - start).count());
      if (is_due(10)) {
        outcome.losses.push_back(model.mean_over_ranks(loss));
        if (prints) {
          std::printf("step %4ld  loss %.4f  %.0f ms\n", long{state.step},
                      outcome.losses.back(), 1e3 * outcome.step_seconds.back());
          std::fflush(stdout);
        }
      }
      const bool stop = !options.snapshot.empty() && lockstep::stop_requested();
      if (stop || (!options.snapshot.empty() && is_due(options.save_every))) {
        state.sampler_state = sampler.state_dict();
        lockstep::save_snapshot(options.snapshot + "/", state,
                                {.keep_last = 2});
      }
      if (stop) return outcome;
      if (state.step == options.steps) break;
    }
    ++state.epochs_run;
  }
  if (!outcome.step_seconds.empty()) {
    auto sorted = outcome.step_seconds;
    std::ranges::sort(sorted);
    outcome.tokens_per_second =
        static_cast<double>(options.batch_size * options.context) /
        sorted[sorted.size() / 2];
  }
  outcome.peak_memory_bytes = peak_memory();
  if (prints && !options.report.empty()) write_report(options.report, outcome);
  if (options.sample > 0) {
    const auto bytes = sample(model, text, options.sample);
    if (prints) std::printf("\n%s\n", bytes.c_str());
  }
  return outcome;
}

// Runs the same training divided in different ways, each in processes of its
// own, and prints a table.
void compare(Options options) {
  const int ranks = options.compare;
  options.sample = 0;
  options.snapshot.clear();
  bool is_first = true;
  const auto run = [&](const char* name, int processes, auto change) {
    Options changed = options;
    change(changed);
    check(changed);
    // Each process runs this program again, up to this call.
    lockstep::spawn(
        [&](int rank) {
          const Outcome outcome = train(changed);
          if (rank != 0) return;
          if (is_first) {
            std::printf("%-28s %6s %8s %10s %10s\n", "", "ranks", "loss",
                        "tokens/s", "peak MiB");
          }
          std::printf(
              "%-28s %6d %8.4f %10.0f %10.1f\n", name, processes,
              outcome.losses.back(), outcome.tokens_per_second,
              static_cast<double>(outcome.peak_memory_bytes) / (1 << 20));
        },
        processes);
    is_first = false;
  };
  run("one process", 1, [](Options&) {});
  run("data", ranks, [](Options&) {});
  run("shard", ranks, [&](Options& o) { o.shard = ranks; });
  run("shard, checkpoint", ranks, [&](Options& o) {
    o.shard = ranks;
    o.checkpoint = true;
  });
  run("pipeline", ranks, [&](Options& o) { o.pipeline = ranks; });
  run("tensor", ranks, [&](Options& o) { o.tensor = ranks; });
  run("context", ranks, [&](Options& o) { o.context_parallel = ranks; });
  if (ranks < 4 || ranks % 2 != 0) return;
  run("data x shard", ranks, [&](Options& o) { o.shard = ranks / 2; });
  run("shard x tensor", ranks, [&](Options& o) {
    o.shard = ranks / 2;
    o.tensor = 2;
  });
  run("pipeline x data", ranks, [&](Options& o) { o.pipeline = 2; });
  run("pipeline x shard", ranks, [&](Options& o) {
    o.pipeline = 2;
    o.shard = ranks / 2;
  });
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::record_memory_stats();
  Options options;
  CLI::App app("Trains a GPT on the bytes of a text.");
  app.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  const auto size = CLI::Range(1, 1 << 20);
  app.add_option("--layers", options.layers)->check(size);
  app.add_option("--heads", options.heads)->check(size);
  app.add_option("--width", options.width)->check(size);
  app.add_option("--context", options.context, "bytes of a sequence")
      ->check(size);
  app.add_option("--batch-size", options.batch_size,
                 "sequences of a step, all ranks together")
      ->check(size);
  app.add_option("--micro-batches", options.micro_batches,
                 "parts of a rank's batch, computed one after another; 0 means "
                 "1, or twice the ranks of a pipeline")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--steps", options.steps)->check(size);
  app.add_option("--lr", options.lr)->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed);
  app.add_option("--text", options.text, "any file");
  const auto axis = [&](const char* name, int& ranks, const char* what) {
    app.add_option(name, ranks, what)->check(size);
  };
  axis("--shard", options.shard, "ranks that share the parameters (FSDP)");
  axis("--pipeline", options.pipeline, "ranks with different layers");
  axis("--context-parallel", options.context_parallel,
       "ranks with different tokens of a sequence");
  axis("--tensor", options.tensor, "ranks with different parts of each layer");
  app.add_option("--schedule", options.schedule,
                 "of the pipeline: GPipe, 1F1B, Interleaved1F1B, "
                 "InterleavedZeroBubble, ZBVZeroBubble, ...");
  app.add_option("--stages-per-rank", options.stages_per_rank,
                 "of the pipeline, for schedules that want several")
      ->check(size);
  app.add_flag("--no-shared-memory", options.no_shared_memory,
               "with --shard: as if each rank were on a host of its own");
  app.add_flag("--checkpoint", options.checkpoint,
               "compute activations again during backward");
  app.add_flag("--bf16", options.bf16);
  app.add_option("--snapshot", options.snapshot,
                 "folder to save to, and to resume from");
  app.add_option("--save-every", options.save_every,
                 "steps; 0 means at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--sample", options.sample, "bytes to write at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--report", options.report, "JSON file for the results");
  app.add_option("--compare", options.compare,
                 "run the training in different ways on so many ranks, and "
                 "print a table")
      ->check(CLI::Range(2, 64));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return lockstep::record([&] {
    if (options.compare > 0) {
      compare(options);
    } else {
      train(options);
    }
    return lockstep::stop_exit_code();
  });
}
