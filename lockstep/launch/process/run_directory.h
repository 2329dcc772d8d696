#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The files of one launch, laid out as torchrun lays them out:
//
//   <log_dir>/<run_id>_<random>/attempt_<restart>/<local_rank>/stdout.log
//                                                              stderr.log
//                                                              error.json
//                                                              stack.txt
//                                                              progress
//                               attempt_<restart>/<local_rank>/generation_<n>/
//                               attempt_<restart>/lockstep-flight-*.json
//                                                 crash-report.txt
//                                                 stacks.txt
//
// A process that took the place of a worker that died (--heal) has the folder
// of the generation that it joined.
//
// With a log directory, the files of every attempt are kept. Without one, the
// directory holds only error files, stacks, flight records
// (worker/flight_dump.h) and reports (crash_report.h), and lies in TMPDIR, or,
// if that cannot be written, where Python would put it (/tmp and others). It is
// removed when the job has ended, unless the job failed and there are flight
// records or a report. Of those that failed jobs of this user leave there, the
// newest kKeptDirectories stay. If the launcher was killed before it could
// remove its own, the next launch removes it.
class RunDirectory {
 public:
  static constexpr size_t kKeptDirectories = 16;

  // Throws std::invalid_argument if `log_dir` cannot be made or written, or if
  // no temporary directory can be made.
  static RunDirectory create(const std::optional<std::string>& log_dir,
                             const std::string& run_id);

  RunDirectory(RunDirectory&& other) noexcept;
  RunDirectory& operator=(RunDirectory&&) = delete;
  // Calls end(false). So it may be called in whichever of the launcher's two
  // processes outlives the other (process_guardian.h).
  ~RunDirectory() { end(/*success=*/false); }

  bool keeps_logs() const { return !temporary_; }
  // Makes the directory of one worker of one attempt and returns its path.
  // `generation` is 0 for one that is started with the attempt. Throws
  // std::system_error.
  std::filesystem::path worker_directory(int restart, int local_rank,
                                         int generation = 0) const;
  // Returns the directory of one attempt, where flight records go.
  std::filesystem::path attempt_directory(int restart) const;
  // The job has ended: removes the directory if it is temporary and, after a
  // failure, has no flight records. Does nothing the second time.
  void end(bool success) noexcept;

 private:
  RunDirectory(std::filesystem::path path, bool temporary, FileDescriptor lock);

  std::filesystem::path path_;
  bool temporary_;
  // Holds a temporary directory locked while the job runs, so that no other
  // launch takes it for one that was left.
  FileDescriptor lock_;
};

// Where the directory of a launch without a log directory lies.
struct TemporaryPlace {
  std::filesystem::path folder{};
  // The folders that come before it, which cannot be written, and why: "/x (No
  // such file or directory)"; empty if there is none.
  std::string refused{};
};

// Makes a directory there, and removes it again. Throws std::invalid_argument
// if there is no such place.
TemporaryPlace find_temporary_place();

}  // namespace lockstep::internal
