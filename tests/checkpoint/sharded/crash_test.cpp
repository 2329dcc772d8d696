// Faults 17 and 18: a save that is killed, or that fails, at any of its calls
// to the system.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/sharded/snapshot_folder.h"
#include "tests/checkpoint/sharded/sharded_run.h"
#include "tests/harness/in_child.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace lockstep::internal::testing;
namespace fs = std::filesystem;

// Ends the process, or fails as on a full disk, before one of the calls.
class FaultyFiles : public SaveFiles {
 public:
  enum Fault { kNone, kDie, kNoSpace };
  static constexpr int kDied = 42;

  FaultyFiles() = default;
  FaultyFiles(Fault fault, size_t at) : fault_(fault), at_(at) {}

  const std::vector<std::string>& calls() const { return calls_; }

 protected:
  void before(const char* call, const std::string& path) override {
    calls_.push_back(std::string(call) + " " +
                     fs::path(path).filename().string());
    if (calls_.size() != at_ + 1) return;
    if (fault_ == kDie) ::_exit(kDied);
    if (fault_ == kNoSpace) {
      throw std::system_error(ENOSPC, std::generic_category(), path);
    }
  }

 private:
  Fault fault_ = kNone;
  size_t at_ = 0;
  std::vector<std::string> calls_;
};

// Only the newest stays, so that the save also removes one.
const SnapshotOptions kOneStays{.keep_last = 1};

class CrashedSave : public ::testing::Test {
 protected:
  // Makes a folder with the snapshot 1, and with what a killed save has left.
  std::string prepare(const std::string& name) {
    const std::string folder = temporary_.file(name);
    ShardedRun run;
    run.set(1);
    save_snapshot(folder + "/", run.state);
    fs::create_directory(folder + "/.save.lockstep-0123456789abcdef.tmp");
    write_file(folder + "/.save.lockstep-0123456789abcdef.tmp/a", "left over");
    return folder;
  }

  // Returns the calls of a save of snapshot 2 in such a folder.
  std::vector<std::string> calls_of_save() {
    const std::string folder = prepare("counted");
    FaultyFiles files;
    ShardedRun run;
    run.set(2);
    save_with(files, folder, run, kOneStays);
    return files.calls();
  }

  // Expects one snapshot to be loaded, whole, and the next save to leave the
  // folder in order. Returns the number of the snapshot.
  int64_t expect_whole(const std::string& folder) {
    ShardedRun run;
    const LoadedSnapshot loaded = load_snapshot(folder + "/", run.state);
    EXPECT_TRUE(loaded);
    EXPECT_THAT(loaded.skipped, ::testing::IsEmpty());
    const int64_t number = run.number();
    ShardedRun next;
    next.set(3);
    save_snapshot(folder + "/", next.state, kOneStays);
    const auto names = names_in(folder);
    EXPECT_EQ(names.size(), 2u) << ::testing::PrintToString(names);
    EXPECT_THAT(names, Contains("latest"));
    EXPECT_TRUE(
        load_snapshot(folder + "/latest/", run.state, {.will_save = false}));
    EXPECT_EQ(run.number(), 3);
    return number;
  }

  TemporaryFolder temporary_;
};

TEST_F(CrashedSave, WhicheverCallIsItsLastOneSnapshotIsWhole) {
  const auto calls = calls_of_save();
  ASSERT_GT(calls.size(), 15u);
  bool old_one = false;
  bool new_one = false;
  for (size_t at = 0; at < calls.size(); ++at) {
    SCOPED_TRACE("killed before call " + std::to_string(at) + ", " + calls[at]);
    const std::string folder = prepare("killed" + std::to_string(at));
    EXPECT_EQ(in_child([&] {
                FaultyFiles files(FaultyFiles::kDie, at);
                ShardedRun run;
                run.set(2);
                save_with(files, folder, run, kOneStays);
                return 0;
              }),
              FaultyFiles::kDied);
    const int64_t number = expect_whole(folder);
    EXPECT_TRUE(number == 1 || number == 2) << number;
    old_one = old_one || number == 1;
    // Once the new one exists, it stays.
    EXPECT_FALSE(new_one && number == 1);
    new_one = new_one || number == 2;
  }
  EXPECT_TRUE(old_one);
  EXPECT_TRUE(new_one);
}

TEST_F(CrashedSave, OnAFullDiskTheOldSnapshotStaysAndTrainingGoesOn) {
  const auto calls = calls_of_save();
  for (size_t at = 0; at < calls.size(); ++at) {
    SCOPED_TRACE("no space at call " + std::to_string(at) + ", " + calls[at]);
    const std::string folder = prepare("full" + std::to_string(at));
    FaultyFiles files(FaultyFiles::kNoSpace, at);
    ShardedRun run;
    run.set(2);
    // Files that cannot be removed stay until the next save. The first call
    // locks what a killed save has left.
    const bool removes = at == 0 || calls[at].starts_with("unlink ") ||
                         calls[at].starts_with("rmdir ") ||
                         calls[at].starts_with("rename .old");
    bool saved = false;
    try {
      save_with(files, folder, run, kOneStays);
      EXPECT_TRUE(removes) << "did not throw";
      saved = true;
    } catch (const std::system_error& error) {
      EXPECT_EQ(error.code(), std::errc::no_space_on_device);
      saved = std::string(error.what()).find("was saved") != std::string::npos;
    }
    // Nothing that the save has begun is left, unless removing was what failed.
    const auto names = names_in(folder);
    for (const std::string& name : names) {
      const bool left = is_aside_name(name, "save");
      EXPECT_FALSE(left && !saved && at > 3) << name;
    }
    const int64_t number = expect_whole(folder);
    EXPECT_TRUE(number == 1 || number == 2);
    if (saved) {
      EXPECT_EQ(number, 2);
    }
  }
}

// A file system that really has no space left. In a name space of its own, so
// that mounting needs no rights, if the system allows that.
TEST_F(CrashedSave, AFileSystemThatIsFullKeepsTheOldSnapshot) {
  constexpr int kSkipped = 77;
  const std::string folder = temporary_.file("mounted");
  fs::create_directory(folder);
  const int result = in_child([&] {
    const bool root = ::geteuid() == 0;
    if (::unshare(CLONE_NEWNS | (root ? 0 : CLONE_NEWUSER)) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=128k") != 0) {
      return kSkipped;
    }
    ShardedRun run;
    run.set(1);
    save_snapshot(folder + "/s/", run.state);
    TrainingState large{.model = torch::nn::Linear(200, 200).ptr()};  // 160 kB
    try {
      save_snapshot(folder + "/s/", large);
      return 1;
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::no_space_on_device) return 2;
    }
    ShardedRun loaded;
    if (!load_snapshot(folder + "/s/", loaded.state)) return 3;
    if (loaded.number() != 1) return 4;
    return names_in(folder + "/s").size() == 2 ? 0 : 5;
  });
  if (result == kSkipped) GTEST_SKIP() << "this system lets nothing be mounted";
  EXPECT_EQ(result, 0);
}

TEST_F(CrashedSave, WhatIsNamedIsOnTheDiskFirst) {
  const auto calls = calls_of_save();
  // Without the temporary names, and with one of several writes.
  std::vector<std::string> order;
  for (const std::string& call : calls) {
    const size_t aside = call.find(".lockstep-");
    const std::string entry =
        aside == std::string::npos ? call : call.substr(0, aside);
    if (order.empty() || order.back() != entry) order.push_back(entry);
  }
  const std::string shard = "shard-00001-model-00001-of-00001.safetensors";
  EXPECT_THAT(
      order,
      ElementsAre(
          // The files that a killed save has left go first.
          "open .lock", "unlink a", "unlink .lock", "rmdir .save",
          // All content, then the manifest, then the folder's own entries.
          "mkdir .save", "open .lock", "open " + shard, "write " + shard,
          "fsync " + shard, "open manifest.json", "write manifest.json",
          "fsync manifest.json", "fsync .save", "rename 000002-step-2",
          "fsync counted",
          // Locked as long as it has a temporary name.
          "unlink .lock", "symlink .latest", "rename latest", "fsync counted",
          // The old one disappears as a whole.
          "rename .old", StartsWith("unlink "), StartsWith("unlink "),
          "rmdir .old"));
}

// Two jobs that save in one folder do not remove each other's work.
TEST_F(CrashedSave, ASaveThatIsGoingOnIsNotRemovedByAnother) {
  const std::string folder = prepare("shared");
  SaveFiles files;
  ShardedRun one;
  ShardedRun two;
  one.set(2);
  two.set(3);
  ShardedSave first(folder, one.state, {}, Ranks(nullptr), files);
  first.write();
  save_snapshot(folder + "/", two.state);
  first.commit(Ranks(nullptr));
  EXPECT_THAT(names_in(folder), ElementsAre("000001-step-1", "000002-step-3",
                                            "000003-step-2", "latest"));
}

// The lock was that of the folder, which a host on NFS has for itself: a save
// on another host removed the files of this one.
TEST_F(CrashedSave, AFileThatCanBeWrittenIsLocked) {
  const std::string folder = temporary_.file("locked");
  SaveFiles files;
  SnapshotBeingSaved save(files, folder);
  const FileDescriptor other(
      ::open((save.path() + "/.lock").c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(other) << std::strerror(errno);
  EXPECT_NE(::flock(other.get(), LOCK_EX | LOCK_NB), 0);
  const std::string saved = save.commit(7);
  EXPECT_THAT(names_in(saved), ::testing::IsEmpty());
}

// Where no lock is seen, the snapshot had a manifest and lacked a file.
TEST_F(CrashedSave, WhatLostAFileDoesNotBecomeASnapshot) {
  class Robbed : public SaveFiles {
    void before(const char* call, const std::string& path) override {
      const fs::path file(path);
      if (std::string_view(call) != "open" ||
          file.filename() != "manifest.json") {
        return;
      }
      for (const auto& entry : fs::directory_iterator(file.parent_path())) {
        if (entry.path().extension() == ".safetensors") fs::remove(entry);
      }
    }
  };
  const std::string folder = prepare("robbed");
  Robbed files;
  ShardedRun run;
  run.set(2);
  EXPECT_THAT(message_of([&] { save_with(files, folder, run); }),
              HasSubstr("lost the file shard-00001-model-00001-of-00001"));
  EXPECT_THAT(names_in(folder), ElementsAre("000001-step-1", "latest"));
}

// Another job's save removed the folder before it was locked, or the link
// before it was renamed, and this save failed.
TEST_F(CrashedSave, AnotherJobMayRemoveWhatIsNotLockedYet) {
  class Raced : public SaveFiles {
   public:
    explicit Raced(std::string folder) : folder_(std::move(folder)) {}
    int races = 0;

   private:
    void before(const char* call, const std::string& path) override {
      const std::string name = fs::path(path).filename();
      if ((std::string_view(call) == "open" && name == ".lock") ||
          (std::string_view(call) == "rename" && name == "latest")) {
        race();
      }
    }
    // Begins and gives up a save, as another job. The first four times: this
    // save must not go on for ever.
    void race() {
      if (++races > 4) return;
      SaveFiles files;
      const SnapshotBeingSaved other(files, folder_);
    }
    const std::string folder_;
  };
  const std::string folder = temporary_.file("raced");
  fs::create_directory(folder);
  Raced files(folder);
  ShardedRun run;
  run.set(1);
  save_with(files, folder, run);
  EXPECT_EQ(files.races, 6);
  EXPECT_THAT(names_in(folder), ElementsAre("000001-step-1", "latest"));
  EXPECT_EQ(fs::read_symlink(folder + "/latest"), "000001-step-1");
}

TEST_F(CrashedSave, ASaveThatIsGivenUpLeavesNothing) {
  const std::string folder = temporary_.file("given up");
  SaveFiles files;
  ShardedRun run;
  {
    ShardedSave save(folder, run.state, {}, Ranks(nullptr), files);
    save.write();
  }
  EXPECT_THAT(names_in(folder), ::testing::IsEmpty());
}

}  // namespace
}  // namespace lockstep::internal
