// A rank of a training over two epochs that writes down what it trains on, for
// resume_job_test.cpp:
//
//   resume_rank SAMPLER SNAPSHOT BATCH_SIZE WORKERS STOP [asked]
//
// SAMPLER is "distributed" or "buckets". The ranks save every other step; at
// step STOP of epoch 1, counted by this job from 0, rank 0 prints "stopped" and
// they wait to be killed. With "asked" they save in the background, and after
// that step they wait to be asked to stop, save, and end. At the end rank 0
// prints for each epoch the samples of all ranks, in the order of the steps and
// in turns within a step.
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/comm/object_collectives.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "tests/data/resume_samples.h"

namespace lockstep::internal::testing {
namespace {

struct SampleNumbers {
  int64_t get(size_t index) const { return static_cast<int64_t>(index); }
  size_t size() const { return kResumeSamples; }
};

struct Job {
  std::string snapshot;
  int64_t batch_size;
  int64_t workers;
  int64_t stop;
  bool is_asked;
};

void say_stopped() {
  if (get_rank() != 0) return;
  std::puts("stopped");
  std::fflush(stdout);
}

// Returns the samples of this step on all ranks, in turns.
std::string of_all_ranks(const at::Tensor& samples) {
  const std::vector<int64_t> mine(
      samples.const_data_ptr<int64_t>(),
      samples.const_data_ptr<int64_t>() + samples.numel());
  const auto all = all_gather_object(Object(mine));
  std::string text;
  for (size_t turn = 0; turn < mine.size(); ++turn) {
    for (const auto& rank : all) {
      if (turn < rank.size()) text += rank[turn].dump() + " ";
    }
  }
  return text;
}

template <class Sampler, class Loader>
void train(const Job& job, Sampler& sampler, Loader& loader) {
  const bool is_first = get_rank() == 0;
  torch::manual_seed(0);  // one model on all ranks
  TrainingState state{.model = std::make_shared<torch::nn::LinearImpl>(1, 1)};
  if (load_snapshot(job.snapshot, state)) {
    sampler.load_state_dict(state.sampler_state);
  }
  SnapshotSaver saver(job.snapshot, state, {.every_steps = 2});
  for (int64_t epoch = state.next_epoch(); epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);
    std::string& trained = state.metadata[std::to_string(epoch)];
    int64_t step = 0;
    for (auto& batch : loader) {
      const bool is_last = epoch == 1 && step++ == job.stop;
      if (is_last) say_stopped();
      while (is_last && !job.is_asked) pause();
      trained += of_all_ranks(batch);
      ++state.step;
      bool is_due = saver.is_due();
      while (is_last && !saver.stop_requested()) is_due = saver.is_due();
      if (is_due) {
        state.sampler_state = sampler.state_dict();
        saver.save();
        if (!job.is_asked) saver.wait();
      }
      if (saver.stop_requested()) return saver.finish();
    }
    state.epochs_run = epoch;
    state.sampler_state.clear();
    save_snapshot(job.snapshot, state);
  }
  if (!is_first) return;
  for (const auto& [epoch, trained] : state.metadata) {
    std::printf("epoch %s: %s\n", epoch.c_str(), trained.c_str());
  }
}

}  // namespace

int resume_rank(const std::vector<std::string>& arguments) {
  const auto group = init_process_group();
  const Job job{.snapshot = arguments.at(1),
                .batch_size = std::stoll(arguments.at(2)),
                .workers = std::stoll(arguments.at(3)),
                .stop = std::stoll(arguments.at(4)),
                .is_asked = arguments.size() > 5};
  SampleNumbers dataset;
  if (arguments.at(0) == "buckets") {
    BucketBatchSampler sampler(
        resume_lengths(),
        {.batch_size = job.batch_size, .boundaries = kResumeBoundaries});
    DataLoader loader(dataset, sampler, {.num_workers = job.workers});
    train(job, sampler, loader);
  } else {
    DistributedSampler sampler(kResumeSamples);
    DataLoader loader(
        dataset, sampler,
        {.batch_size = job.batch_size, .num_workers = job.workers});
    train(job, sampler, loader);
  }
  return 0;
}

}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  return lockstep::internal::testing::resume_rank({argv + 1, argv + argc});
}
