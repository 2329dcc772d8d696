#include "benchmarks/ddp_step/workloads.h"

#include <optional>
#include <utility>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "examples/digits_dataset.h"

namespace benchmarks {
namespace {

using torch::nn::Linear, torch::nn::ReLU, torch::nn::Sequential;

// The same random tensors in every step.
class FixedBatch final : public Batches {
 public:
  FixedBatch(const std::vector<int64_t>& data,
             const std::vector<int64_t>& target) {
    torch::manual_seed(1 + lockstep::get_rank());
    batch_ = {torch::randn(data), torch::randn(target)};
  }
  torch::data::Example<>& next() override { return batch_; }

 private:
  torch::data::Example<> batch_;
};

// Batches of samples in memory, to each rank its part of them, epoch after
// epoch.
class LoadedBatches final : public Batches {
 public:
  LoadedBatches(lockstep::TensorDataset dataset, int64_t batch_size)
      : dataset_(std::move(dataset)),
        sampler_(static_cast<int64_t>(dataset_.size())),
        loader_(dataset_, sampler_,
                {.batch_size = batch_size, .drop_last = true}) {}

  torch::data::Example<>& next() override {
    if (position_) ++*position_;
    if (!position_ || *position_ == loader_.end()) {
      position_.reset();  // one loop at a time
      sampler_.set_epoch(epoch_++);
      position_.emplace(loader_.begin());
    }
    return **position_;
  }

 private:
  using Loader = lockstep::DataLoader<lockstep::TensorDataset>;

  lockstep::TensorDataset dataset_;
  lockstep::DistributedSampler sampler_;
  Loader loader_;
  int64_t epoch_ = 0;
  std::optional<Loader::Iterator> position_;
};

// The tutorial's random samples, the same for all ranks.
lockstep::TensorDataset tutorial_samples() {
  constexpr int64_t kSamples = 2048;
  torch::manual_seed(1);
  return {torch::rand({kSamples, 20}), torch::rand({kSamples, 1})};
}

at::Tensor mean_squared_error(const at::Tensor& output,
                              const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

at::Tensor cross_entropy(const at::Tensor& output, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(output, target);
}

// The tutorial's whole step, with its loader and its loss.
Workload tutorial() {
  return {.batch_size = 32,
          .model = [] { return Sequential(Linear(20, 1)); },
          .batches =
              [](int64_t batch_size) {
                return std::make_unique<LoadedBatches>(tutorial_samples(),
                                                       batch_size);
              },
          .loss = cross_entropy};
}

Workload mlp() {
  return {.batch_size = 32,
          .model =
              [] {
                return Sequential(Linear(20, 2048), ReLU(), Linear(2048, 2048),
                                  ReLU(), Linear(2048, 1));
              },
          .batches =
              [](int64_t n) {
                return std::make_unique<FixedBatch>(std::vector<int64_t>{n, 20},
                                                    std::vector<int64_t>{n, 1});
              },
          .loss = mean_squared_error};
}

// 66 layers of 64: many small parameters.
Workload narrow() {
  return {.batch_size = 32,
          .model =
              [] {
                Sequential layers;
                for (int layer = 0; layer < 66; ++layer) {
                  layers->push_back(Linear(64, 64));
                  layers->push_back(ReLU());
                }
                return layers;
              },
          .batches =
              [](int64_t n) {
                return std::make_unique<FixedBatch>(
                    std::vector<int64_t>{n, 64}, std::vector<int64_t>{n, 64});
              },
          .loss = mean_squared_error};
}

// An encoder over sequences of 64 tokens that are embedded already.
Workload transformer() {
  constexpr int64_t kTokens = 64, kWidth = 256;
  return {.batch_size = 1,
          .model =
              [] {
                torch::nn::TransformerEncoderLayer layer(
                    torch::nn::TransformerEncoderLayerOptions(kWidth, 4)
                        .dim_feedforward(1024)
                        .dropout(0));
                return Sequential(torch::nn::TransformerEncoder(
                    torch::nn::TransformerEncoderOptions(layer, 4)));
              },
          .batches =
              [](int64_t n) {
                const std::vector<int64_t> shape{kTokens, n, kWidth};
                return std::make_unique<FixedBatch>(shape, shape);
              },
          .loss = mean_squared_error};
}

// The network of examples/digits.cpp on its images.
Workload digits() {
  using Conv = torch::nn::Conv2dOptions;
  return {.batch_size = 64,
          .model =
              [] {
                return Sequential(
                    torch::nn::Conv2d(Conv(1, 32, 3).padding(1)), ReLU(),
                    torch::nn::Conv2d(Conv(32, 64, 3).padding(1)), ReLU(),
                    torch::nn::MaxPool2d(2),
                    torch::nn::Conv2d(Conv(64, 64, 3).padding(1)), ReLU(),
                    torch::nn::Flatten(), Linear(64 * 4 * 4, 10));
              },
          .batches =
              [](int64_t n) {
                return std::make_unique<LoadedBatches>(
                    examples::read_digits(LOCKSTEP_DIGITS_CSV).train, n);
              },
          .loss = cross_entropy};
}

}  // namespace

const std::map<std::string, Workload>& workloads() {
  static const auto& all = *new std::map<std::string, Workload>{
      {"tutorial", tutorial()}, {"mlp", mlp()},
      {"narrow", narrow()},     {"transformer", transformer()},
      {"digits", digits()},
  };
  return all;
}

}  // namespace benchmarks
