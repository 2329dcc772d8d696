#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/lockstep.h"

// Small models with something that transformers do not have, for zoo.cpp.
namespace lockstep::internal::testing {

inline constexpr int64_t kRows = 8;  // of the whole batch
inline constexpr int64_t kWidth = 6;
inline constexpr int64_t kWords = 12;

// Front and back may be the stages of a pipeline if their children or
// parameters have names that begin with "front" and "back".
class OddModel : public torch::nn::Module {
 public:
  // `state`: kept from one step to the next.
  virtual at::Tensor forward(const at::Tensor& x, int64_t /*step*/,
                             at::Tensor& /*state*/) {
    return back(front(x));
  }
  virtual at::Tensor front(const at::Tensor& x) { return x; }
  virtual at::Tensor back(const at::Tensor& x) { return x; }
  virtual at::Tensor loss(const at::Tensor& output,
                          const at::Tensor& target) const {
    return (output - target.narrow(1, 0, output.size(1))).square().mean();
  }
  // Is called after each step, on all ranks.
  virtual void after_step() {}
};

// Words that depend on the data only.
inline at::Tensor words_of(const at::Tensor& x) {
  return (x.select(1, 0) * 1000).abs().to(at::kLong) % kWords;
}

inline torch::nn::Linear linear(int64_t in, int64_t out) {
  torch::nn::Linear layer(in, out);
  layer->to(at::kDouble);
  return layer;
}

inline at::Tensor randn(at::IntArrayRef sizes) {
  return 0.5 * torch::randn(sizes, at::kDouble);
}

struct Recurrent : OddModel {
  Recurrent() {
    lstm = register_module("lstm", torch::nn::LSTM(kWidth, 5));
    lstm->to(at::kDouble);
    head = register_module("head", linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor& state) override {
    if (!state.defined()) state = x.new_zeros({2, x.size(0), 5});
    const auto [output, next] =
        lstm->forward(x.unsqueeze(0),
                      std::tuple(state.narrow(0, 0, 1), state.narrow(0, 1, 1)));
    state = torch::cat({std::get<0>(next), std::get<1>(next)});
    return head(output.squeeze(0));
  }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};

// The output layer is the embedding, under a second name.
struct Tied : OddModel {
  Tied() {
    weight = register_parameter("embedding", randn({kWords, kWidth}));
    register_parameter("output", weight);
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor&) override {
    const auto embedded = torch::embedding(weight, words_of(x));
    return torch::linear((embedded + x).tanh(), weight);
  }
  at::Tensor loss(const at::Tensor& output,
                  const at::Tensor& target) const override {
    return torch::nn::functional::cross_entropy(output, words_of(target));
  }
  at::Tensor weight;
};

// Rows of limited norm, as Embedding's max_norm, which forward may not write.
struct MaxNorm : OddModel {
  MaxNorm() {
    weight = register_parameter("weight", randn({kWords, kWidth}));
    head = register_module("head", linear(kWidth, 3));
    after_step();
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor&) override {
    return head(torch::embedding(weight, words_of(x)) * x);
  }
  void after_step() override {
    const at::NoGradGuard no_grad;
    weight.renorm_(2, 0, 0.7);
  }
  at::Tensor weight;
  torch::nn::Linear head{nullptr};
};

struct Sparse : OddModel {
  Sparse() {
    embedding = register_module(
        "embedding",
        torch::nn::Embedding(
            torch::nn::EmbeddingOptions(kWords, kWidth).sparse(true)));
    embedding->to(at::kDouble);
    head = register_module("head", linear(kWidth, 3));
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor&) override {
    return head(embedding(words_of(x)) + x);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};
};

// With the statistics of the whole batch.
struct Norm : OddModel {
  Norm() {
    first = register_module("first", linear(kWidth, 4));
    norm = register_module("norm", nn::SyncBatchNorm1d(4));
    norm->to(at::kDouble);
    head = register_module("head", linear(4, 3));
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor&) override {
    return head(norm(first(x)).tanh());
  }
  torch::nn::Linear first{nullptr}, head{nullptr};
  nn::SyncBatchNorm1d norm{nullptr};
};

struct Dropout : OddModel {
  Dropout() {
    first = register_module("first", linear(kWidth, 16));
    head = register_module("head", linear(16, 3));
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor&) override {
    return head(torch::dropout(first(x), 0.5, is_training()));
  }
  torch::nn::Linear first{nullptr}, head{nullptr};
};

struct Complex : OddModel {
  Complex() {
    weight = register_parameter(
        "front_weight", torch::complex(randn({kWidth, 4}), randn({kWidth, 4})));
    head = register_module("back", linear(8, 3));
  }
  at::Tensor front(const at::Tensor& x) override {
    return torch::view_as_real(torch::matmul(x.to(at::kComplexDouble), weight))
        .flatten(1)
        .tanh();
  }
  at::Tensor back(const at::Tensor& x) override { return head(x); }
  at::Tensor weight;
  torch::nn::Linear head{nullptr};
};

// Clusters of rare words are used in some batches only.
struct Adaptive : OddModel {
  Adaptive() {
    first = register_module("first", linear(kWidth, 8));
    softmax = register_module(
        "softmax",
        torch::nn::AdaptiveLogSoftmaxWithLoss(
            torch::nn::AdaptiveLogSoftmaxWithLossOptions(8, kWords, {4, 9})
                .div_value(2)));
    softmax->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor&) override {
    return -softmax->forward(first(x).tanh(), words_of(x)).output.mean();
  }
  at::Tensor loss(const at::Tensor& output, const at::Tensor&) const override {
    return output;
  }
  torch::nn::Linear first{nullptr};
  torch::nn::AdaptiveLogSoftmaxWithLoss softmax{nullptr};
};

// Two branches in turn, and one that nobody uses.
struct Branches : OddModel {
  Branches() {
    for (const char* name : {"even", "odd", "never"}) {
      layers.push_back(register_module(name, linear(kWidth, 3)));
    }
  }
  at::Tensor forward(const at::Tensor& x, int64_t step, at::Tensor&) override {
    return layers[static_cast<size_t>(step % 2)](x).tanh();
  }
  std::vector<torch::nn::Linear> layers;
};

// A running mean that forward writes and uses. All ranks have rank 0's.
struct Buffer : OddModel {
  Buffer() {
    mean = register_buffer("mean", torch::zeros({kWidth}, at::kDouble));
    head = register_module("head", linear(kWidth, 3));
  }
  at::Tensor forward(const at::Tensor& x, int64_t, at::Tensor&) override {
    const auto output = head(x - mean);
    const at::NoGradGuard no_grad;
    mean.mul_(0.9).add_(x.mean(0), 0.1);
    return output;
  }
  at::Tensor mean;
  torch::nn::Linear head{nullptr};
};

// A parameter without dimensions, one without elements, and a transposed one.
struct Layouts : OddModel {
  Layouts() {
    transposed = register_parameter("front_transposed", randn({kWidth, 5}).t());
    scale = register_parameter("front_scale", randn({}));
    empty = register_parameter("back_empty", randn({0, 3}));
    head = register_module("back", linear(5, 3));
  }
  at::Tensor front(const at::Tensor& x) override {
    return torch::linear(x, transposed).tanh() * scale;
  }
  at::Tensor back(const at::Tensor& x) override {
    return head(x) + empty.sum();
  }
  at::Tensor transposed, scale, empty;
  torch::nn::Linear head{nullptr};
};

// Direction and length of each row apart.
struct WeightNorm : OddModel {
  WeightNorm() {
    direction = register_parameter("front_v", randn({5, kWidth}));
    length = register_parameter("front_g", torch::ones({5, 1}, at::kDouble));
    head = register_module("back", linear(5, 3));
  }
  at::Tensor front(const at::Tensor& x) override {
    const auto norm = direction.norm(2, {1}, /*keepdim=*/true);
    return torch::linear(x, length * direction / norm).tanh();
  }
  at::Tensor back(const at::Tensor& x) override { return head(x); }
  at::Tensor direction, length;
  torch::nn::Linear head{nullptr};
};

// Weights in channels-last order, and operations in place.
struct Convolution : OddModel {
  Convolution() {
    convolution = register_module(
        "front",
        torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)));
    convolution->to(at::kDouble);
    auto& weight = convolution->weight;
    weight.set_data(weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    head = register_module("back", linear(12, 3));
  }
  at::Tensor front(const at::Tensor& x) override {
    return 2 * convolution(x.view({-1, 2, 1, 3})).relu_().flatten(1);
  }
  at::Tensor back(const at::Tensor& x) override { return head(x); }
  torch::nn::Conv2d convolution{nullptr};
  torch::nn::Linear head{nullptr};
};

inline std::shared_ptr<OddModel> make_odd(const std::string& name) {
  using Make = std::function<std::shared_ptr<OddModel>()>;
  static const std::map<std::string, Make> kModels{
      {"recurrent", [] { return std::make_shared<Recurrent>(); }},
      {"tied", [] { return std::make_shared<Tied>(); }},
      {"max_norm", [] { return std::make_shared<MaxNorm>(); }},
      {"sparse", [] { return std::make_shared<Sparse>(); }},
      {"norm", [] { return std::make_shared<Norm>(); }},
      {"dropout", [] { return std::make_shared<Dropout>(); }},
      {"complex", [] { return std::make_shared<Complex>(); }},
      {"adaptive", [] { return std::make_shared<Adaptive>(); }},
      {"branches", [] { return std::make_shared<Branches>(); }},
      {"buffer", [] { return std::make_shared<Buffer>(); }},
      {"layouts", [] { return std::make_shared<Layouts>(); }},
      {"weight_norm", [] { return std::make_shared<WeightNorm>(); }},
      {"convolution", [] { return std::make_shared<Convolution>(); }},
  };
  torch::manual_seed(3);
  return kModels.at(name)();
}

}  // namespace lockstep::internal::testing
