#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace lockstep::internal {

// The files of one launch, laid out as torchrun lays them out:
//
//   <log_dir>/<run_id>_<random>/attempt_<restart>/<local_rank>/stdout.log
//                                                              stderr.log
//                                                              error.json
//
// With a log directory, the files of every attempt are kept. Without one, the
// directory holds only the error files and lies in TMPDIR (otherwise /tmp); the
// destructor removes it, or remove_if_temporary() in whichever of the
// launcher's two processes outlives the other (process_guardian.h).
class RunDirectory {
 public:
  // Throws std::invalid_argument if `log_dir` cannot be made or written, or if
  // no temporary directory can be made.
  static RunDirectory create(const std::optional<std::string>& log_dir,
                             const std::string& run_id);

  RunDirectory(RunDirectory&& other) noexcept;
  RunDirectory& operator=(RunDirectory&&) = delete;
  ~RunDirectory() { remove_if_temporary(); }

  bool keeps_logs() const { return !temporary_; }
  // Makes the directory of one worker of one attempt and returns its path.
  // Throws std::system_error.
  std::filesystem::path worker_directory(int restart, int local_rank) const;
  void remove_if_temporary() noexcept;

 private:
  RunDirectory(std::filesystem::path path, bool temporary)
      : path_(std::move(path)), temporary_(temporary) {}

  std::filesystem::path path_;
  bool temporary_;
};

}  // namespace lockstep::internal
