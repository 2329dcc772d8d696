// The training of healing.py, for two ranks of `lockstep run`: the model "mlp"
// of `./dev bench ddp` with AdamW, in HealedTraining.
//
//   healing --folder F --steps 130 --snapshot 20
//     trains so many steps, and saves F/snapshots/ after step 20. Each process
//     writes F/RANK-PID: for each step that it has completed a line with the
//     step's number and the steady clock in ns.
//   healing --folder F --steps 25 --blocks 20
//     trains blocks of so many steps, in turns in HealedTraining and in a loop
//     that calls the same functions itself, so many of each. Rank 0 prints one
//     line of JSON: the median step of each block in microseconds. With --shard
//     the model is in a FullyShard, so that the training is divided. With
//     --buddy, and the ranks on two nodes, each has the other's copies.
//
// The training begins when there is a file F/go.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "benchmarks/ddp_step/workloads.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int64_t kRanks = 2;

struct Options {
  fs::path folder;
  int64_t steps = 130;   // of the training, or of a block
  int64_t snapshot = 0;  // saved after this step; 0 means never
  int64_t blocks = 0;    // of each way; 0 means one training
  bool shard = false;
  bool buddy = false;
};

void await_file(const fs::path& path) {
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  while (!fs::exists(path)) {
    if (Clock::now() > deadline) {
      throw std::runtime_error(path.string() + " was not made within 60 s");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

double median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void run(const Options& options) {
  torch::set_num_threads(1);
  // A standby process has made these before it gets a place.
  const auto& workload = benchmarks::workloads().at("mlp");
  torch::manual_seed(1);
  auto module = workload.model();
  const int64_t samples = options.steps * workload.batch_size * kRanks;
  lockstep::TensorDataset dataset(torch::randn({samples, 20}),
                                  torch::randn({samples, 1}));
  const auto group = lockstep::init_process_group();
  lockstep::DistributedSampler sampler(dataset);
  lockstep::DataLoader loader(dataset, sampler,
                              {.batch_size = workload.batch_size});
  std::optional<lockstep::DistributedDataParallel<torch::nn::Sequential>> ddp;
  std::optional<lockstep::FullyShard<torch::nn::Sequential>> sharded;
  if (options.shard) {
    sharded.emplace(module);
  } else {
    ddp.emplace(module);
  }
  lockstep::optim::AdamW optimizer(module->parameters());
  lockstep::TrainingState state{.model = module.ptr(),
                                .optimizer = &optimizer,
                                .items = {{"sampler", sampler}}};
  const std::string snapshots = options.folder / "snapshots" / "";
  lockstep::load_snapshot(snapshots, state);
  lockstep::HealedTraining training(state, {.buddy_copies = options.buddy});
  std::ofstream steps(options.folder / (std::to_string(lockstep::get_rank()) +
                                        "-" + std::to_string(getpid())));
  await_file(options.folder / "go");

  const auto compute = [&](const torch::data::Example<>& batch) {
    optimizer.zero_grad();
    const auto output = ddp ? (*ddp)(batch.data) : (*sharded)(batch.data);
    workload.loss(output, batch.target).backward();
  };
  const auto update = [&] {
    optimizer.step();
    ++state.step;
  };
  const auto update_and_tell = [&] {
    update();
    const std::chrono::nanoseconds now = Clock::now().time_since_epoch();
    steps << state.step << ' ' << now.count() << std::endl;
  };
  if (options.blocks == 0) {
    while (const auto* batch = training.next(loader)) {
      training.run([&] { compute(*batch); }, update_and_tell);
      if (state.step == options.snapshot) {
        training.run([&] { lockstep::save_snapshot(snapshots, state); });
      }
    }
    return;
  }

  std::vector<double> plain, healed;
  // The first block of each way warms up.
  for (int64_t block = -2; block < 2 * options.blocks; ++block) {
    // Plain, healed, healed, plain: neither is always the first.
    const bool heals = (block & 1) != ((block >> 1) & 1);
    sampler.set_epoch(block + 2);
    std::vector<double> us;
    auto begin = Clock::now();
    const auto end_step = [&] {
      const auto now = Clock::now();
      us.push_back(
          std::chrono::duration<double, std::micro>(now - begin).count());
      begin = now;
    };
    if (heals) {
      while (const auto* batch = training.next(loader)) {
        training.run([&] { compute(*batch); }, update);
        end_step();
      }
    } else {
      for (const auto& batch : loader) {
        compute(batch);
        update();
        end_step();
      }
    }
    if (block >= 0) (heals ? healed : plain).push_back(median(us));
  }
  if (lockstep::get_rank() != 0) return;
  std::cout << nlohmann::json{{"plain_us", plain}, {"healed_us", healed}}
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("a training that heals");
  app.add_option("--folder", options.folder)->required();
  app.add_option("--steps", options.steps)->check(CLI::Range(1, 1'000'000));
  app.add_option("--snapshot", options.snapshot, "after which step");
  app.add_option("--blocks", options.blocks)->check(CLI::Range(1, 10'000));
  app.add_flag("--shard", options.shard);
  app.add_flag("--buddy", options.buddy);
  CLI11_PARSE(app, argc, argv);
  return lockstep::record([&] {
    run(options);
    return 0;
  });
}
