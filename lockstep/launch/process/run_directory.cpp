#include "lockstep/launch/process/run_directory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/base/whole_file.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAttempt = "attempt_";
constexpr const char* kTemporaryStem = "lockstep";
// Lies in each temporary directory: a name alone may be that of logs to keep.
constexpr const char* kTemporaryMark = ".lockstep-temporary";

// Makes a new directory whose name begins with `stem` and which only this user
// can enter.
fs::path make_unique(const fs::path& parent, const std::string& stem,
                     const std::string& advice) {
  std::string name = (parent / (stem + "_XXXXXX")).string();
  if (mkdtemp(name.data()) == nullptr) {
    throw std::invalid_argument("a directory cannot be made in " +
                                parent.string() + ": " + std::strerror(errno) +
                                "; " + advice);
  }
  return name;
}

// Writes the mark into `directory`. Returns false, and leaves none, if the file
// system is full or read-only.
bool write_mark(const fs::path& directory) {
  const fs::path file = directory / kTemporaryMark;
  const FileDescriptor fd(
      ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const bool written = fd && ::write(fd.get(), "blat", 4) == 4;
  const int error = errno;
  if (!written) ::unlink(file.c_str());
  errno = error;
  return written;
}

// Returns an empty descriptor if another process has the lock, or if there is
// no such directory.
FileDescriptor lock_directory(const fs::path& directory) {
  FileDescriptor lock(::open(directory.c_str(),
                             O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) lock.reset();
  return lock;
}

// Makes a directory in the first of these in which one can be made and written:
// TMPDIR, TEMP, TMP, /tmp, /var/tmp, /usr/tmp, the current directory; as
// Python's tempfile does (documentation of tempfile.gettempdir()). The result
// is absolute, since a worker may change its directory and must still find its
// error file. `refused` gets those before it and why. `lock` is taken before
// the mark is written, so that no other launch takes the directory for one that
// was left.
fs::path make_temporary(std::string& refused, FileDescriptor& lock) {
  std::vector<std::string> parents;
  for (const char* name : {"TMPDIR", "TEMP", "TMP"}) {
    if (const auto value = get_env(name)) parents.push_back(*value);
  }
  for (const char* path : {"/tmp", "/var/tmp", "/usr/tmp", "."}) {
    parents.emplace_back(path);
  }
  for (const std::string& parent : parents) {
    std::error_code ignored;
    std::string name = (fs::absolute(parent, ignored) /
                        (std::string(kTemporaryStem) + "_XXXXXX"))
                           .string();
    const bool made = mkdtemp(name.data()) != nullptr;
    if (made) lock = lock_directory(name);
    if (made && write_mark(name)) return name;
    refused += (refused.empty() ? "" : ", ") + parent + " (" +
               std::strerror(errno) + ")";
    if (made) ::rmdir(name.c_str());
  }
  throw std::invalid_argument(
      "no directory for temporary files can be written: " + refused +
      "; set TMPDIR to one that can be written");
}

bool has_file_to_keep(const fs::path& attempt) {
  std::error_code error;
  for (fs::directory_iterator entry(attempt, error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("lockstep-flight-") || name == "crash-report.txt") {
      return true;
    }
  }
  return false;
}

bool has_attempt_to_keep(const fs::path& directory) {
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end;
       !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with(kAttempt) &&
        has_file_to_keep(entry->path())) {
      return true;
    }
  }
  return false;
}

void remove_unless_locked(const fs::path& directory) {
  std::error_code ignored;
  if (const auto lock = lock_directory(directory)) {
    fs::remove_all(directory, ignored);
  }
}

// Removes `directory` if it can only be that of a launcher that was killed
// before it wrote the mark: it has been empty for a day, and its name and mode
// are those that mkdtemp() gives.
void remove_unmarked(const fs::path& directory, const struct stat& status) {
  constexpr size_t kRandom = std::string_view("_XXXXXX").size();
  constexpr time_t kDay = 24 * 60 * 60;
  if (directory.filename().string().size() ==
          std::string_view(kTemporaryStem).size() + kRandom &&
      (status.st_mode & 07777) == 0700 &&
      ::time(nullptr) - status.st_mtime > kDay) {
    ::rmdir(directory.c_str());  // fails if it is not empty
  }
}

// Removes what earlier launches of this user have left in `parent`: the
// directories with nothing to keep, whose launchers were killed, and those of
// failed jobs, except for the newest.
void remove_left(const fs::path& parent) {
  std::vector<std::pair<fs::file_time_type, fs::path>> left;
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto& path = entry->path();
    struct stat status {};
    if (!path.filename().string().starts_with(std::string(kTemporaryStem) +
                                              "_") ||
        ::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
        status.st_uid != ::geteuid()) {
      continue;
    }
    if (!open_left_file(path, kTemporaryMark)) {
      remove_unmarked(path, status);
      continue;
    }
    if (!has_attempt_to_keep(path)) {
      remove_unless_locked(path);
      continue;
    }
    std::error_code ignored;
    left.emplace_back(entry->last_write_time(ignored), path);
  }
  if (left.size() <= RunDirectory::kKeptDirectories) return;
  std::ranges::sort(left);
  left.resize(left.size() - RunDirectory::kKeptDirectories);
  for (const auto& [time, path] : left) remove_unless_locked(path);
}

}  // namespace

TemporaryPlace find_temporary_place() {
  TemporaryPlace place;
  FileDescriptor lock;
  const fs::path made = make_temporary(place.refused, lock);
  std::error_code ignored;
  fs::remove_all(made, ignored);
  place.folder = made.parent_path();
  return place;
}

RunDirectory::RunDirectory(fs::path path, bool temporary, FileDescriptor lock)
    : path_(std::move(path)), temporary_(temporary), lock_(std::move(lock)) {}

RunDirectory RunDirectory::create(const std::optional<std::string>& log_dir,
                                  const std::string& run_id) {
  if (!log_dir) {
    std::string refused;
    FileDescriptor lock;
    fs::path made = make_temporary(refused, lock);
    remove_left(made.parent_path());
    return RunDirectory(std::move(made), true, std::move(lock));
  }
  std::error_code error;
  fs::create_directories(*log_dir, error);
  if (error || !fs::is_directory(*log_dir, error)) {
    throw std::invalid_argument("--log-dir " + *log_dir + " cannot be made: " +
                                (error ? error.message() : "it is a file") +
                                "; give a directory that can be written");
  }
  std::string stem = run_id;
  std::replace(stem.begin(), stem.end(), '/', '_');
  // The path is absolute, as in make_temporary().
  return RunDirectory(make_unique(fs::absolute(*log_dir), stem,
                                  "give a --log-dir that can be written"),
                      false, FileDescriptor());
}

RunDirectory::RunDirectory(RunDirectory&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, false)),
      lock_(std::move(other.lock_)) {}

fs::path RunDirectory::worker_directory(int restart, int local_rank,
                                        int generation) const {
  fs::path directory = attempt_directory(restart) / std::to_string(local_rank);
  if (generation > 0) {
    directory /= "generation_" + std::to_string(generation);
  }
  fs::create_directories(directory);
  return directory;
}

fs::path RunDirectory::attempt_directory(int restart) const {
  return path_ / (std::string(kAttempt) + std::to_string(restart));
}

void RunDirectory::end(bool success) noexcept {
  if (!std::exchange(temporary_, false)) return;
  try {
    if (!success && has_attempt_to_keep(path_)) {
      return remove_left(path_.parent_path());
    }
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  } catch (...) {
    // Out of memory: the directory stays.
  }
}

}  // namespace lockstep::internal
