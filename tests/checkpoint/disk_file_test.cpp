#include "lockstep/checkpoint/disk_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <system_error>
#include <thread>

#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/in_child.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

// Called with the file of each flock() of this program, before it.
static std::function<void(int file)> before_lock;

extern "C" int flock(int file, int operation) noexcept {
  if (before_lock) before_lock(file);
  return static_cast<int>(::syscall(SYS_flock, file, operation));
}

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;

void save(const std::string& path, const std::string& content) {
  AtomicFile file(path);
  file.write(content.data(), content.size());
  file.commit();
}

TEST(AtomicFile, ReplacesTheWholeFile) {
  const TemporaryFolder folder;
  save(folder.file("a"), "a long content");
  save(folder.file("a"), "short");
  EXPECT_EQ(read_file(folder.file("a")), "short");
  EXPECT_EQ(folder.count(), 1u);
}

TEST(AtomicFile, WithoutCommitTheOldFileStays) {
  const TemporaryFolder folder;
  save(folder.file("a"), "old");
  {
    AtomicFile file(folder.file("a"));
    file.write("new", 3);
  }
  EXPECT_EQ(read_file(folder.file("a")), "old");
  EXPECT_EQ(folder.count(), 1u);
}

TEST(AtomicFile, LeftOversGoAndSavesInProgressStay) {
  const TemporaryFolder folder;
  write_file(folder.file(".a.lockstep-0123456789abcdef.tmp"), "killed");
  write_file(folder.file(".b.lockstep-0123456789abcdef.tmp"), "another's");
  write_file(folder.file(".a.lockstep-notes.tmp"), "a user's");
  AtomicFile going_on(folder.file("a"));
  EXPECT_EQ(folder.count(), 3u);  // the first is gone, one is new
  save(folder.file("a"), "second");
  going_on.commit();
  EXPECT_EQ(read_file(folder.file("a")), "");
  EXPECT_EQ(folder.count(), 3u);
}

// Another job's save found the new file before it was locked, and removed it
// after the save had looked whether it still existed; then it could not be
// renamed.
TEST(AtomicFile, AnotherJobMayRemoveWhatIsNotLockedYet) {
  const TemporaryFolder folder;
  std::map<std::string, FileDescriptor> locked;  // by the other job
  before_lock = [&](int file) {
    if (locked.size() == 4) return;
    const std::string path =
        std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file));
    FileDescriptor other(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_EQ(::syscall(SYS_flock, other.get(), LOCK_EX | LOCK_NB), 0);
    locked.emplace(path, std::move(other));
  };
  AtomicFile file(folder.file("a"));
  before_lock = nullptr;
  EXPECT_EQ(locked.size(), 4u);
  for (const auto& [path, descriptor] : locked) ::unlink(path.c_str());
  file.write("new", 3);
  file.commit();
  EXPECT_EQ(read_file(folder.file("a")), "new");
  EXPECT_EQ(folder.count(), 1u);
}

TEST(AtomicFile, ALinkStaysAndItsTargetIsReplaced) {
  const TemporaryFolder folder;
  write_file(folder.file("target"), "old");
  std::filesystem::create_symlink("target", folder.file("link"));
  save(folder.file("link"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  EXPECT_EQ(read_file(folder.file("target")), "new");
}

// A link whose target did not exist yet was replaced by the file.
TEST(AtomicFile, ALinkToNothingStaysAndItsTargetIsMade) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("large"));
  std::filesystem::create_symlink("large/second", folder.file("first"));
  std::filesystem::create_symlink("target", folder.file("large/second"));
  save(folder.file("first"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("first")));
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("large/second")));
  EXPECT_EQ(read_file(folder.file("large/target")), "new");
}

TEST(AtomicFile, ALinkToItselfIsAnError) {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("b", folder.file("a"));
  std::filesystem::create_symlink("a", folder.file("b"));
  EXPECT_THAT(message_of([&] { save(folder.file("a"), "new"); }),
              AllOf(HasSubstr(folder.file("a")),
                    HasSubstr("symbolic link cannot be followed")));
}

TEST(AtomicFile, PermissionsOfTheOldFileAreKept) {
  const TemporaryFolder folder;
  write_file(folder.file("a"), "old");
  std::filesystem::permissions(folder.file("a"),
                               std::filesystem::perms::owner_read);
  save(folder.file("a"), "new");
  EXPECT_EQ(std::filesystem::status(folder.file("a")).permissions(),
            std::filesystem::perms::owner_read);
}

TEST(AtomicFile, WhatIsNoFileIsNeverReplaced) {
  const TemporaryFolder folder;
  EXPECT_THROW(AtomicFile("/dev/null"), std::invalid_argument);
  EXPECT_THROW(AtomicFile(folder.file("")), std::invalid_argument);
  EXPECT_THROW(AtomicFile(""), std::invalid_argument);
  EXPECT_THAT(message_of([&] { AtomicFile(folder.file("none/a")); }),
              AllOf(HasSubstr("was not saved"), HasSubstr("none")));
}

// A limit on the size of files lets write() fail as on a full disk, without the
// rights to mount one. It holds for the whole process, so this runs in a fork.
TEST(AtomicFile, OnAFullDiskTheOldSnapshotStaysAndTheErrorTellsWhy) {
  const TemporaryFolder folder;
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const std::string path = folder.file(name);
    save_snapshot_file(path, sample_snapshot());
    EXPECT_EQ(in_child([&] {
                ::signal(SIGXFSZ, SIG_IGN);
                const rlimit limit{1000, 1000};
                ::setrlimit(RLIMIT_FSIZE, &limit);
                try {
                  save_snapshot_file(path, sample_snapshot());
                  return 1;
                } catch (const std::system_error& error) {
                  const std::string text = error.what();
                  return text.find(path) != std::string::npos &&
                                 error.code() == std::errc::file_too_large
                             ? 0
                             : 2;
                } catch (...) {
                  return 3;
                }
              }),
              0);
    EXPECT_TRUE(same_snapshot(load_snapshot_file(path), sample_snapshot()));
  }
  EXPECT_EQ(folder.count(), 2u);
}

// Fault 17: SIGKILL at any moment of a save.
TEST(AtomicFile, AKilledSaveLeavesOneCompleteSnapshot) {
  const TemporaryFolder folder;
  std::mt19937 random(1);
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const std::string path = folder.file(name);
    Snapshot snapshot = sample_snapshot();
    snapshot.model_state = {{"w", torch::zeros({50'000}, torch::kLong)}};
    snapshot.step = 0;
    save_snapshot_file(path, snapshot);
    int64_t newest = 0;
    for (int round = 0; round < 40; ++round) {
      const pid_t child = ::fork();
      if (child == 0) {
        for (;;) {
          snapshot.step += 1;
          snapshot.model_state[0].second.data_ptr<int64_t>()[49'999] =
              snapshot.step;
          save_snapshot_file(path, snapshot);
        }
      }
      std::this_thread::sleep_for(
          std::chrono::microseconds(500 + random() % 20'000));
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      const Snapshot read = load_snapshot_file(path);
      EXPECT_EQ(read.model_state[0].second[49'999].item<int64_t>(), read.step);
      EXPECT_GE(read.step, newest);
      newest = snapshot.step = read.step;
    }
    EXPECT_GT(newest, 0);
    save_snapshot_file(path, snapshot);  // removes the left-over file, too
  }
  EXPECT_EQ(folder.count(), 2u);
}

}  // namespace
}  // namespace lockstep::internal
