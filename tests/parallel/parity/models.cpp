#include "tests/parallel/parity/models.h"

#include <torch/torch.h>

#include <cmath>
#include <stdexcept>
#include <vector>

namespace lockstep::internal::testing {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 10;   // of a vector
constexpr int64_t kWords = 30;   // in the vocabulary
constexpr int64_t kLength = 12;  // words in a text
constexpr int64_t kClasses = 5;

struct Mlp : ParityModel {
  nn::Linear first{register_module("first", nn::Linear(kWidth, 32))};
  nn::Linear second{register_module("second", nn::Linear(32, 32))};
  nn::Linear third{register_module("third", nn::Linear(32, 1))};

  at::Tensor forward(const at::Tensor& x) override {
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }
};

struct Cnn : ParityModel {
  nn::Conv2d conv1{register_module(
      "conv1", nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1).bias(false)))};
  nn::BatchNorm2d norm1{register_module("norm1", nn::BatchNorm2d(4))};
  nn::Conv2d conv2{register_module(
      "conv2", nn::Conv2d(nn::Conv2dOptions(4, 8, 3).bias(false)))};
  nn::BatchNorm2d norm2{register_module("norm2", nn::BatchNorm2d(8))};
  nn::Linear head{register_module("head", nn::Linear(8, kClasses))};

  at::Tensor forward(const at::Tensor& x) override {
    auto h = torch::max_pool2d(torch::relu(norm1(conv1(x))), 2);
    h = torch::relu(norm2(conv2(h)));
    return head(h.mean({2, 3}));
  }
};

struct Lstm : ParityModel {
  explicit Lstm(bool sparse)
      : embedding(register_module(
            "embedding",
            nn::Embedding(nn::EmbeddingOptions(kWords, 8).sparse(sparse)))),
        lstm(register_module(
            "lstm", nn::LSTM(nn::LSTMOptions(8, 16).batch_first(true)))),
        head(register_module("head", nn::Linear(16, kClasses))) {}

  at::Tensor forward(const at::Tensor& x) override {
    auto states = std::get<0>(lstm(embedding(x)));
    return head(states.select(1, -1));
  }

  nn::Embedding embedding;
  nn::LSTM lstm;
  nn::Linear head;
};

struct Transformer : ParityModel {
  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kSize = 16;

  nn::Embedding embedding{
      register_module("embedding", nn::Embedding(kWords, kSize))};
  at::Tensor position{
      register_parameter("position", torch::zeros({kLength, kSize}))};
  nn::LayerNorm norm1{layer_norm("norm1")};
  nn::Linear qkv{register_module(
      "qkv", nn::Linear(nn::LinearOptions(kSize, 3 * kSize).bias(false)))};
  nn::Linear projection{
      register_module("projection", nn::Linear(kSize, kSize))};
  nn::LayerNorm norm2{layer_norm("norm2")};
  nn::Linear wide{register_module("wide", nn::Linear(kSize, 4 * kSize))};
  nn::Linear narrow{register_module("narrow", nn::Linear(4 * kSize, kSize))};
  nn::Linear head{register_module("head", nn::Linear(kSize, kWords))};

  nn::LayerNorm layer_norm(const std::string& name) {
    return register_module(name, nn::LayerNorm(nn::LayerNormOptions({kSize})));
  }

  at::Tensor attention(const at::Tensor& x) {
    std::vector<at::Tensor> parts;
    for (const auto& part : qkv(x).chunk(3, -1)) {
      parts.push_back(
          part.view({x.size(0), kLength, kHeads, -1}).transpose(1, 2));
    }
    auto scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) /
                  std::sqrt(static_cast<double>(kSize / kHeads));
    auto mixed = torch::matmul(torch::softmax(scores, -1), parts[2]);
    return projection(
        mixed.transpose(1, 2).reshape({x.size(0), kLength, kSize}));
  }

  at::Tensor forward(const at::Tensor& x) override {
    auto h = embedding(x) + position;
    h = h + attention(norm1(h));
    h = h + narrow(torch::gelu(wide(norm2(h))));
    return head(h);
  }
};

struct Branch : ParityModel {
  explicit Branch(bool side_always) : always(side_always) {}

  bool always;
  nn::Linear trunk{register_module("trunk", nn::Linear(kWidth, 16))};
  nn::Linear side{register_module("side", nn::Linear(16, 16))};
  nn::Linear spare{register_module("spare", nn::Linear(16, 16))};
  nn::Linear head{register_module("head", nn::Linear(16, 1))};

  at::Tensor forward(const at::Tensor& x) override {
    auto h = torch::tanh(trunk(x));
    if (always || x.flatten()[0].item<double>() > 0) h = torch::tanh(side(h));
    return head(h);
  }
};

}  // namespace

std::shared_ptr<ParityModel> make_model(const std::string& name) {
  if (name == "mlp") return std::make_shared<Mlp>();
  if (name == "cnn") return std::make_shared<Cnn>();
  if (name == "lstm") return std::make_shared<Lstm>(/*sparse=*/false);
  if (name == "sparse_lstm") return std::make_shared<Lstm>(/*sparse=*/true);
  if (name == "transformer") return std::make_shared<Transformer>();
  if (name == "branch") return std::make_shared<Branch>(/*side_always=*/false);
  if (name == "static_branch")
    return std::make_shared<Branch>(/*side_always=*/true);
  throw std::invalid_argument("no parity model '" + name + "'");
}

at::Tensor loss_of(const at::Tensor& prediction, const at::Tensor& target) {
  if (target.is_floating_point()) return torch::mse_loss(prediction, target);
  return nn::functional::cross_entropy(prediction.flatten(0, -2),
                                       target.flatten());
}

}  // namespace lockstep::internal::testing
