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

const std::string kWorker = LOCKSTEP_BIN_DIR "/tests/hostile_worker";
const std::string kNobody = "65534";

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

  // Returns `command` for another user.
  static std::vector<std::string> as_user(
      const std::string& user, const std::vector<std::string>& command) {
    std::vector<std::string> all{"/bin/sh", "-c",
                                 "exec setpriv --reuid=" + user + " --regid=" +
                                     user + " --clear-groups \"$@\"",
                                 "sh"};
    all.insert(all.end(), command.begin(), command.end());
    return all;
  }
  std::unique_ptr<RunningProgram> start_hostile(const std::string& kind) {
    auto job = start_program(as_user(
        kNobody, {LOCKSTEP_BIN_DIR "/lockstep", "run", "--rdzv-id=hostile",
                  kWorker, secret().string(), kind}));
    job->await_output("ready");
    return job;
  }
  // Starts nobody's agent, which says that it is of `user`.
  std::unique_ptr<RunningProgram> start_agent(
      const std::string& user, const std::string& kind = "agent") {
    auto agent = start_program(as_user(kNobody, {kWorker, user, kind}));
    agent->await_output("ready");
    return agent;
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

// A sparse file would fill root's disk.
TEST_F(HostileJobs, AProfileTakesNoTraceWithoutLimit) {
  auto job = start_hostile("huge");
  const auto folder = scratch() / "traces";
  const auto result = run_command(
      {"profile", "hostile", "--seconds=0.1", "--output", folder.string()});
  EXPECT_EQ(result.exit_code, 1) << result.out;
  EXPECT_THAT(result.err, HasSubstr("has 5368709120 bytes, and at most"));
  EXPECT_FALSE(fs::exists(folder));
  end(*job);
}

// Other users could put links where root's traces would be written.
TEST_F(HostileJobs, AProfileIsWrittenToAFolderOfRootsOnly) {
  auto job = start_hostile("trace");
  const auto profile = [&](const fs::path& folder) {
    return run_command(
        {"profile", "hostile", "--seconds=0.1", "--output", folder.string()});
  };
  const fs::path theirs = scratch() / "theirs";
  const fs::path shared = scratch() / "shared";
  const fs::path own = scratch() / "own";
  const fs::path link = scratch() / "link";
  for (const fs::path& folder : {theirs, shared, own}) {
    fs::create_directory(folder);
  }
  ASSERT_EQ(::chown(theirs.c_str(), 65534, 65534), 0);
  fs::permissions(shared, fs::perms(0777));
  fs::create_directory_symlink(own, link);
  for (const fs::path& folder : {theirs, shared, link}) {
    const auto result = profile(folder);
    EXPECT_EQ(result.exit_code, 2) << folder << result.out;
    EXPECT_THAT(result.err, HasSubstr("--output " + folder.string()));
    EXPECT_TRUE(fs::is_empty(folder));
  }
  for (const fs::path& folder : {own, scratch() / "new"}) {
    const auto result = profile(folder);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("The traces are in " + folder.string()));
    EXPECT_THAT(result.err, AllOf(HasSubstr(folder.string() + "/rank0.json.gz"),
                                  Not(HasSubstr("/proc/"))));
    EXPECT_TRUE(fs::exists(folder / "rank0.json.gz"));
  }
  end(*job);
}

// Its numbers were indices.
TEST_F(HostileJobs, AnAgentsNumbersAreNotBelieved) {
  auto agent = start_agent(kNobody);
  for (const std::string command : {"status", "stacks", "profile"}) {
    const auto result = run_command({command, "hostile"});
    EXPECT_EQ(result.exit_code, 1) << command << result.out;
    EXPECT_THAT(result.err, HasSubstr("that this lockstep does not read"));
  }
  end(*agent);
}

// Any user may give a socket any name.
TEST_F(HostileJobs, AnotherUsersAgentIsInNobodysList) {
  constexpr const char* kUser = "65533";
  auto agent = start_agent(kUser);
  for (const std::string command : {"jobs", "status"}) {
    EXPECT_THAT(
        run_program(as_user(kUser, {LOCKSTEP_BIN_DIR "/lockstep", command}))
            .err,
        HasSubstr("no job of this user runs"))
        << command;
  }
  end(*agent);
}

// Each of them held the list for 3 s.
TEST_F(HostileJobs, AgentsThatDoNotAnswerHoldTheListForAShortTimeOnly) {
  auto agents = start_agent(kNobody, "silent");
  const auto list = run_command({"jobs"});  // in the 30 s that it has here
  EXPECT_EQ(count(list.out, "no answer"), 12) << list.out << list.err;
  end(*agents);
}

TEST_F(HostileJobs, APipeDoesNotHoldTheStacks) {
  auto job = start_hostile("pipe");
  const auto result = run_command({"stacks", "hostile"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("it does not answer"));
  end(*job);
}

// A bug: a rank that had also answered a later request was waited for in vain.
TEST_F(HostileJobs, StacksAreTakenThoughTheRankHasAnsweredALaterRequest) {
  auto job = start_hostile("newer");
  const auto result = run_command({"stacks", "hostile"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("secret +0x1000\n"));
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
