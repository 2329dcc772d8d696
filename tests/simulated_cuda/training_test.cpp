// Networks train on the simulated device with the numbers of the CPU, whatever
// the delays are.

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal {
namespace {

constexpr size_t kSteps = 3;

struct Network {
  std::string name;
  std::function<torch::nn::Sequential()> make;
  torch::Tensor input;
};

class MultiheadImpl : public torch::nn::Module {
 public:
  MultiheadImpl() { register_module("attention", attention_); }
  torch::Tensor forward(const torch::Tensor& x) {
    return std::get<0>(attention_(x, x, x)) +
           torch::scaled_dot_product_attention(x, x, x, {}, 0.0, true);
  }

 private:
  torch::nn::MultiheadAttention attention_{8, 2};
};
TORCH_MODULE(Multihead);

// The outputs of a recurrent network, for torch::nn::Sequential.
template <typename Layers>
class OutputsOfImpl : public torch::nn::Module {
 public:
  explicit OutputsOfImpl(Layers layers) : layers_(std::move(layers)) {
    register_module("layers", layers_);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return std::get<0>(layers_(x));
  }

 private:
  Layers layers_;
};

template <typename Layers>
std::shared_ptr<OutputsOfImpl<Layers>> outputs_of(Layers layers) {
  return std::make_shared<OutputsOfImpl<Layers>>(std::move(layers));
}

std::vector<Network> networks() {
  using namespace torch::nn;  // NOLINT
  torch::manual_seed(1);
  return {
      {"Linear",
       [] { return Sequential(Linear(8, 16), ReLU(), Linear(16, 4)); },
       torch::randn({6, 8})},
      {"LayerNorm",
       [] {
         return Sequential(Linear(8, 16), GELU(),
                           LayerNorm(LayerNormOptions({16})), Softmax(1));
       },
       torch::randn({6, 8})},
      {"Convolution",
       [] {
         return Sequential(Conv2d(Conv2dOptions(1, 4, 3).bias(false)),
                           BatchNorm2d(4), ReLU(), MaxPool2d(2), Flatten(),
                           Linear(36, 4));
       },
       torch::randn({6, 1, 8, 8})},
      {"Attention", [] { return Sequential(Linear(8, 8), Multihead()); },
       torch::randn({5, 2, 8})},
      {"Embedding",
       [] { return Sequential(Embedding(10, 8), Linear(8, 10), Tanh()); },
       torch::randint(10, {6, 3})},
      {"Lstm",
       [] {
         return Sequential(outputs_of(LSTM(LSTMOptions(8, 6).num_layers(2))),
                           outputs_of(LSTM(LSTMOptions(6, 4).bias(false))));
       },
       torch::randn({5, 3, 8})},
      {"Gru",
       [] {
         return Sequential(
             outputs_of(GRU(GRUOptions(8, 6).bidirectional(true))),
             outputs_of(GRU(GRUOptions(12, 4).bias(false))));
       },
       torch::randn({5, 3, 8})},
      {"DepthwiseConvolution",
       [] {
         return Sequential(Conv2d(Conv2dOptions(3, 6, 3).groups(3).padding(1)),
                           ReLU(),
                           Conv2d(Conv2dOptions(6, 6, {3, 2})
                                      .groups(6)
                                      .stride({2, 1})
                                      .dilation({1, 2})
                                      .bias(false)),
                           Flatten(), Linear(108, 4));
       },
       torch::randn({6, 3, 8, 8})},
  };
}

// The losses of some steps, and the parameters after them.
std::vector<torch::Tensor> train(const Network& network, torch::Device device,
                                 bool autocast = false) {
  torch::manual_seed(2);
  torch::nn::Sequential net = network.make();
  net->to(device);
  const torch::Tensor input = network.input.to(device);
  const torch::Tensor target = torch::ones({1}, device);
  torch::optim::Adam optimizer(net->parameters(),
                               torch::optim::AdamOptions(1e-2));
  std::vector<torch::Tensor> results;
  at::autocast::set_autocast_enabled(device.type(), autocast);
  at::autocast::set_autocast_dtype(device.type(), torch::kBFloat16);
  for (size_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const torch::Tensor output = net->forward(input);
    const torch::Tensor loss =
        (output.to(torch::kFloat) - target).pow(2).mean();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    results.push_back(loss.detach());
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(device.type(), false);
  for (const torch::Tensor& parameter : net->parameters()) {
    EXPECT_EQ(parameter.grad().device(), device);
    results.push_back(parameter.detach());
  }
  for (torch::Tensor& result : results) result = result.cpu();
  return results;
}

class SimulatedTraining : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override { simulated_cuda::restart(0); }
};

TEST_P(SimulatedTraining, HasTheNumbersOfTheCpu) {
  const Network network = networks()[GetParam()];
  const auto expected = train(network, torch::kCPU);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    simulated_cuda::restart(seed);
    const auto results = train(network, torch::Device("cuda:1"));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(results[i].allclose(expected[i], 1e-4, 1e-5))
          << "seed " << seed << ", result " << i << "\n"
          << results[i] << "\n"
          << expected[i];
    }
  }
}

TEST_P(SimulatedTraining, AutocastHasTheNumbersOfTheCpu) {
  const Network network = networks()[GetParam()];
  std::vector<torch::Tensor> expected;
  try {
    expected = train(network, torch::kCPU, /*autocast=*/true);
  } catch (const std::exception& error) {
    // oneDNN has no LSTM in bfloat16 for CPUs without AVX-512.
    if (std::string(error.what()).find("primitive descriptor") ==
        std::string::npos) {
      throw;
    }
    GTEST_SKIP() << "this CPU has no bfloat16 for " << network.name;
  }
  simulated_cuda::restart(3);
  const auto results =
      train(network, torch::Device("cuda:0"), /*autocast=*/true);
  for (size_t i = 0; i < kSteps; ++i) {  // the losses
    EXPECT_TRUE(results[i].allclose(expected[i], 1e-2, 1e-2))
        << results[i] << expected[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Networks, SimulatedTraining,
                         ::testing::Range(size_t{0}, networks().size()),
                         [](const auto& test) {
                           return networks()[test.param].name;
                         });

// Leaves whose gradient comes from a side stream, whose owner waits for it as
// CUDA's documentation demands.
TEST(SimulatedAutograd, GradientsOfASideStreamReachTheLeaf) {
  const torch::Device device("cuda:0");
  const c10::impl::VirtualGuardImpl cuda(torch::kCUDA);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    simulated_cuda::restart(seed);
    const c10::Stream side = cuda.getStreamFromGlobalPool(device, false);
    const c10::Stream main = cuda.getStream(device);
    auto leaf = torch::ones({64}, device).requires_grad_();
    torch::Tensor doubled;
    c10::Event ready(torch::kCUDA), done(torch::kCUDA);
    ready.record(main);
    {
      const c10::StreamGuard guard(side);
      ready.block(side);
      leaf.record_stream(side);
      doubled = leaf * 2;
      done.record(side);
    }
    done.block(main);
    doubled.record_stream(main);
    const auto loss = (doubled * 3 + leaf).sum();
    loss.backward();
    leaf.mutable_grad().mul_(2);  // on the stream that called backward()
    EXPECT_EQ(leaf.grad().sum().item<float>(), 64 * 14) << "seed " << seed;
  }
}

}  // namespace
}  // namespace lockstep::internal
