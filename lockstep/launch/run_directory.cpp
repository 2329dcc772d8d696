#include "lockstep/launch/run_directory.h"

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

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

}  // namespace

RunDirectory RunDirectory::create(const std::optional<std::string>& log_dir,
                                  const std::string& run_id) {
  if (!log_dir) {
    const fs::path parent = get_env("TMPDIR").value_or("/tmp");
    return RunDirectory(
        make_unique(parent, "lockstep",
                    "set TMPDIR to a directory that can be written"),
        true);
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
  // The path is absolute, since a worker may change its directory and must
  // still find its error file.
  return RunDirectory(make_unique(fs::absolute(*log_dir), stem,
                                  "give a --log-dir that can be written"),
                      false);
}

RunDirectory::RunDirectory(RunDirectory&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, false)) {}

fs::path RunDirectory::worker_directory(int restart, int local_rank) const {
  const fs::path directory = path_ / ("attempt_" + std::to_string(restart)) /
                             std::to_string(local_rank);
  fs::create_directories(directory);
  return directory;
}

void RunDirectory::remove_if_temporary() noexcept {
  if (!temporary_) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace lockstep::internal
