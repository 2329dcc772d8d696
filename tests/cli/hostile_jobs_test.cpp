// Fault 33: root looks at the job of another user, whose worker names paths,
// leaves pipes and links, and says escape sequences (hostile_worker.cpp).
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class HostileJobs : public LauncherTest {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root, to be another user";
    // The other user has its files there.
    fs::permissions(scratch().parent_path(), fs::perms(0755));
    fs::permissions(scratch().parent_path() / "tmp", fs::perms(01777));
    fs::permissions(scratch(), fs::perms(0755));
    // A program with lines of sources, which only root may read.
    fs::copy_file(LOCKSTEP_BIN_DIR "/tests/crash_with_lines", secret());
    fs::permissions(secret(), fs::perms(0600));
  }
  fs::path secret() const { return scratch() / "secret"; }

  std::unique_ptr<RunningProgram> start_hostile(const std::string& kind) {
    auto job = start_program(
        {"/bin/sh", "-c",
         "exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"", "sh",
         LOCKSTEP_BIN_DIR "/lockstep", "run", "--rdzv-id=hostile",
         LOCKSTEP_BIN_DIR "/tests/hostile_worker", secret().string(), kind});
    job->await_output("ready");
    return job;
  }
  static void end(RunningProgram& job) {
    job.signal(SIGTERM);
    job.finish();
  }
};

TEST_F(HostileJobs, AProfileTakesNoFileButATrace) {
  for (const char* kind : {"path", "link"}) {
    auto job = start_hostile(kind);
    const auto folder = scratch() / kind;
    const auto result = run_command(
        {"profile", "hostile", "--seconds=0.1", "--output", folder.string()});
    EXPECT_EQ(result.exit_code, 1) << kind << result.out;
    EXPECT_THAT(result.err, HasSubstr("trace of rank 0 cannot be taken"));
    EXPECT_TRUE(fs::exists(secret()));
    EXPECT_FALSE(fs::exists(folder)) << "of no trace";
    end(*job);
  }
}

TEST_F(HostileJobs, APipeDoesNotHoldTheStacks) {
  auto job = start_hostile("pipe");
  const auto result = run_command({"stacks", "hostile"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("it does not answer"));
  end(*job);
}

TEST_F(HostileJobs, NothingOfRootIsReadOrSaidRaw) {
  auto job = start_hostile("frames");
  const auto stacks = run_command({"stacks", "hostile"});
  EXPECT_EQ(stacks.exit_code, 0) << stacks.err;
  EXPECT_THAT(stacks.out,
              AllOf(HasSubstr("secret +0x1000\n"), Not(HasSubstr(".cpp:")),
                    HasSubstr("lockstep inspect flight "
                              "$'/tmp/a b\\x1b\\x5b2J\\x3btouch x'\n")));
  const auto status = run_command({"status", "hostile"});
  const auto document = run_command({"status", "--json", "hostile"});
  EXPECT_THAT(status.out, HasSubstr("hidden"));
  for (const auto& result : {stacks, status, document}) {
    EXPECT_EQ(result.out.find_first_of("\033\007"), std::string::npos);
    EXPECT_EQ(result.out.find("\xC2\x9B"), std::string::npos);
  }
  end(*job);
}

TEST_F(HostileJobs, AreListedWithTheirUser) {
  auto job = start_hostile("frames");
  const auto list = run_command({"jobs"});
  EXPECT_THAT(list.out, AllOf(HasSubstr("  user  "), HasSubstr("  nobody  ")));
  EXPECT_THAT(run_command({"jobs", "--json"}).out, HasSubstr("\"uid\": 65534"));
  end(*job);
}

}  // namespace
}  // namespace lockstep::internal::testing
