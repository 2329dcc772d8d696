#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/state/state_tree.h"

namespace lockstep {

struct MetricsLoggerOptions {
  // ---- Behaviour ----

  // Whether an existing file is emptied. If it is not, rows are appended to it,
  // so that a training that is started again goes on; call resume(), or let a
  // snapshot do so, or a step that it trains again is in the file twice.
  bool overwrite{false};

  // Whether each rank writes a file, in the folder rank_<rank> beside where the
  // file would be. If not, only rank 0 writes.
  bool every_rank{false};

  // ---- Performance ----

  // How long a row may wait before it is written; 1 s or more.
  std::chrono::seconds flush_secs{1};
};

// Writes numbers to a table, a row for each call:
//
//   lockstep::MetricsLogger log("metrics.csv");
//   log.log({{"loss", 0.3}, {"lr", 1e-3}}, step);
//
// The ending of the file's name chooses the format:
//
// - .csv: a header and rows separated by commas (RFC 4180). The first column is
//   "step"; the others are in the order in which their names came. If a call
//   has a new name, the file is rewritten with one more column, which is empty
//   in the earlier rows; so give all names at once if there are many rows. A
//   name that a call lacks is an empty cell. NaN and infinity are "nan", "inf"
//   and "-inf". Lines end with LF, or with CR LF if the file there has that.
// - .jsonl: an object of JSON in each line, {"step": 3, "loss": 0.3}. NaN and
//   infinity are null, because JSON has no others.
//
// Numbers are written with as few digits as give the same double again.
//
// Ranks, threads, fork(), a full disk and the end of the process are as with
// SummaryWriter (summary_writer.h): on other ranks than 0 the calls check their
// arguments only; a thread writes; log() warns once (TORCH_WARN) if the disk is
// full, flush() and close() throw. Rewriting a .csv needs room for a second
// copy; if there is none, the row with the new name and later ones wait in
// memory, and a log() after flush_secs, flush() or close() tries again. If the
// process is killed in the middle of a row, the next MetricsLogger removes that
// part of a row.
//
// Only one MetricsLogger at a time may have a file open, in this process or in
// others: two of them would write values under each other's columns. Nothing
// checks that.
class MetricsLogger {
 public:
  // Makes the file and its folder. Throws std::invalid_argument if the name has
  // another ending, or the file is a .csv that begins with another column than
  // "step", which is left as it is; std::system_error if it cannot be made.
  explicit MetricsLogger(std::string path, MetricsLoggerOptions options = {});
  // As close(); a failure is a warning (TORCH_WARN).
  ~MetricsLogger();
  MetricsLogger(const MetricsLogger&) = delete;
  MetricsLogger& operator=(const MetricsLogger&) = delete;

  // Returns whether this rank writes; and its file.
  bool writes() const { return impl_ != nullptr; }
  const std::string& path() const { return path_; }

  // Adds a row. A name is UTF-8 without control characters, not "step", and not
  // twice in one row. Throws std::invalid_argument, or std::logic_error after
  // close().
  void log(const std::vector<std::pair<std::string, double>>& metrics,
           int64_t step);

  // Removes the rows of steps after `step`, for a training that goes on from
  // there. Throws as flush() does, and std::logic_error after close().
  void resume(int64_t step);

  // For TrainingState::items: a snapshot that is loaded takes back the rows of
  // later steps than the last one that was logged when it was saved. Rows that
  // wait are written first: they would be missing if the process were killed,
  // since their steps are not trained again. (If the disk is full, state_dict()
  // warns.)
  StateTree state_dict() const;
  void load_state_dict(const StateTree& state);

  // As SummaryWriter::flush() and close().
  void flush();
  void close();

 private:
  class Impl;
  std::string path_;
  std::unique_ptr<Impl> impl_;  // null if this rank does not write
};

}  // namespace lockstep
