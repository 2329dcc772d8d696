// Jobs with an average of the weights, a scaler, random transforms and parts of
// their own that get SIGKILL, twice, while they save: what they have in the end
// are the bits of a job that was not killed. (With a file, the log of rank 1
// lacked the rows before the snapshot.)
#include <gmock/gmock.h>
#include <signal.h>

#include "tests/harness/running_program.h"
#include "tests/parallel/items_end.h"

namespace lockstep::internal::testing {
namespace {

class KilledTraining : public ProgramTest {
 protected:
  std::unique_ptr<RunningProgram> start(const std::string& run,
                                        const std::string& kind,
                                        const std::string& snapshot,
                                        int64_t stop) {
    return start_program(
        {LOCKSTEP_BIN_DIR "/lockstep", "run", "--standalone",
         "--nproc-per-node=2", LOCKSTEP_BIN_DIR "/tests/items_rank", kind,
         (scratch() / (run + kind + snapshot)).string(),
         (scratch() / (run + kind + snapshot.substr(0, 4) + ".csv")).string(),
         std::to_string(stop)},
        {.environment = {"OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="}});
  }

  std::string end_of(const std::string& run, const std::string& kind,
                     const std::string& snapshot) {
    const auto result = start(run, kind, snapshot, kEnd)->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(lines(result.out), ::testing::SizeIs(2));
    return result.out;
  }
};

TEST_F(KilledTraining, HasTheBitsOfOneThatWasNot) {
  for (const auto& [kind, snapshot] :
       {std::pair{"plain", "snapshots/"}, std::pair{"sharded", "snapshots/"},
        std::pair{"plain", "file.pt"}}) {
    SCOPED_TRACE(std::string(kind) + " " + snapshot);
    // In the middle of both epochs, when a save has just begun.
    for (const int64_t stop : {9, 21}) {
      auto job = start("killed", kind, snapshot, stop);
      job->await_output("stopped");
      job->signal(SIGKILL);
      EXPECT_EQ(job->finish().exit_code, 128 + SIGKILL);
      ASSERT_TRUE(await_no_process(std::chrono::milliseconds(5000)));
    }
    EXPECT_EQ(end_of("killed", kind, snapshot),
              end_of("whole", kind, snapshot));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
