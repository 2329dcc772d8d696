// The order in which a save reaches the disk. Otherwise only a power failure
// would show a missing fsync.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdarg>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/disk_file.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/checkpoint/sharded/sharded_run.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

// The system calls of the saving thread; null while none are recorded.
thread_local std::vector<std::string>* recorded = nullptr;

std::string path_of(int fd) {
  std::array<char, 4096> path{};
  const auto link = "/proc/self/fd/" + std::to_string(fd);
  return ::readlink(link.c_str(), path.data(), path.size() - 1) < 0
             ? std::string()
             : path.data();
}

// Counts the calls that change the file system.
thread_local size_t* changes = nullptr;

void count_change() {
  if (changes != nullptr) ++*changes;
}

void record(const std::string& call, const std::string& path) {
  // The temporary file's name ends with 16 random digits.
  const auto name = std::filesystem::path(path).filename().string();
  const bool aside = name.find(".lockstep-") != std::string::npos;
  const auto entry = call + (aside ? " aside" : " " + name);
  // Several write() calls on one file count once.
  if (recorded->empty() || recorded->back() != entry) {
    recorded->push_back(entry);
  }
}

}  // namespace
}  // namespace lockstep::internal

// These functions replace those of the C library, which is a shared library, in
// the whole test program: every call from Lockstep's sources comes here.
extern "C" {

ssize_t write(int fd, const void* data, size_t size) {
  lockstep::internal::count_change();
  if (lockstep::internal::recorded != nullptr) {
    lockstep::internal::record("write", lockstep::internal::path_of(fd));
  }
  return ::syscall(SYS_write, fd, data, size);
}

int fsync(int fd) {
  lockstep::internal::count_change();
  if (lockstep::internal::recorded != nullptr) {
    lockstep::internal::record("fsync", lockstep::internal::path_of(fd));
  }
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

int rename(const char* from, const char* to) noexcept {
  lockstep::internal::count_change();
  if (lockstep::internal::recorded != nullptr) {
    lockstep::internal::record("rename to", to);
  }
  return static_cast<int>(
      ::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  lockstep::internal::count_change();
  return ::syscall(SYS_pwrite64, fd, data, size, offset);
}

int mkdir(const char* path, mode_t mode) noexcept {
  lockstep::internal::count_change();
  return static_cast<int>(::syscall(SYS_mkdir, path, mode));
}

int rmdir(const char* path) noexcept {
  lockstep::internal::count_change();
  return static_cast<int>(::syscall(SYS_rmdir, path));
}

int unlink(const char* path) noexcept {
  lockstep::internal::count_change();
  return static_cast<int>(::syscall(SYS_unlink, path));
}

int symlink(const char* target, const char* path) noexcept {
  lockstep::internal::count_change();
  return static_cast<int>(::syscall(SYS_symlink, target, path));
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode =
      (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : static_cast<mode_t>(0);
  va_end(more);
  if ((flags & O_CREAT) != 0) lockstep::internal::count_change();
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

}  // extern "C"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using namespace lockstep::internal::testing;

std::vector<std::string> calls_of(const std::function<void()>& save) {
  std::vector<std::string> calls;
  recorded = &calls;
  save();
  recorded = nullptr;
  return calls;
}

TEST(Durability, AFileIsOnTheDiskBeforeItsNameIs) {
  const TemporaryFolder folder;
  const auto folder_name =
      std::filesystem::path(folder.file("a")).parent_path().filename().string();
  for (const char* name : {"new", "new"}) {  // the second replaces the first
    EXPECT_THAT(calls_of([&] {
                  AtomicFile file(folder.file(name));
                  file.write("content", 7);
                  file.commit();
                }),
                ElementsAre("write aside", "fsync aside", "rename to new",
                            "fsync " + folder_name));
  }
}

TEST(Durability, EverySnapshotFormatIsWrittenThatWay) {
  const TemporaryFolder folder;
  const auto folder_name =
      std::filesystem::path(folder.file("a")).parent_path().filename().string();
  for (const char* name : {"a.pt", "a.safetensors"}) {
    EXPECT_THAT(
        calls_of(
            [&] { save_snapshot_file(folder.file(name), sample_snapshot()); }),
        ElementsAre("write aside", "fsync aside",
                    std::string("rename to ") + name, "fsync " + folder_name));
  }
}

// sharded/crash_test.cpp stops a save at each of the calls that SaveFiles
// makes; a change that was made in another way would escape it.
TEST(Durability, EveryChangeThatASaveMakesGoesThroughSaveFiles) {
  class CountedFiles : public SaveFiles {
   public:
    size_t calls = 0;

   private:
    void before(const char*, const std::string&) override { ++calls; }
  };
  const TemporaryFolder temporary;
  const std::string folder = temporary.file("a/b");
  ShardedRun run;
  for (int64_t number = 1; number <= 3; ++number) {
    run.set(number);
    CountedFiles files;
    size_t counted = 0;
    changes = &counted;
    save_with(files, folder, run, {.keep_last = 2});
    changes = nullptr;
    EXPECT_GT(counted, 10u);
    EXPECT_EQ(counted, files.calls);
  }
}

}  // namespace
}  // namespace lockstep::internal
