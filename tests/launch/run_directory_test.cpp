#include "lockstep/launch/process/run_directory.h"

#include <gtest/gtest.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

class RunDirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* set = std::getenv("TMPDIR")) before_ = set;
    ::setenv("TMPDIR", folder_.path().c_str(), 1);
  }
  void TearDown() override {
    if (before_) {
      ::setenv("TMPDIR", before_->c_str(), 1);
    } else {
      ::unsetenv("TMPDIR");
    }
  }

  static void write_record(const RunDirectory& directory, int restart) {
    directory.worker_directory(restart, 0);
    std::ofstream(directory.attempt_directory(restart) /
                  "lockstep-flight-29500-rank0.json")
        << "{}";
  }
  size_t left() const {
    return static_cast<size_t>(std::distance(
        fs::directory_iterator(folder_.path()), fs::directory_iterator()));
  }

  testing::TemporaryFolder folder_;
  std::optional<std::string> before_;
};

// A bug: a TMPDIR that could not be used ended the launch.
TEST_F(RunDirectoryTest, ATmpdirThatCannotBeUsedIsPassedOver) {
  const fs::path file = folder_.file("file");
  std::ofstream(file) << "no folder";
  const fs::path other = folder_.file("other");
  fs::create_directory(other);
  ::setenv("TEMP", other.c_str(), 1);
  for (const std::string& unusable :
       {file.string(), folder_.file("missing"), std::string("/proc"),
        std::string("/dev/full")}) {
    ::setenv("TMPDIR", unusable.c_str(), 1);
    const auto directory = RunDirectory::create(std::nullopt, "job");
    EXPECT_EQ(directory.attempt_directory(0).parent_path().parent_path(), other)
        << unusable;
  }
  ::unsetenv("TEMP");
  EXPECT_TRUE(fs::is_empty(other));
}

// Workers may change their directory.
TEST_F(RunDirectoryTest, ARelativeTmpdirIsMadeAbsolute) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_.path());
  ::setenv("TMPDIR", ".", 1);
  EXPECT_TRUE(RunDirectory::create(std::nullopt, "job")
                  .attempt_directory(0)
                  .is_absolute());
  fs::current_path(before);
}

TEST_F(RunDirectoryTest, StaysOnlyIfTheJobFailedAndHasFlightRecords) {
  const auto run = [](bool records, std::optional<bool> success) {
    auto directory = RunDirectory::create(std::nullopt, "job");
    directory.worker_directory(0, 0);
    if (records) write_record(directory, 1);
    if (success) directory.end(*success);
  };
  run(/*records=*/true, /*success=*/true);
  run(/*records=*/false, /*success=*/false);
  run(/*records=*/false, std::nullopt);
  EXPECT_EQ(left(), 0U);
  run(/*records=*/true, /*success=*/false);
  EXPECT_EQ(left(), 1U);
  // The launcher's other process, which was killed.
  run(/*records=*/true, std::nullopt);
  EXPECT_EQ(left(), 2U);
}

TEST_F(RunDirectoryTest, OnlyTheNewestOfFailedJobsStay) {
  // A job that runs and has failed once is not taken for an old one.
  std::optional running = RunDirectory::create(std::nullopt, "running");
  write_record(*running, 0);
  const fs::path path = running->attempt_directory(0).parent_path();
  fs::last_write_time(path, fs::file_time_type::min());
  // Nor is what others keep under such a name.
  fs::create_directories(folder_.path() + "/lockstep_of_the_user");
  for (size_t i = 0; i < RunDirectory::kKeptDirectories + 3; ++i) {
    auto directory = RunDirectory::create(std::nullopt, "job");
    write_record(directory, 0);
    directory.end(/*success=*/false);
  }
  EXPECT_TRUE(fs::exists(path));
  // The one that runs and the user's are not counted.
  EXPECT_EQ(left(), RunDirectory::kKeptDirectories + 2);
  running->end(/*success=*/true);
  EXPECT_FALSE(fs::exists(path));
}

// A bug: the directory of a launcher that was killed before its agent had
// started stayed for ever.
TEST_F(RunDirectoryTest, TheNextLaunchRemovesWhatAKilledLauncherLeft) {
  const auto running = RunDirectory::create(std::nullopt, "running");
  const pid_t launcher = fork();
  if (launcher == 0) {
    const auto directory = RunDirectory::create(std::nullopt, "job");
    _exit(0);
  }
  ASSERT_EQ(waitpid(launcher, nullptr, 0), launcher);
  EXPECT_EQ(left(), 2U);
  const auto next = RunDirectory::create(std::nullopt, "job");
  // Its own and that of the launch that runs.
  EXPECT_EQ(left(), 2U);
  EXPECT_TRUE(fs::exists(running.attempt_directory(0).parent_path()));
  EXPECT_TRUE(fs::exists(next.attempt_directory(0).parent_path()));
}

// A bug: a launcher that was killed before it had marked its directory left it
// for ever.
TEST_F(RunDirectoryTest, AnEmptyDirectoryOfYesterdayIsRemoved) {
  const auto make = [&](const std::string& name, fs::perms mode, bool old) {
    const fs::path path = folder_.file(name);
    fs::create_directory(path);
    if (name == "lockstep_filled") std::ofstream(path / "data") << "\n";
    fs::permissions(path, mode);
    if (old) {
      fs::last_write_time(
          path, fs::file_time_type::clock::now() - std::chrono::hours(25));
    }
    return path;
  };
  const auto mkdtemp_mode = fs::perms::owner_all;
  const auto of_user = mkdtemp_mode | fs::perms::group_read;
  const auto killed = make("lockstep_aB3dE6", mkdtemp_mode, /*old=*/true);
  const std::vector<fs::path> others = {
      make("lockstep_longer_name", mkdtemp_mode, /*old=*/true),
      make("lockstep_begun1", mkdtemp_mode, /*old=*/false),
      make("lockstep_filled", mkdtemp_mode, /*old=*/true),
      make("lockstep_output", of_user, /*old=*/true)};
  const auto next = RunDirectory::create(std::nullopt, "job");
  EXPECT_FALSE(fs::exists(killed));
  for (const auto& other : others) EXPECT_TRUE(fs::exists(other)) << other;
}

// A bug: kept logs of a job with the id "lockstep", below TMPDIR, were taken
// for what failed jobs had left, and removed.
TEST_F(RunDirectoryTest, LogsUnderTheNameOfTemporaryFilesStay) {
  for (size_t i = 0; i < 3; ++i) {
    const auto logs = RunDirectory::create(folder_.path(), "lockstep");
    write_record(logs, 0);
  }
  for (size_t i = 0; i < RunDirectory::kKeptDirectories + 3; ++i) {
    auto directory = RunDirectory::create(std::nullopt, "job");
    write_record(directory, 0);
    directory.end(/*success=*/false);
  }
  EXPECT_EQ(left(), RunDirectory::kKeptDirectories + 3);
}

TEST_F(RunDirectoryTest, ALogDirectoryStays) {
  {
    auto directory = RunDirectory::create(folder_.path() + "/logs", "a/b");
    EXPECT_TRUE(directory.keeps_logs());
    directory.worker_directory(0, 0);
    directory.end(/*success=*/true);
    EXPECT_TRUE(fs::exists(directory.attempt_directory(0)));
  }
  EXPECT_EQ(left(), 1U);
}

}  // namespace
}  // namespace lockstep::internal
