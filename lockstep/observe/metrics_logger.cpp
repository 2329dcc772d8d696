#include "lockstep/observe/metrics_logger.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/observe/background_files.h"
#include "lockstep/observe/log_names.h"
#include "lockstep/observe/log_rank.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using internal::BackgroundFiles;
using internal::FileDescriptor;
using Row = std::vector<std::pair<std::string, double>>;
using Names = std::vector<std::string>;

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
  return line + "\n";
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

std::string content_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Replaces the file as a whole, by one that is written beside it.
void replace_log(const std::string& path, const std::string& content) {
  const std::string aside = path + ".new";
  {
    std::ofstream out(aside, std::ios::binary | std::ios::trunc);
    out << content << std::flush;
    if (!out) {
      const int error = errno;
      out.close();
      std::error_code ignored;
      fs::remove(aside, ignored);
      throw std::system_error(error, std::generic_category(),
                              "the log \"" + aside +
                                  "\" cannot be written; make room, or log "
                                  "elsewhere");
    }
  }
  fs::rename(aside, path);
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
    const fs::path folder = fs::path(path).parent_path();
    if (!folder.empty()) fs::create_directories(folder);
    if (!options.overwrite) go_on();
    open(options.overwrite ? O_TRUNC : 0);
  }

  void log(const Row& metrics, int64_t step) {
    const std::lock_guard lock(mutex_);
    if (!csv_) {
      write(json_line(metrics, step));
    } else if (add_columns(metrics)) {
      std::string line = std::to_string(step);
      for (const std::string& column : columns_) {
        const auto cell = std::find_if(
            metrics.begin(), metrics.end(),
            [&](const auto& each) { return each.first == column; });
        line += ",";
        if (cell != metrics.end()) line += text_of(cell->second);
      }
      write(line + "\n");
    }
  }

  void flush() {
    const std::lock_guard lock(mutex_);
    files_->flush();
  }

  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    files_->close();
    warn();
  }

 private:
  void open(int flags) {
    FileDescriptor file(::open(
        path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | flags, 0666));
    if (!file) {
      internal::throw_errno("cannot open the log file \"" + path_ + "\"");
    }
    files_ = std::make_unique<BackgroundFiles>(options_);
    files_->add(std::move(file), path_);
  }

  // Cuts off a part of a row at the end, and learns the columns.
  void go_on() {
    const std::string content = content_of(path_);
    const size_t whole = content.rfind('\n') + 1;  // 0 if there is none
    if (whole < content.size() &&
        ::truncate(path_.c_str(), static_cast<off_t>(whole)) != 0) {
      internal::throw_errno("cannot cut the log file \"" + path_ + "\"");
    }
    if (!csv_ || whole == 0) return;
    columns_ = csv_cells(content.substr(0, content.find('\n')));
    if (columns_.front() != "step") {
      throw std::invalid_argument("MetricsLogger(\"" + path_ +
                                  "\"): the file there begins with the "
                                  "column \"" +
                                  columns_.front() +
                                  "\" and not with \"step\", so it is another "
                                  "table; give another name, "
                                  "or overwrite it");
    }
    columns_.erase(columns_.begin());
    has_header_ = true;
  }

  // Returns false if the file cannot be rewritten, of which it has warned.
  bool add_columns(const Row& metrics) {
    Names added;
    for (const auto& [name, value] : metrics) {
      if (std::find(columns_.begin(), columns_.end(), name) == columns_.end()) {
        added.push_back(name);
      }
    }
    if (added.empty() && has_header_) return true;
    if (closed_)
      throw std::logic_error("this log was closed; log before close()");
    Names columns = columns_;
    columns.insert(columns.end(), added.begin(), added.end());
    try {
      files_->flush();
      rewrite(columns, added.size());
    } catch (const std::system_error& error) {
      TORCH_WARN("lockstep: MetricsLogger: a row with new names is lost: ",
                 error.what());
      return false;
    }
    columns_ = std::move(columns);
    has_header_ = true;
    return true;
  }

  void rewrite(const Names& columns, size_t added) {
    const std::string old = content_of(path_);
    std::string content = csv_header(columns);
    size_t line = old.empty() ? std::string::npos : old.find('\n') + 1;
    while (line < old.size()) {
      const size_t end = old.find('\n', line);
      content.append(old, line, end - line).append(added, ',') += '\n';
      line = end + 1;
    }
    replace_log(path_, content);
    files_->close();
    open(0);
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
  std::mutex mutex_;
  bool closed_ = false;
  bool has_header_ = false;
  Names columns_;  // after "step"
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
  constexpr std::chrono::seconds kYear = std::chrono::hours(24 * 365);
  options.flush_secs = std::min(options.flush_secs, kYear);
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
  if (impl_) impl_->log(metrics, step);
}

void MetricsLogger::flush() {
  if (impl_) impl_->flush();
}

void MetricsLogger::close() {
  if (impl_) impl_->close();
}

}  // namespace lockstep
