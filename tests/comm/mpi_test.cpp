// The "mpi" backend under mpirun: its contract, how a program joins, and what
// happens when a rank no longer comes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kPrograms = std::string(LOCKSTEP_BIN_DIR) + "/tests/";

// A socket that listens, and its port.
std::pair<FileDescriptor, uint16_t> busy_port() {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(socket.get(), raw, size), 0);
  EXPECT_EQ(::getsockname(socket.get(), raw, &size), 0);
  EXPECT_EQ(::listen(socket.get(), 8), 0);
  return {std::move(socket), ntohs(address.sin_port)};
}

uint16_t free_port() { return busy_port().second; }

class Mpi : public ProgramTest {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(LOCKSTEP_MPIRUN)) {
      GTEST_SKIP() << "there is no mpirun (Debian: openmpi-bin)";
    }
  }

  std::vector<std::string> command(int ranks, const std::string& program,
                                   std::vector<std::string> arguments) const {
    std::vector<std::string> all{LOCKSTEP_MPIRUN, "--oversubscribe", "-n",
                                 std::to_string(ranks)};
    all.insert(all.end(), options_.begin(), options_.end());
    all.push_back(kPrograms + program);
    all.insert(all.end(), arguments.begin(), arguments.end());
    return all;
  }
  ProgramSetup setup(std::vector<std::string> environment = {}) const {
    ProgramSetup made{.environment = std::move(environment)};
    for (const char* always :
         {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
          "OMP_NUM_THREADS=1"}) {
      made.environment.emplace_back(always);
    }
    made.environment.push_back("LOCKSTEP_TEST_FOLDER=" + scratch().string());
    // OpenMPI's files of shared memory, which a killed rank leaves behind.
    made.environment.push_back("OMPI_MCA_btl_vader_backing_directory=" +
                               scratch().string());
    return made;
  }
  ProgramResult run_part(int ranks, const std::string& part,
                         std::vector<std::string> environment = {}) {
    return run_program(command(ranks, "comm_mpi_rank", {part}),
                       setup(std::move(environment)), seconds(60));
  }

  void pass_contract(int ranks, const std::string& filter,
                     std::vector<std::string> environment = {}) {
    // Cases leave broken groups, after which MPI_Finalize is not called.
    options_ = {"--mca", "orte_allowed_exit_without_sync", "1"};
    const auto result =
        run_program(command(ranks, "comm_mpi_contract",
                            {"--gtest_brief=1", "--gtest_filter=" + filter}),
                    setup(std::move(environment)), seconds(280));
    EXPECT_EQ(result.exit_code, 0)
        << result.out.substr(0, 8000) << result.err.substr(0, 4000);
    EXPECT_EQ(count(result.out, "[  PASSED  ]"), ranks) << result.out;
    EXPECT_EQ(count(result.out, "[  PASSED  ] 0 tests"), 0) << result.out;
  }

  std::vector<std::string> options_;
};

class MpiContract : public Mpi, public ::testing::WithParamInterface<int> {};
TEST_P(MpiContract, HoldsUnderMpirun) { pass_contract(GetParam(), "*"); }
INSTANTIATE_TEST_SUITE_P(Ranks, MpiContract, ::testing::Values(1, 2, 3, 5));

TEST_F(Mpi, TensorsLargerThanAnIntCountsGoInParts) {
  // Lowers the limit on a count, because the tests have few large tensors.
  pass_contract(/*ranks=*/2, "*Reductions*:*DataMovement*:*PointToPoint*",
                {"LOCKSTEP_MPI_MAX_COUNT=1000"});
}

// OpenMPI 4.1 multiplies the size of a part by the number of ranks, or by a
// rank, in an int: reduce_scatter_tensor() of 4 ranks with 600 million elements
// each returned at once and reduced nothing, and all_gather_into_tensor() of 8
// ranks with 320 MiB each wrote outside of its output.
TEST_F(Mpi, NoCallIsGivenMoreOfAllRanksTogetherThanAnIntCounts) {
  const auto result =
      run_part(2, "parts_of_ranks", {"LOCKSTEP_MPI_MAX_COUNT=1000"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  // A part is one element of a type of its own.
  EXPECT_EQ(count(result.out, "counted 2 at most, right"), 2) << result.out;
}

TEST_F(Mpi, AWorldNeedsNoEnvironment) {
  for (const int ranks : {1, 2, 3}) {
    const auto result = run_part(ranks, "world");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    for (int rank = 0; rank < ranks; ++rank) {
      const auto number = std::to_string(rank);
      EXPECT_THAT(result.out,
                  HasSubstr("rank " + number + ": of " + std::to_string(ranks) +
                            ", local rank " + number + ", sum " +
                            std::to_string(ranks * (ranks + 1) / 2) +
                            ", backends cpu:mpi\n"));
    }
  }
}

// The example uses the default backend, which asks MPI nothing.
TEST_F(Mpi, OtherBackendsFindTheirRanksUnderMpirun) {
  for (const int ranks : {2, 3}) {
    const auto result = run_program(
        {LOCKSTEP_MPIRUN, "--oversubscribe", "-n", std::to_string(ranks),
         LOCKSTEP_BIN_DIR "/01_process_group"},
        setup(), seconds(60));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, ranks == 2 ? "2 ranks: mean loss 1.50\n"
                                     : "3 ranks: mean loss 2.00\n");
  }
}

TEST_F(Mpi, AWorldWithoutMpirunIsOfOneRank) {
  const auto result =
      run_program({kPrograms + "comm_mpi_rank", "world"}, setup(), seconds(60));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("rank 0: of 1,"));
}

TEST_F(Mpi, ACommunicatorOfTheProgramIsAWorld) {
  const auto result = run_part(4, "communicator");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* line :
       {"rank 1: was 0 in MPI_COMM_WORLD, sum 2, of a pair 2",
        "rank 0: was 2 in MPI_COMM_WORLD, sum 2, of a pair 2",
        "rank 1: was 1 in MPI_COMM_WORLD, sum 4, of a pair 2",
        "rank 0: was 3 in MPI_COMM_WORLD, sum 4, of a pair 2"}) {
    EXPECT_EQ(count(result.out, line), 2) << result.out;
  }
}

TEST_F(Mpi, SerializedThreadsAreEnough) {
  const auto result = run_part(3, "serialized");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "level serialized, 100 of 100 are right"), 3)
      << result.out;
}

TEST_F(Mpi, AMessageLargerThanItsTensorIsAnError) {
  const auto result = run_part(2, "truncated");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "rank 1: recv from rank 0 in group 'default_pg'"),
            1)
      << result.out;
  EXPECT_EQ(count(result.out, "MPI_ERR_TRUNCATE"), 1) << result.out;
}

TEST_F(Mpi, FunneledThreadsAreRefused) {
  const auto result = run_part(2, "funneled");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out,
                  "refused: MPI runs with MPI_THREAD_FUNNELED; call "
                  "MPI_Init_thread with MPI_THREAD_MULTIPLE"),
            2)
      << result.out;
}

TEST_F(Mpi, RanksOfTheEnvironmentMustBeThoseOfMpi) {
  const auto place = [&](const char* rank) {
    return run_part(1, "refused",
                    {std::string("RANK=") + rank, "WORLD_SIZE=1",
                     "MASTER_ADDR=127.0.0.1", "MASTER_PORT=0"});
  };
  const auto right = place("0");
  EXPECT_EQ(right.out, "");
  EXPECT_EQ(right.exit_code, 0) << right.err;
  // A launcher that knows nothing of MPI starts two processes: two worlds of
  // one.
  const auto wrong =
      run_program({"/bin/sh", "-c",
                   "for rank in 0 1; do RANK=$rank " + kPrograms +
                       "comm_mpi_rank refused & done; wait"},
                  setup({"WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                         "MASTER_PORT=" + std::to_string(free_port())}),
                  seconds(60));
  for (const char* rank : {"0", "1"}) {
    EXPECT_EQ(count(wrong.out, std::string("this is rank ") + rank +
                                   " of 2 (RANK and WORLD_SIZE, or the "
                                   "options), but rank 0 of 1 for MPI"),
              1)
        << wrong.out << wrong.err;
  }
}

TEST_F(Mpi, ATimeoutThatIsNoneIsRefusedBeforeMpiStarts) {
  const auto result = run_part(2, "hasty");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(
      count(result.out, "refused: timeout is -5 ms; it must be more than 0\n"),
      2)
      << result.out;
}

TEST_F(Mpi, AGroupUnderAnotherBackendsDefaultGroupIsRefused) {
  const auto result = run_part(2, "strangers");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out,
                  "needs a default group with \"mpi\", but there was "
                  "none; name \"mpi\" in init_process_group()"),
            2)
      << result.out;
  // Both ranks print one of the two: the first to refuse tells the other.
  EXPECT_EQ(
      count(result.out, "this process was rank 0 of 2, and now it is rank 1") +
          count(result.out,
                "this process was rank 1 of 2, and now it is rank 0"),
      2)
      << result.out;
}

TEST_F(Mpi, ACommunicatorIsForgottenWithTheCallThatFailed) {
  const auto result = run_part(2, "forgotten");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "refused: init_process_group was called twice"),
            2)
      << result.out;
  EXPECT_EQ(count(result.out, ": of 2\n"), 2) << result.out;
}

TEST_F(Mpi, AReceiveThatWasGivenUpTakesNoLaterMessage) {
  const auto result = run_part(2, "late");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* from : {"rank 0", "any rank"}) {
    EXPECT_THAT(result.out,
                HasSubstr("refused: recv from " + std::string(from) +
                          " in group 'default_pg'"));
  }
  EXPECT_THAT(result.out, HasSubstr("rank 1: got 7, not 0\n"));
}

TEST_F(Mpi, AMissingModuleIsOneLine) {
  const auto result =
      run_program({kPrograms + "comm_mpi_rank", "refused"},
                  setup({"LOCKSTEP_MODULE_PATH=/no/modules"}), seconds(60));
  EXPECT_EQ(lines(result.out).size(), 1u) << result.out;
  EXPECT_THAT(result.out, AllOf(HasSubstr("backend \"mpi\" cannot be used"),
                                HasSubstr("/no/modules/mpi_backend.so"),
                                HasSubstr("libopenmpi")));
}

TEST_F(Mpi, AStoppedRankEndsTheOperationsOfTheOthersByTheirDeadline) {
  auto program =
      start_program(command(2, "comm_mpi_rank", {"forever"}), setup());
  program->await_output("under way", 2);
  const std::string before = "rank 1: pid ";
  const auto at = program->out().find(before);
  ASSERT_NE(at, std::string::npos) << program->out();
  const auto pid = std::stoi(program->out().substr(at + before.size()));
  ASSERT_EQ(::kill(pid, SIGSTOP), 0);
  program->await_output("rank 0: then ");
  const auto result = program->finish();  // mpirun ends the stopped rank
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("rank 0: all_reduce #"),
                    HasSubstr("(allowed 1000 ms): MPI_Iallreduce had not ended "
                              "after"),
                    HasSubstr("a rank is late, dead, or in another operation"),
                    HasSubstr("the group is broken")));
}

TEST_F(Mpi, AKilledRankEndsTheJob) {
  // The job must end long before the others' timeouts, which are a minute.
  auto program =
      start_program(command(3, "comm_mpi_rank", {"patient"}), setup());
  program->await_output("under way", 3);
  const std::string before = "rank 2: pid ";
  const auto at = program->out().find(before);
  ASSERT_NE(at, std::string::npos) << program->out();
  ASSERT_EQ(
      ::kill(std::stoi(program->out().substr(at + before.size())), SIGKILL), 0);
  const auto result = program->finish(seconds(30));
  EXPECT_NE(result.exit_code, 0);
  EXPECT_EQ(count(result.out, "had not ended"), 0) << result.out;
}

TEST_F(Mpi, ARankThatLeavesByAnExceptionEndsTheJob) {
  // The job must end long before the others' timeouts, which are 30 minutes.
  const auto result = run_part(3, "leaves");
  EXPECT_NE(result.exit_code, 0);
}

TEST_F(Mpi, ARankThatCannotJoinEndsTheJobThoughItsProgramGoesOn) {
  // Rank 1 waits for the store of rank 0, which finds its port in use.
  const auto taken = busy_port();
  const auto result =
      run_part(2, "refused", {"MASTER_PORT=" + std::to_string(taken.second)});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_EQ(count(result.out, "refused: "), 1) << result.out;
  EXPECT_THAT(result.out, HasSubstr(std::to_string(taken.second)));
}

}  // namespace
}  // namespace lockstep::internal::testing
