// One side of `./dev bench data`: loops over a dataset and does nothing with
// its batches. Prints one line of JSON (docs/internals/benchmarks.md):
//
//   data_loader --side lockstep --workload tutorial --epochs 200
//   data_loader --side libtorch --workload images --workers 2
//
// benchmarks/peers/data_peer.py does the same in Python.

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using torch::data::Example;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string side = "lockstep";
  std::string workload = "tutorial";
  int64_t workers = 0;
  int64_t epochs = 10;
  int64_t warmup = 1;
};

constexpr int64_t kBatchSize = 32;
constexpr int64_t kTutorialSamples = 2048;
constexpr int64_t kImages = 256;
constexpr int64_t kStored = 256;   // pixels of a side, in memory
constexpr int64_t kCropped = 224;  // pixels of a side, in the batch

// The tutorial's samples one by one, as LibTorch's own datasets give theirs
// (torch::data::datasets::MNIST).
struct Rows : torch::data::datasets::Dataset<Rows> {
  Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {data[i], target[i]};
  }
  std::optional<size_t> size() const override { return kTutorialSamples; }

  torch::Tensor data = torch::rand({kTutorialSamples, 20});
  torch::Tensor target = torch::rand({kTutorialSamples, 1});
};

// The same in whole batches: the fastest that LibTorch's loader can be given.
struct RowBatches : torch::data::datasets::BatchDataset<RowBatches, Example<>> {
  Example<> get_batch(c10::ArrayRef<size_t> indices) override {
    const std::vector<int64_t> rows(indices.begin(), indices.end());
    const auto selected = torch::tensor(rows, torch::kLong);
    return {data.index_select(0, selected), target.index_select(0, selected)};
  }
  std::optional<size_t> size() const override { return kTutorialSamples; }

  torch::Tensor data = torch::rand({kTutorialSamples, 20});
  torch::Tensor target = torch::rand({kTutorialSamples, 1});
};

// Images in memory that are cropped, flipped and normalised with the operators
// that torchvision calls for it. Where and whether is chosen by a hash of the
// index on all sides, so that no side pays for random numbers.
struct Images : torch::data::datasets::Dataset<Images> {
  Example<> get(size_t index) override {
    const auto hash = static_cast<int64_t>(index * 2654435761U);
    const int64_t top = hash % (kStored - kCropped);
    const int64_t left = hash / 64 % (kStored - kCropped);
    const auto i = static_cast<int64_t>(index);
    auto image = pixels[i].narrow(1, top, kCropped).narrow(2, left, kCropped);
    if (hash / 4096 % 2 == 1) image = image.flip({2});
    image = image.to(torch::kFloat).div_(255).sub_(mean).div_(deviation);
    return {image, target[i]};
  }
  std::optional<size_t> size() const override { return kImages; }

  torch::Tensor pixels =
      torch::randint(256, {kImages, 3, kStored, kStored}, torch::kByte);
  torch::Tensor target = torch::randint(1000, {kImages}, torch::kLong);
  torch::Tensor mean =
      torch::tensor({0.485, 0.456, 0.406}, torch::kFloat).view({3, 1, 1});
  torch::Tensor deviation =
      torch::tensor({0.229, 0.224, 0.225}, torch::kFloat).view({3, 1, 1});
};

// Loops once and returns the seconds. `check` adds up what a reader of the
// batches would see, so that no side can leave work out.
template <class Loader>
double one_epoch(Loader& loader, int64_t samples, double* check) {
  const auto begin = Clock::now();
  int64_t seen = 0;
  for (auto& batch : loader) {
    seen += batch.data.size(0);
    if (check) *check += batch.data.sum().template item<double>();
  }
  const double seconds =
      std::chrono::duration<double>(Clock::now() - begin).count();
  if (seen != samples) {
    throw std::runtime_error("the loop saw " + std::to_string(seen) + " of " +
                             std::to_string(samples) + " samples");
  }
  return seconds;
}

template <class Loader>
void measure(const Options& options, Loader& loader, int64_t samples) {
  double check = 0;
  one_epoch(loader, samples, &check);
  for (int64_t i = 0; i < options.warmup; ++i) {
    one_epoch(loader, samples, nullptr);
  }
  std::vector<double> seconds;
  for (int64_t i = 0; i < options.epochs; ++i) {
    seconds.push_back(one_epoch(loader, samples, nullptr));
  }
  const nlohmann::json line{{"side", options.side},
                            {"workload", options.workload},
                            {"workers", options.workers},
                            {"samples", samples},
                            {"check", check},
                            {"seconds", seconds}};
  std::printf("%s\n", line.dump().c_str());
}

template <class Dataset>
void with_lockstep(const Options& options, Dataset dataset) {
  lockstep::RandomSampler sampler(dataset);
  lockstep::DataLoader loader(
      dataset, sampler,
      {.batch_size = kBatchSize, .num_workers = options.workers});
  measure(options, loader, sampler.dataset_size());
}

template <class Dataset>
void with_libtorch(const Options& options, Dataset dataset) {
  const auto samples = static_cast<int64_t>(*dataset.size());
  auto loader = torch::data::make_data_loader(
      std::move(dataset), torch::data::samplers::RandomSampler(samples),
      torch::data::DataLoaderOptions()
          .batch_size(kBatchSize)
          .workers(options.workers));
  measure(options, *loader, samples);
}

void run(const Options& options) {
  torch::manual_seed(1);
  const bool is_ours = options.side == "lockstep";
  const auto stack = [](auto dataset) {
    return std::move(dataset).map(torch::data::transforms::Stack<>());
  };
  if (options.workload == "images") {
    is_ours ? with_lockstep(options, Images())
            : with_libtorch(options, stack(Images()));
  } else if (is_ours) {
    const Rows rows;
    with_lockstep(options, lockstep::TensorDataset(rows.data, rows.target));
  } else if (options.side == "libtorch_batches") {
    with_libtorch(options, RowBatches());
  } else {
    with_libtorch(options, stack(Rows()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Loops over a dataset: one side of ./dev bench data.");
  app.add_option("--side", options.side)
      ->check(CLI::IsMember({"lockstep", "libtorch", "libtorch_batches"}));
  app.add_option("--workload", options.workload)
      ->check(CLI::IsMember({"tutorial", "images"}));
  app.add_option("--workers", options.workers)->check(CLI::NonNegativeNumber);
  app.add_option("--epochs", options.epochs)->check(CLI::PositiveNumber);
  app.add_option("--warmup", options.warmup)->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "data_loader: %s\n", error.what());
    return 1;
  }
  return 0;
}
