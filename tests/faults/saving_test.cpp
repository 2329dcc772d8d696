// Ranks that are killed in a save (fault 17): the next job finds the old
// snapshot or the new one, whole, and the peers name the rank that died.
// tests/checkpoint/sharded/crash_test.cpp kills one process before every call.
#include <gmock/gmock.h>

#include <filesystem>

#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int kSavers = 2;

class Saving : public FaultsTest {
 protected:
  Job& start_saver(const std::string& scenario, const std::string& call = {},
                   int odd = -1) {
    Job& job = make_job(kOneHost, kSavers);
    job.program = "faults_saver";
    job.environment = [this, call](int) {
      return std::vector<std::string>{
          "LOCKSTEP_TEST_FOLDER=" + folder_.string(),
          "LOCKSTEP_TEST_CALL=" + call};
    };
    job.start(scenario, {"odd=" + std::to_string(odd)});
    return job;
  }

  // Lets the next job load and save. Only its snapshot and the link must exist
  // then.
  void expect_next_job_finds(const std::string& step) {
    Job& next = start_saver("load");
    next.await("saved");
    for (int rank = 0; rank < kSavers; ++rank) {
      EXPECT_EQ(next.said(rank, "loaded"), step + " 0");
      EXPECT_EQ(next.rank(rank).finish().exit_code, 0);
    }
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 2);
  }

  fs::path folder_ = scratch() / "snapshots";
};

TEST_F(Saving, AKilledRankLeavesTheOldOrTheNewSnapshotWhole) {
  struct Moment {
    int rank;
    const char* call;
    const char* found;  // "2" after the renaming
  };
  const Moment moments[] = {
      {1, "open shard-00002", "1"},    {1, "fsync shard-00002", "1"},
      {0, "write manifest.json", "1"}, {0, "rename 000002-step-2", "1"},
      {0, "symlink .latest", "2"},     {0, "unlink shard-", "2"},
  };
  for (const Moment& moment : moments) {
    SCOPED_TRACE("rank " + std::to_string(moment.rank) + " before " +
                 moment.call);
    fs::remove_all(folder_);
    Job& job = start_saver("kill", moment.call, moment.rank);
    job.rank(moment.rank).await_output("harm");
    const int peer = 1 - moment.rank;
    job.await("failed", moment.rank, seconds(10));
    EXPECT_THAT(job.said(peer, "failed"),
                HasSubstr("rank " + std::to_string(moment.rank) + " died"));
    EXPECT_EQ(job.rank(peer).finish().exit_code, 1);

    expect_next_job_finds(moment.found);
  }
}

// The peers hear of it in the thread that saves, long before their deadline.
TEST_F(Saving, ARankThatIsKilledWhileItSavesInTheBackgroundIsNoticed) {
  for (const int rank : {0, 1}) {
    SCOPED_TRACE(rank);
    fs::remove_all(folder_);
    Job& job = start_saver("background", {}, rank);
    job.rank(rank).await_output("harm");
    const int peer = 1 - rank;
    job.await("failed", rank, seconds(10));
    EXPECT_THAT(job.said(peer, "failed"),
                HasSubstr("rank " + std::to_string(rank) + " died"));
    EXPECT_EQ(job.rank(peer).finish().exit_code, 1);
    expect_next_job_finds("1");
  }
}

// Rank 0, with which the store goes, leaves after the others have read why.
TEST_F(Saving, AllRanksLearnWhyTheLastSaveHasFailed) {
  for (int round = 0; round < 3; ++round) {
    Job& job = start_saver("missing");
    job.await("failed");
    for (int rank = 0; rank < kSavers; ++rank) {
      EXPECT_THAT(job.said(rank, "failed"),
                  HasSubstr("No such file or directory"));
      EXPECT_EQ(job.rank(rank).finish().exit_code, 1);
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
