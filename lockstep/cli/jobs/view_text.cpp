#include "lockstep/cli/jobs/view_text.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/base/shown_text.h"
#include "lockstep/cli/text.h"

namespace lockstep::internal {
namespace {

using Look = ViewLine::Look;

std::string rate_text(const std::optional<double>& rate) {
  if (!rate) return "-";
  return format(*rate < 100 ? "%.1f" : "%.0f", *rate);
}

std::string percent_text(const std::optional<double>& share) {
  return share ? format("%.0f %%", 100 * *share) : "-";
}

std::string bytes_text(const std::optional<int64_t>& bytes) {
  return bytes ? size_text(*bytes) : "-";
}

template <class T>
std::optional<double> as_number(const std::optional<T>& value) {
  if (!value) return std::nullopt;
  return static_cast<double>(*value);
}

Look look_of(const WorkerView& worker) {
  if (worker.worker.exit_code.value_or(0) != 0) return Look::trouble;
  const bool is_well = worker.state == "running" || worker.state == "done";
  return is_well ? Look::plain : Look::notice;
}

struct Column {
  const char* title;
  int importance;  // those with the highest numbers are left out first
  bool is_right;
  bool is_of_gpu;  // shown only if a rank computes on GPUs
  std::string (*text)(const WorkerView&);
  std::optional<double> (*key)(const WorkerView&);  // to sort by
};

using Worker = WorkerView;
using Key = std::optional<double>;
constexpr std::array kColumns{
    Column{"rank", 1, true, false,
           [](const Worker& w) {
             return w.worker.rank < 0 ? "-" : std::to_string(w.worker.rank);
           },
           [](const Worker& w) { return Key(-w.worker.rank); }},
    Column{"pid", 14, true, false,
           [](const Worker& w) { return std::to_string(w.worker.pid); },
           [](const Worker& w) { return Key(w.worker.pid); }},
    Column{"state", 3, false, false, [](const Worker& w) { return w.state; },
           [](const Worker& w) { return Key(static_cast<int>(look_of(w))); }},
    Column{"steps", 5, true, false,
           [](const Worker& w) {
             return w.steps ? std::to_string(*w.steps) : "-";
           },
           [](const Worker& w) { return as_number(w.steps); }},
    Column{"steps/s", 4, true, false,
           [](const Worker& w) { return rate_text(w.steps_per_second); },
           [](const Worker& w) { return w.steps_per_second; }},
    Column{"samples/s", 7, true, false,
           [](const Worker& w) { return rate_text(w.samples_per_second); },
           [](const Worker& w) { return w.samples_per_second; }},
    Column{"comm", 6, true, false,
           [](const Worker& w) { return percent_text(w.comm_share); },
           [](const Worker& w) { return w.comm_share; }},
    Column{"CPU", 10, true, false,
           [](const Worker& w) { return percent_text(w.cpu_share); },
           [](const Worker& w) { return w.cpu_share; }},
    Column{"memory", 8, true, false,
           [](const Worker& w) { return bytes_text(w.resident_bytes); },
           [](const Worker& w) { return as_number(w.resident_bytes); }},
    Column{"GPU", 9, true, true,
           [](const Worker& w) { return percent_text(w.gpu_share); },
           [](const Worker& w) { return w.gpu_share; }},
    Column{"GPU memory", 11, true, true,
           [](const Worker& w) { return bytes_text(w.gpu_memory_bytes); },
           [](const Worker& w) { return as_number(w.gpu_memory_bytes); }},
    Column{"power", 13, true, true,
           [](const Worker& w) {
             return w.gpu_watts ? format("%.0f W", *w.gpu_watts) : "-";
           },
           [](const Worker& w) { return w.gpu_watts; }},
    Column{"snapshot", 12, true, false,
           [](const Worker& w) {
             return w.snapshot_seconds
                        ? duration_text(*w.snapshot_seconds) + " ago"
                        : "-";
           },
           [](const Worker& w) { return w.snapshot_seconds; }},
    Column{"under way", 2, false, false,
           [](const Worker& w) {
             std::string text = w.operation;
             if (w.operation_seconds) {
               text += format(", %.1f s", *w.operation_seconds);
             }
             return text.empty() ? "-" : text;
           },
           [](const Worker& w) { return w.operation_seconds; }}};
// They are never left out.
constexpr int kMostImportant = 2;

bool is_shown(const Column& column, const JobView& view) {
  return !column.is_of_gpu ||
         std::ranges::any_of(view.workers, [](const auto& worker) {
           return worker.gpus.has_value();
         });
}

// Returns the places of the workers in the order of the layout. Those of which
// the figure is not known are last.
std::vector<size_t> order_of(const JobView& view, const TableLayout& layout) {
  std::vector<size_t> order(view.workers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto* column = std::ranges::find_if(kColumns, [&](const Column& each) {
    return layout.sorted_by == each.title;
  });
  if (column == kColumns.end()) column = kColumns.begin();
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    const auto first = column->key(view.workers[a]);
    const auto second = column->key(view.workers[b]);
    if (!first || !second) return first.has_value() && !second.has_value();
    return layout.is_reversed ? *first < *second : *first > *second;
  });
  return order;
}

// Returns which columns fit.
std::vector<bool> fitting(const JobView& view,
                          const std::vector<size_t>& widths,
                          size_t most_characters) {
  std::vector<bool> fits(kColumns.size());
  std::vector<size_t> by_importance(kColumns.size());
  std::iota(by_importance.begin(), by_importance.end(), size_t{0});
  std::ranges::sort(by_importance, {},
                    [](size_t i) { return kColumns[i].importance; });
  size_t used = 0;
  for (const size_t i : by_importance) {
    if (!is_shown(kColumns[i], view)) continue;
    const size_t more = widths[i] + (used == 0 ? 0 : 2);
    if (kColumns[i].importance > kMostImportant &&
        (more > most_characters || used > most_characters - more)) {
      break;
    }
    fits[i] = true;
    used += more;
  }
  return fits;
}

// Returns what the workers of this node do together; nothing for one alone.
std::string total_text(const JobView& view) {
  if (view.workers.size() < 2) return {};
  std::optional<double> samples;
  std::optional<double> cpu;
  std::optional<int64_t> bytes;
  const auto add = [](auto& sum, const auto& value) {
    if (value) sum = sum.value_or(0) + *value;
  };
  for (const WorkerView& worker : view.workers) {
    add(samples, worker.samples_per_second);
    add(cpu, worker.cpu_share);
    add(bytes, worker.resident_bytes);
  }
  std::string text;
  const auto name = [&](bool known, const std::string& figure) {
    if (known) text += (text.empty() ? "together: " : ", ") + figure;
  };
  name(samples.has_value(), rate_text(samples) + " samples/s");
  name(cpu.has_value(), percent_text(cpu) + " CPU");
  name(bytes.has_value(), bytes_text(bytes));
  return text;
}

}  // namespace

std::string duration_text(double seconds) {
  const auto whole = static_cast<long>(seconds);
  return format("%02ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string program_text(const std::vector<std::string>& arguments) {
  std::string text = shown_line(joined(arguments));
  constexpr size_t kLongest = 100;
  if (text.size() > kLongest) text = text.substr(0, kLongest - 3) + "...";
  return text;
}

std::string running_text(const JobStatus& job) {
  const auto running = std::ranges::count_if(
      job.workers, [](const auto& worker) { return !worker.exit_code; });
  return std::to_string(running) + " of " + std::to_string(job.workers.size());
}

std::vector<ViewLine> head_lines(const JobView& view) {
  const JobStatus& job = view.status;
  std::string state =
      std::string(name_of(job.state)) + " for " +
      duration_text(view.running_seconds) + "; restart " +
      std::to_string(job.restart) + " of " + std::to_string(job.max_restarts) +
      (job.healings > 0
           ? ", " + std::to_string(job.healings) + " of them healings; "
           : "; ") +
      running_text(job) + " workers run";
  if (job.standby > 0)
    state += ", " + std::to_string(job.standby) + " stand by";
  if (job.nnodes > 1) {
    state += " on this node, which is " + std::to_string(job.node_rank) +
             " of " + std::to_string(job.nnodes);
  }
  std::vector<ViewLine> lines{
      {"job " + job.run_id + ": " + program_text(job.program)},
      {std::move(state)}};
  if (std::string total = total_text(view); !total.empty()) {
    lines.push_back({std::move(total)});
  }
  lines.push_back({});
  return lines;
}

WorkerTable worker_table(const JobView& view, const TableLayout& layout,
                         std::vector<size_t>& widths) {
  widths.resize(kColumns.size());
  for (size_t i = 0; i < kColumns.size(); ++i) {
    widths[i] = std::max(widths[i], std::string_view(kColumns[i].title).size());
  }
  std::vector<std::vector<std::string>> cells;
  for (const WorkerView& worker : view.workers) {
    auto& row = cells.emplace_back();
    for (size_t i = 0; i < kColumns.size(); ++i) {
      row.push_back(shown_line(kColumns[i].text(worker)));
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  const auto fits = fitting(view, widths, layout.most_characters);
  std::vector<std::vector<std::string>> rows(1);
  std::vector<Look> looks{Look::title};
  std::vector<size_t> right;
  WorkerTable table;
  for (size_t i = 0; i < kColumns.size(); ++i) {
    const Column& column = kColumns[i];
    if (!fits[i]) {
      if (is_shown(column, view)) table.left_out.emplace_back(column.title);
      continue;
    }
    // The title is as wide as the column was.
    std::string title = column.title;
    title.insert(column.is_right ? 0 : title.size(), widths[i] - title.size(),
                 ' ');
    if (column.is_right) right.push_back(rows[0].size());
    rows[0].push_back(std::move(title));
  }
  const auto order = order_of(view, layout);
  const size_t first = std::min(layout.first_worker, order.size());
  const size_t last =
      first + std::min(layout.most_workers, order.size() - first);
  for (size_t place = first; place < last; ++place) {
    const WorkerView& worker = view.workers[order[place]];
    auto& row = rows.emplace_back();
    for (size_t i = 0; i < kColumns.size(); ++i) {
      if (fits[i]) row.push_back(std::move(cells[order[place]][i]));
    }
    const bool awaited = view.slowest_rank == worker.worker.rank;
    looks.push_back(
        std::max(look_of(worker), awaited ? Look::notice : Look::plain));
  }
  const std::string text = table_text(rows, right);
  size_t begin = 0;
  for (const Look look : looks) {
    const size_t end = text.find('\n', begin);
    table.lines.push_back({text.substr(begin, end - begin), look});
    begin = end + 1;
  }
  return table;
}

std::vector<ViewLine> tail_lines(const JobView& view) {
  std::vector<ViewLine> lines;
  if (view.slowest_rank) {
    lines.push_back({});
    lines.push_back({"The other ranks wait for rank " +
                         std::to_string(*view.slowest_rank) + ".",
                     Look::notice});
  }
  for (const WorkerView& worker : view.workers) {
    if (worker.progress.empty()) continue;
    lines.push_back({});
    lines.push_back({worker.progress});
  }
  return lines;
}

std::vector<std::string> column_titles(const JobView& view) {
  std::vector<std::string> titles;
  for (const Column& column : kColumns) {
    if (is_shown(column, view)) titles.emplace_back(column.title);
  }
  return titles;
}

std::string view_text(const JobView& view, bool coloured) {
  std::vector<size_t> widths;
  std::string text;
  for (const auto& part :
       {head_lines(view), worker_table(view, {}, widths).lines,
        tail_lines(view)}) {
    for (const ViewLine& line : part) text += line_text(line, coloured) + "\n";
  }
  return text;
}

bool stdout_has_colours() {
  const char* no_colour = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 &&
         (no_colour == nullptr || *no_colour == '\0') && terminal != nullptr &&
         std::string_view(terminal) != "dumb";
}

std::string line_text(const ViewLine& line, bool coloured) {
  // Bold, yellow, red (ECMA-48, "Select graphic rendition").
  constexpr std::array kSequences{"", "\033[1m", "\033[33m", "\033[31m"};
  const char* sequence = kSequences[static_cast<size_t>(line.look)];
  const std::string text = shown_line(line.text);
  if (!coloured || *sequence == '\0') return text;
  return sequence + text + "\033[0m";
}

}  // namespace lockstep::internal
