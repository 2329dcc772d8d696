#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace lockstep {

// The files of one launch, laid out as torchrun lays them out:
//
//   <log_dir>/<run_id>_<random>/attempt_<restart>/<local_rank>/stdout.log
//                                                              stderr.log
//                                                              error.json
//
// With a log directory it is kept, every attempt of it. Without one it holds
// the error files only, lies in TMPDIR (else /tmp), and is removed at the end
// of this object's life, or by remove_if_temporary() in the process that
// outlives the other (process_guardian.h).
class RunDirectory {
 public:
  // Throws std::invalid_argument where `log_dir` cannot be made or written,
  // and where no temporary directory can be made.
  static RunDirectory create(const std::optional<std::string>& log_dir,
                             const std::string& run_id);

  RunDirectory(RunDirectory&& other) noexcept;
  RunDirectory& operator=(RunDirectory&&) = delete;
  ~RunDirectory() { remove_if_temporary(); }

  bool keeps_logs() const { return !temporary_; }
  // Makes the directory of one worker of one attempt. Throws
  // std::system_error.
  std::filesystem::path worker_directory(int restart, int local_rank) const;
  void remove_if_temporary() noexcept;

 private:
  RunDirectory(std::filesystem::path path, bool temporary)
      : path_(std::move(path)), temporary_(temporary) {}

  std::filesystem::path path_;
  bool temporary_;
};

}  // namespace lockstep
