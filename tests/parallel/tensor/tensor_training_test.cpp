// A transformer divided over a tensor group trains like one process: losses,
// gradients, their norm, and parameters.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/tensor/whole_attention.h"
#include "tests/parallel/tensor/whole_tensors.h"

namespace lockstep::internal {
namespace {

using testing::expect_close;
using testing::expect_close_parameters;
using testing::gradient_norm;
using testing::WholeAttention;

constexpr int64_t kVocabulary = 29;  // has no equal parts
constexpr int64_t kFeatures = 24;
constexpr int64_t kHidden = 50;  // nor has this, for 3 and 4 ranks
constexpr int64_t kHeads = 12;
constexpr int64_t kLength = 12;
constexpr int64_t kBlocks = 2;
constexpr int64_t kBatch = 4;
constexpr int kSteps = 20;
constexpr double kSmoothing = 0.1;

struct Division {
  ProcessGroupPtr group{};
  bool sequence = false;
  bool tied = false;  // the last layer uses the table of the embedding
};

using Layer = std::function<at::Tensor(const at::Tensor&)>;

template <typename Impl>
Layer layer_of(std::shared_ptr<Impl> impl) {
  return [=](const at::Tensor& x) { return impl->forward(x); };
}

// The model of one process if `division` is none. Both kinds make the same
// layers in the same order, under the same names.
class Transformer : public torch::nn::Module {
 public:
  explicit Transformer(std::optional<Division> division)
      : division_(std::move(division)) {
    if (division_) {
      embedding_ = nn::VocabParallelEmbedding(
          kVocabulary, kFeatures,
          {.group = group(), .sequence_parallel = division_->sequence});
      register_module("embedding", embedding_);
    } else {
      whole_embedding_ = register_module(
          "embedding", torch::nn::Embedding(kVocabulary, kFeatures));
    }
    positions_ = register_parameter("positions",
                                    torch::randn({kLength, kFeatures}) * 0.1);
    for (int64_t block = 0; block < kBlocks; ++block) add_block(block);
    blocks_.push_back(norm("norm"));
    if (tied()) return;
    if (division_) {
      nn::ColumnParallelLinear head(kFeatures, kVocabulary,
                                    {.group = group(),
                                     .bias = false,
                                     .sequence_parallel = division_->sequence});
      head_ = layer_of(register_module("head", head));
    } else {
      torch::nn::Linear head(
          torch::nn::LinearOptions(kFeatures, kVocabulary).bias(false));
      head_ = layer_of(register_module("head", head));
    }
  }

  // Set before the constructor, because the model of one process has no
  // division.
  static inline bool whole_is_tied = false;

  // Returns the loss.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target) {
    at::Tensor x;
    if (division_) {
      // Each rank adds its own rows of the positions.
      x = embedding_(tokens) +
          (division_->sequence ? scatter_to_tensor_group(positions_, 0, group())
                               : positions_);
    } else {
      x = whole_embedding_(tokens) + positions_;
    }
    for (auto& block : blocks_) x = block(x);
    if (!division_) {
      auto logits = tied() ? at::linear(x, whole_embedding_->weight) : head_(x);
      return at::cross_entropy_loss(logits.flatten(0, 1), target.flatten(), {},
                                    at::Reduction::Mean, -100, kSmoothing);
    }
    auto logits = tied() ? tied_logits(x) : head_(x);
    return nn::vocab_parallel_cross_entropy(
        logits, target, {.group = group(), .label_smoothing = kSmoothing});
  }

 private:
  const ProcessGroupPtr& group() const { return division_->group; }
  bool tied() const { return division_ ? division_->tied : whole_is_tied; }

  at::Tensor tied_logits(const at::Tensor& x) {
    return at::linear(division_->sequence ? all_gather_sequence(x, 1, group())
                                          : copy_to_tensor_group(x, group()),
                      embedding_->weight);
  }

  Layer norm(const std::string& name) {
    if (division_ && division_->sequence) {
      nn::SequenceParallelLayerNorm made(kFeatures, {.group = group()});
      return layer_of(register_module(name, made));
    }
    torch::nn::LayerNorm made(torch::nn::LayerNormOptions({kFeatures}));
    return layer_of(register_module(name, made));
  }

  void add_block(int64_t block) {
    const std::string prefix = "block" + std::to_string(block) + '_';
    Layer attention, up, down;
    auto first = norm(prefix + "norm1");
    if (division_) {
      const bool sequence = division_->sequence;
      attention = layer_of(register_module(
          prefix + "attention",
          nn::ParallelSelfAttention(kFeatures, kHeads,
                                    {.group = group(),
                                     .is_causal = true,
                                     .sequence_parallel = sequence})));
      up = layer_of(register_module(
          prefix + "up",
          nn::ColumnParallelLinear(
              kFeatures, kHidden,
              {.group = group(), .sequence_parallel = sequence})));
      down = layer_of(register_module(
          prefix + "down",
          nn::RowParallelLinear(
              kHidden, kFeatures,
              {.group = group(), .sequence_parallel = sequence})));
    } else {
      auto whole = std::make_shared<WholeAttention>(kFeatures, kHeads, true);
      register_module(prefix + "attention", whole);
      attention = [whole](const at::Tensor& x) { return whole->forward(x); };
      up = layer_of(register_module(prefix + "up",
                                    torch::nn::Linear(kFeatures, kHidden)));
      down = layer_of(register_module(prefix + "down",
                                      torch::nn::Linear(kHidden, kFeatures)));
    }
    auto second = norm(prefix + "norm2");
    blocks_.push_back([=](const at::Tensor& in) {
      auto x = in + attention(first(in));
      return x + down(at::gelu(up(second(x))));
    });
  }

  std::optional<Division> division_;
  nn::VocabParallelEmbedding embedding_{nullptr};
  torch::nn::Embedding whole_embedding_{nullptr};
  at::Tensor positions_;
  std::vector<Layer> blocks_;
  Layer head_;
};

std::shared_ptr<Transformer> made(const std::optional<Division>& division,
                                  at::ScalarType dtype) {
  torch::manual_seed(21);
  auto model = std::make_shared<Transformer>(division);
  model->to(dtype);
  return model;
}

at::Tensor tokens_of(int step) {
  torch::manual_seed(1000 + step);
  return torch::randint(kVocabulary, {kBatch, kLength + 1});
}

// In float32 AdamW would enlarge what is nothing but rounding: the gradient of
// the bias of key is 0, since attention does not depend on it.
std::unique_ptr<torch::optim::Optimizer> optimizer_of(
    const torch::nn::Module& model, at::ScalarType dtype) {
  auto parameters = model.parameters();
  if (dtype == at::kFloat) {
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(3e-3));
}

// Takes one step of one process and returns the loss.
double whole_step(Transformer& model, torch::optim::Optimizer& optimizer,
                  int step) {
  auto tokens = tokens_of(step);
  optimizer.zero_grad();
  auto loss =
      model.forward(tokens.narrow(1, 0, kLength), tokens.narrow(1, 1, kLength));
  loss.backward();
  optimizer.step();
  return loss.item<double>();
}

const auto kParameter = [](const at::Tensor& parameter) { return parameter; };
const auto kGradient = [](const at::Tensor& parameter) {
  return parameter.grad();
};

void expect_same_training(const Division& division, at::ScalarType dtype,
                          double bound) {
  Transformer::whole_is_tied = division.tied;
  auto whole = made(std::nullopt, dtype);
  auto divided = made(division, dtype);
  verify_replicated(*divided, division.group);
  expect_close_parameters(*divided, *whole, 0, "initial value", kParameter);
  auto whole_optimizer = optimizer_of(*whole, dtype);
  auto optimizer = optimizer_of(*divided, dtype);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(step);
    const double want = whole_step(*whole, *whole_optimizer, step);
    EXPECT_NEAR(whole_step(*divided, *optimizer, step), want, bound * want);
    const double norm = gradient_norm(*whole, nullptr);
    EXPECT_NEAR(gradient_norm(*divided, division.group), norm, bound * norm);
  }
  expect_close_parameters(*divided, *whole, bound, "gradient", kGradient);
  expect_close_parameters(*divided, *whole, bound, "value", kParameter);
}

WORLD_TEST(TensorTraining, IsThatOfOneProcess, 1, 2, 3, 4) {
  auto group = init_process_group();
  for (bool sequence : {false, true}) {
    for (bool tied : {false, true}) {
      SCOPED_TRACE(c10::str("sequence ", sequence, ", tied ", tied));
      expect_same_training({.group = group, .sequence = sequence, .tied = tied},
                           at::kDouble, 1e-10);
    }
  }
}

WORLD_TEST(TensorTraining, InFloatAndOverGloo, 2) {
  auto group = init_process_group("gloo");
  for (bool sequence : {false, true}) {
    SCOPED_TRACE(sequence);
    expect_same_training({.group = group, .sequence = sequence}, at::kFloat,
                         2e-5);
    expect_same_training({.group = group, .sequence = sequence}, at::kDouble,
                         1e-10);
  }
}

// Two groups of two ranks have the model; between them, DDP averages what two
// halves of the batch give, with two backward passes each.
WORLD_TEST(TensorTraining, InsideDistributedDataParallel, 4) {
  auto group = init_process_group();
  auto tensor = new_subgroups_by_enumeration({{0, 1}, {2, 3}});
  auto data = new_subgroups_by_enumeration({{0, 2}, {1, 3}});
  for (bool sequence : {false, true}) {
    SCOPED_TRACE(sequence);
    Transformer::whole_is_tied = false;
    auto whole = made(std::nullopt, at::kDouble);
    auto divided =
        made(Division{.group = tensor, .sequence = sequence}, at::kDouble);
    DistributedDataParallel<Transformer> model(divided,
                                               {.process_group = data});
    auto whole_optimizer = optimizer_of(*whole, at::kDouble);
    auto optimizer = optimizer_of(*divided, at::kDouble);
    for (int step = 0; step < kSteps; ++step) {
      SCOPED_TRACE(step);
      whole_step(*whole, *whole_optimizer, step);
      auto tokens = tokens_of(step).chunk(2)[data->rank()];
      optimizer->zero_grad();
      auto backward = [&](int64_t row) {
        auto sample = tokens.narrow(0, row, 1);
        auto loss = model.forward(sample.narrow(1, 0, kLength),
                                  sample.narrow(1, 1, kLength));
        (loss / 2).backward();
      };
      {
        auto no_sync = model.no_sync();
        backward(0);
      }
      backward(1);
      const double norm = gradient_norm(*whole, nullptr);
      EXPECT_NEAR(gradient_norm(*divided, tensor), norm, 1e-10 * norm);
      optimizer->step();
    }
    expect_close_parameters(*divided, *whole, 1e-10, "gradient", kGradient);
    expect_close_parameters(*divided, *whole, 1e-10, "value", kParameter);
    verify_replicated(*divided, tensor);
  }
}

}  // namespace
}  // namespace lockstep::internal
