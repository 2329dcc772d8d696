#include "lockstep/observe/metrics_logger.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/observe/background_files.h"
#include "lockstep/observe/log_names.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using internal::BackgroundFiles;
using internal::FileDescriptor;
using Row = std::vector<std::pair<std::string, double>>;
using Names = std::vector<std::string>;

constexpr const char* kStep = "step";

// The shortest text that gives the number again; "nan", "inf", "-inf".
std::string text_of(double number) {
  if (std::isnan(number)) return "nan";  // without a sign
  std::array<char, 32> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

std::string json_line(const Row& metrics, int64_t step) {
  std::string line = "{\"step\": " + std::to_string(step);
  for (const auto& [name, value] : metrics) {
    line += ", " + internal::json_string(name) + ": " +
            (std::isfinite(value) ? text_of(value) : "null");
  }
  return line + "}\n";
}

std::string csv_cell(const std::string& name) {
  if (name.find_first_of(",\"") == std::string::npos) return name;
  std::string cell = "\"";
  for (const char each : name) {
    if (each == '"') cell += '"';
    cell += each;
  }
  return cell + '"';
}

std::string csv_header(const Names& columns) {
  std::string line = "step";
  for (const std::string& name : columns) line += "," + csv_cell(name);
  return line;
}

std::string csv_row(const Names& columns, const Row& metrics, int64_t step) {
  std::string line = std::to_string(step);
  for (const std::string& column : columns) {
    const auto cell =
        std::find_if(metrics.begin(), metrics.end(),
                     [&](const auto& each) { return each.first == column; });
    line += ",";
    if (cell != metrics.end()) line += text_of(cell->second);
  }
  return line;
}

// Returns the next of several lines, without its end, which is LF or CR LF.
std::string_view take_line(std::string_view& lines) {
  const size_t end = std::min(lines.find('\n'), lines.size());
  std::string_view line = lines.substr(0, end);
  lines.remove_prefix(std::min(end + 1, lines.size()));
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

// Returns the cells of a header, which are names and have no end of a line.
Names csv_cells(std::string_view line) {
  Names cells(1);
  bool quoted = false;
  for (size_t at = 0; at < line.size(); ++at) {
    const char each = line[at];
    if (quoted && each == '"' && line.substr(at + 1, 1) == "\"") {
      cells.back() += '"';
      ++at;
    } else if (each == '"') {
      quoted = !quoted;
    } else if (each == ',' && !quoted) {
      cells.emplace_back();
    } else {
      cells.back() += each;
    }
  }
  return cells;
}

// Returns the step of a row; none for a header.
std::optional<int64_t> step_of_row(std::string_view line) {
  constexpr std::string_view kBegin = "{\"step\": ";
  if (line.starts_with(kBegin)) line.remove_prefix(kBegin.size());
  int64_t step = 0;
  const auto read =
      std::from_chars(line.data(), line.data() + line.size(), step);
  if (read.ec != std::errc()) return std::nullopt;
  return step;
}

// Returns "" if there is no such file.
std::string content_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in && errno != ENOENT) {
    internal::throw_errno("cannot read the log file \"" + path + "\"");
  }
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_log(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << content << std::flush;
  if (!out) {
    throw std::system_error(errno, std::generic_category(),
                            "the log \"" + path +
                                "\" cannot be written; make room, or log "
                                "elsewhere");
  }
}

// Returns false for JSON lines.
bool is_csv(const std::string& path) {
  const std::string ending = fs::path(path).extension().string();
  if (ending == ".csv") return true;
  if (ending == ".jsonl") return false;
  throw std::invalid_argument("MetricsLogger(\"" + path +
                              "\"): the format is not known; give a name that "
                              "ends with .csv or .jsonl");
}

void check_row(const Row& metrics) {
  Names names;
  for (const auto& [name, value] : metrics) {
    internal::require_name("MetricsLogger::log(): the name of a metric", name);
    names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw std::invalid_argument("MetricsLogger::log() was given \"" + *twice +
                                "\" twice; give each name once");
  }
  if (std::binary_search(names.begin(), names.end(), "step")) {
    throw std::invalid_argument(
        "MetricsLogger::log() was given the name \"step\", which is the column "
        "of the second argument; give the metric another name");
  }
}

}  // namespace

class MetricsLogger::Impl {
 public:
  Impl(const std::string& path, bool csv, const MetricsLoggerOptions& options)
      : path_(path),
        csv_(csv),
        options_{.most_records = 1000, .interval = options.flush_secs} {
    // Before anything is read, which could last for ever.
    if (fs::exists(path) && !fs::is_regular_file(path)) {
      throw std::invalid_argument(
          "the log \"" + path +
          "\" is not a regular file, so that it cannot be "
          "read or replaced; name a file");
    }
    const fs::path folder = fs::path(path).parent_path();
    if (!folder.empty()) fs::create_directories(folder);
    if (!options.overwrite) go_on();
    files_ = open(path_, options.overwrite ? O_TRUNC : 0);
  }

  int64_t last_step() const {
    const std::lock_guard lock(mutex_);
    return last_step_;
  }

  void resume(int64_t step) {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::logic_error("this log was closed");
    if (lacks_columns()) {
      rewrite();
    } else {
      files_->flush();
    }
    const std::string old = content_of(path_);
    std::string content;
    knows_run_ = true;
    last_step_ = kNoStep;
    for (std::string_view lines = old; !lines.empty();) {
      const std::string_view line =
          lines.substr(0, std::min(lines.find('\n'), lines.size() - 1) + 1);
      lines.remove_prefix(line.size());
      const auto of_row = step_of_row(line);
      if (of_row.value_or(kNoStep) > step) continue;
      last_step_ = std::max(last_step_, of_row.value_or(kNoStep));
      content += line;
    }
    if (content.size() < old.size()) replace_file(content);
  }

  void log(const Row& metrics, int64_t step) {
    const std::lock_guard lock(mutex_);
    last_step_ =
        std::exchange(knows_run_, true) ? std::max(last_step_, step) : step;
    if (!csv_) return write(json_line(metrics, step));
    if (closed_)
      throw std::logic_error("this log was closed; log before close()");
    for (const auto& [name, value] : metrics) {
      if (std::find(columns_.begin(), columns_.end(), name) == columns_.end()) {
        columns_.push_back(name);
      }
    }
    const std::string row = csv_row(columns_, metrics, step) + line_end_;
    if (!has_header_) {
      has_header_ = true;
      columns_in_file_ = columns_.size();
      write(csv_header(columns_) + line_end_ + row);
    } else if (lacks_columns()) {
      write_with_columns(row);
    } else {
      write(row);
    }
  }

  void flush() {
    const std::lock_guard lock(mutex_);
    if (!closed_ && lacks_columns()) {
      rewrite();
    } else {
      files_->flush();
    }
  }

  void close() {
    const std::lock_guard lock(mutex_);
    std::exception_ptr failure;
    if (!std::exchange(closed_, true) && lacks_columns()) {
      try {
        rewrite();
      } catch (const std::system_error&) {
        failure = std::current_exception();
      }
    }
    files_->close();
    warn();
    if (failure) std::rethrow_exception(failure);
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::unique_ptr<BackgroundFiles> open(const std::string& path, int flags) {
    FileDescriptor file(::open(
        path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | flags, 0666));
    if (!file) {
      internal::throw_errno("cannot open the log file \"" + path + "\"");
    }
    auto files = std::make_unique<BackgroundFiles>(options_);
    files->add(std::move(file), path_);
    return files;
  }

  // Learns the columns, and cuts off a part of a row at the end.
  void go_on() {
    const std::string content = content_of(path_);
    const size_t whole = content.rfind('\n') + 1;  // 0 if there is none
    for (auto lines = std::string_view(content).substr(0, whole);
         !lines.empty();) {
      last_step_ =
          std::max(last_step_, step_of_row(take_line(lines)).value_or(kNoStep));
    }
    if (csv_) learn_columns(content, whole > 0);
    if (whole < content.size() &&
        ::truncate(path_.c_str(), static_cast<off_t>(whole)) != 0) {
      internal::throw_errno("cannot cut the log file \"" + path_ + "\"");
    }
  }

  void learn_columns(std::string_view content, bool whole) {
    std::string_view rest = content;
    const std::string_view header = take_line(rest);
    Names cells = csv_cells(header);
    const std::string_view step = "step";
    if (whole ? cells.front() != step : !step.starts_with(cells.front())) {
      throw std::invalid_argument("MetricsLogger(\"" + path_ +
                                  "\"): the file there begins with the "
                                  "column \"" +
                                  cells.front() +
                                  "\" and not with \"step\", so it is another "
                                  "table; give another name, "
                                  "or overwrite it");
    }
    if (!whole) return;
    if (content.substr(header.size(), 1) == "\r") line_end_ = "\r\n";
    cells.erase(cells.begin());
    columns_ = std::move(cells);
    columns_in_file_ = columns_.size();
    has_header_ = true;
  }

  // Whether a row has a name for which the file has no column yet. That row and
  // later ones are in rows_ then, until rewrite() has given the file its
  // columns.
  bool lacks_columns() const { return columns_in_file_ < columns_.size(); }

  void write_with_columns(const std::string& row) {
    const BackgroundFiles::Backlog backlog = files_->backlog();
    if (rows_.size() + backlog.bytes + row.size() <= options_.most_bytes) {
      rows_ += row;
    } else {
      ++dropped_;
    }
    warn();
    if (backlog.failed) {
      told_ = true;  // by warn(); the thread tries until the disk has room
      return;
    }
    const auto now = Clock::now();
    if (now < next_try_) return;
    const bool told = told_;
    try {
      rewrite();
    } catch (const std::system_error& error) {
      next_try_ = now + options_.interval;
      if (told) return;
      TORCH_WARN("lockstep: MetricsLogger: \"", path_,
                 "\" cannot be rewritten with new columns (",
                 error.code().message(),
                 "); training goes on, and what is logged waits in memory, at "
                 "most ",
                 options_.most_bytes >> 20, " MiB, until it can");
    }
  }

  // Replaces the file by one with all columns and rows. Throws
  // std::system_error if that is not possible; nothing has changed then.
  void rewrite() {
    told_ = true;  // an exception tells, too
    files_->flush();
    warn();
    const std::string old = content_of(path_);
    std::string content = csv_header(columns_) + line_end_;
    std::string_view lines = old;
    take_line(lines);
    while (!lines.empty()) {
      content.append(take_line(lines))
          .append(columns_.size() - columns_in_file_, ',')
          .append(line_end_);
    }
    // These rows are only numbers, so each comma begins a cell.
    for (lines = rows_; !lines.empty();) {
      const std::string_view row = take_line(lines);
      const auto cells =
          static_cast<size_t>(std::count(row.begin(), row.end(), ','));
      content.append(row)
          .append(columns_.size() - cells, ',')
          .append(line_end_);
    }
    replace_file(content);
    columns_in_file_ = columns_.size();
    rows_ = {};
    told_ = false;
    next_try_ = {};
    if (dropped_ > 0) {
      TORCH_WARN("lockstep: MetricsLogger: ", std::exchange(dropped_, 0),
                 " rows were dropped while \"", path_,
                 "\" could not be rewritten");
    }
  }

  // All that can fail comes before the rename, which is one step.
  void replace_file(const std::string& content) {
    const std::string aside = path_ + ".new";
    try {
      write_log(aside, content);
      auto files = open(aside, 0);
      fs::rename(aside, path_);
      files_ = std::move(files);
    } catch (const std::system_error&) {
      std::error_code ignored;
      fs::remove(aside, ignored);
      throw;
    }
  }

  void write(const std::string& line) {
    files_->append(0, line);
    warn();
  }

  void warn() {
    const std::string notice = files_->take_notice();
    if (!notice.empty()) TORCH_WARN("lockstep: MetricsLogger: ", notice);
  }

  const std::string path_;
  const bool csv_;  // otherwise JSON lines
  const internal::BackgroundFilesOptions options_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  static constexpr int64_t kNoStep = -1;
  // The greatest step of this run: that of the file, until this object logs or
  // resumes. The file may have greater ones of an earlier run.
  int64_t last_step_ = kNoStep;
  bool knows_run_ = false;

  // These are for a .csv only.
  bool has_header_ = false;     // if not, the file is empty
  std::string line_end_{"\n"};  // "\r\n" if the file there has that
  Names columns_;               // after "step"
  size_t columns_in_file_ = 0;
  std::string rows_;  // that wait for their columns
  int64_t dropped_ = 0;
  bool told_ = false;  // that the file cannot be written
  Clock::time_point next_try_{};

  std::unique_ptr<BackgroundFiles> files_;
};

MetricsLogger::MetricsLogger(std::string path, MetricsLoggerOptions options)
    : path_(std::move(path)) {
  const bool csv = is_csv(path_);
  if (options.flush_secs < std::chrono::seconds(1)) {
    throw std::invalid_argument("MetricsLoggerOptions::flush_secs is " +
                                std::to_string(options.flush_secs.count()) +
                                " s; give 1 or more");
  }
  options.flush_secs = std::min(options.flush_secs, internal::kLongestInterval);
  const int rank = internal::log_rank();
  if (options.every_rank) {
    const fs::path file(path_);
    path_ = (file.parent_path() / ("rank_" + std::to_string(rank)) /
             file.filename())
                .string();
  }
  if (rank != 0 && !options.every_rank) return;
  impl_ = std::make_unique<Impl>(path_, csv, options);
}

MetricsLogger::~MetricsLogger() {
  try {
    if (impl_) impl_->close();
  } catch (const std::system_error& error) {
    TORCH_WARN("lockstep: MetricsLogger: ", error.what());
  } catch (const std::runtime_error&) {
    // In a forked child.
  }
}

void MetricsLogger::log(
    const std::vector<std::pair<std::string, double>>& metrics, int64_t step) {
  check_row(metrics);
  if (!impl_) return;
  for (const auto& [name, value] : metrics) {
    internal::TrainingSummary::note_metric(name, value);
  }
  impl_->log(metrics, step);
}

void MetricsLogger::resume(int64_t step) {
  if (impl_) impl_->resume(step);
}

StateTree MetricsLogger::state_dict() const {
  StateTree::Dict dict;
  if (!impl_) return dict;
  try {
    impl_->flush();
  } catch (const std::system_error& error) {
    TORCH_WARN("lockstep: MetricsLogger: ", error.what());
  }
  dict.set(kStep, impl_->last_step());
  return dict;
}

void MetricsLogger::load_state_dict(const StateTree& state) {
  const auto* dict = state.as<StateTree::Dict>();
  const StateTree* found = dict ? dict->find(kStep) : nullptr;
  if (!dict || (found && !found->as<int64_t>())) {
    throw std::invalid_argument(
        "MetricsLogger::load_state_dict() was given a state that no "
        "MetricsLogger has made; give what its state_dict() returned");
  }
  // Without a step, a rank that writes no file has saved.
  if (found) resume(*found->as<int64_t>());
}

void MetricsLogger::flush() {
  if (impl_) impl_->flush();
}

void MetricsLogger::close() {
  if (impl_) impl_->close();
}

}  // namespace lockstep
