// 12 Snapshots: saves while it trains, saves its last step when it is asked to
// stop, and goes on there when it is started again, on any number of ranks.
//
// Here the program asks itself, after 50 steps. A scheduler, `kill` or the like
// would send the signal to the launcher or to any rank.
//
//   $ build/bin/12_snapshots
//   from step 0 to 50: asked to stop; 2 snapshots, the newest of step 50
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/12_snapshots
//   from step 50 to 96: done; 2 snapshots, the newest of step 96

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

constexpr const char* kFolder = "12_snapshots/";
constexpr int64_t kEpochs = 6;
constexpr int64_t kGlobalBatch = 32;  // whatever the number of ranks

int main() {
  auto group = lockstep::init_process_group();
  torch::manual_seed(0);
  auto x = torch::randn({512, 8});
  lockstep::TensorDataset dataset(x, x.sum(1, true));
  lockstep::DistributedSampler sampler(dataset);
  lockstep::DataLoader loader(
      dataset, sampler,
      {.batch_size = kGlobalBatch / lockstep::get_world_size()});
  lockstep::DistributedDataParallel<torch::nn::Linear> model(
      torch::nn::Linear(8, 1));
  lockstep::optim::AdamW optimizer(model->parameters());

  lockstep::TrainingState state{.model = model.module(),
                                .optimizer = &optimizer,
                                .items = {{"sampler", sampler}}};
  lockstep::load_snapshot(kFolder, state);
  const int64_t first = state.step;
  lockstep::SnapshotSaver saver(kFolder, state,
                                {.every_steps = 20, .keep_last = 2});
  for (int64_t epoch = state.next_epoch();
       epoch < kEpochs && !saver.stop_requested(); ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      torch::mse_loss(model(batch.data), batch.target).backward();
      optimizer.step();
      ++state.step;
      if (state.step == 50) std::raise(SIGTERM);
      if (saver.is_due()) saver.save();  // copies; a thread writes the copy
      if (saver.stop_requested()) break;
    }
    if (!saver.stop_requested()) state.epochs_run = epoch;
  }
  saver.finish();  // saves the end, unless it is saved

  if (lockstep::get_rank() != 0) return 0;
  int snapshots = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    snapshots += entry.is_directory() && !entry.is_symlink() ? 1 : 0;
  }
  const auto newest =
      std::filesystem::read_symlink(std::filesystem::path(kFolder) / "latest")
          .string();
  std::printf("from step %ld to %ld: %s; %d snapshots, the newest of %s\n",
              static_cast<long>(first), static_cast<long>(state.step),
              saver.stop_requested() ? "asked to stop" : "done", snapshots,
              newest.substr(newest.find("step")).replace(4, 1, " ").c_str());
}
