// Jobs of `lockstep run` that are killed in the middle of an epoch and resumed
// with other numbers of ranks, batch sizes and workers: together they train on
// each sample of the epoch once, in the order of an epoch that is not stopped.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <sstream>

#include "lockstep/data/bucket_batch_sampler.h"
#include "lockstep/data/distributed_sampler.h"
#include "tests/data/resume_samples.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

using Order = std::vector<size_t>;
constexpr int kNever = 1 << 20;

class ResumedJob : public ProgramTest {
 protected:
  struct World {
    int ranks;
    int batch_size;
    int workers;
  };

  std::unique_ptr<RunningProgram> start_job(
      const std::string& sampler, const World& world, int stop,
      const std::string& snapshot = "snapshot.safetensors",
      const std::vector<std::string>& more = {}) {
    std::vector<std::string> command{
        LOCKSTEP_BIN_DIR "/lockstep",
        "run",
        "--standalone",
        "--nproc-per-node=" + std::to_string(world.ranks),
        LOCKSTEP_BIN_DIR "/tests/resume_rank",
        sampler,
        (scratch() / snapshot).string(),
        std::to_string(world.batch_size),
        std::to_string(world.workers),
        std::to_string(stop)};
    command.insert(command.end(), more.begin(), more.end());
    return start_program(command, {.environment = {"OMP_NUM_THREADS=1",
                                                   "CUDA_VISIBLE_DEVICES="}});
  }

  // Runs the job until it has stopped in epoch 1, and kills it.
  void kill_at(const std::string& sampler, const World& world, int stop) {
    auto job = start_job(sampler, world, stop);
    job->await_output("stopped");
    job->signal(SIGKILL);
    EXPECT_EQ(job->finish().exit_code, 128 + SIGKILL);
    ASSERT_TRUE(await_no_process(std::chrono::milliseconds(5000)));
  }

  // Kills the job twice; returns what all attempts together trained on in each
  // epoch.
  std::vector<Order> killed_twice(const std::string& sampler) {
    // In each attempt one step is lost: it was made after the last snapshot.
    kill_at(sampler, {2, 4, 2}, 5);
    kill_at(sampler, {3, 5, 0}, 3);
    return epochs_of(start_job(sampler, {1, 3, 1}, kNever)->finish());
  }

  // Returns what a job says that all attempts together trained on in each
  // epoch.
  static std::vector<Order> epochs_of(const ProgramResult& result) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<Order> epochs;
    for (const std::string& line : lines(result.out)) {
      std::istringstream text(line.substr(line.find(':') + 1));
      epochs.emplace_back(std::istream_iterator<size_t>(text),
                          std::istream_iterator<size_t>());
    }
    return epochs;
  }
};

TEST_F(ResumedJob, TrainsOnEachSampleOnceInTheSameOrder) {
  const std::vector<Order> epochs = killed_twice("distributed");
  ASSERT_EQ(epochs.size(), 2u);
  DistributedSampler alone(kResumeSamples, {.num_replicas = 1, .rank = 0});
  // Two ranks made epoch 0 to its end, and repeated a sample.
  Order first = alone.indices();
  first.push_back(first[0]);
  EXPECT_EQ(epochs[0], first);
  alone.set_epoch(1);
  EXPECT_EQ(epochs[1], alone.indices());
}

TEST_F(ResumedJob, KeepsTheOrderOfItsBuckets) {
  const std::vector<Order> epochs = killed_twice("buckets");
  ASSERT_EQ(epochs.size(), 2u);
  // One rank with the batches of both.
  BucketBatchSampler alone(resume_lengths(), {.batch_size = 8,
                                              .boundaries = kResumeBoundaries,
                                              .num_replicas = 1,
                                              .rank = 0});
  alone.set_epoch(1);
  // Three ranks repeated samples of their own steps, whose 8 samples they do
  // not divide.
  Order once;
  for (const size_t sample : epochs[1]) {
    if (std::ranges::find(once, sample) == once.end()) once.push_back(sample);
  }
  EXPECT_EQ(once, alone.begin_pass().indices);
}

// Jobs that are asked to stop lose no step, whatever their number of ranks.
TEST_F(ResumedJob, AJobThatIsAskedToStopSavesItsLastStep) {
  for (const std::string snapshot : {"snapshots/", "asked.pt"}) {
    for (const auto& [world, stop, signal] :
         {std::tuple{World{2, 4, 2}, 5, SIGTERM},
          std::tuple{World{3, 5, 0}, 2, SIGUSR2}}) {
      auto job = start_job("distributed", world, stop, snapshot, {"asked"});
      job->await_output("stopped");
      job->signal(signal);
      const auto result = job->finish();
      EXPECT_EQ(result.exit_code, signal == SIGTERM ? 128 + SIGTERM : 0)
          << result.err;
    }
    const std::vector<Order> epochs = epochs_of(
        start_job("distributed", {1, 3, 1}, kNever, snapshot)->finish());
    ASSERT_EQ(epochs.size(), 2u);
    DistributedSampler alone(kResumeSamples, {.num_replicas = 1, .rank = 0});
    alone.set_epoch(1);
    EXPECT_EQ(epochs[1], alone.indices());
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
