#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/cli/jobs/job_view.h"

// Turns the view of a job into lines for a terminal.
namespace lockstep::internal {

struct ViewLine {
  enum class Look { plain, title, notice, trouble };
  std::string text{};  // without a newline
  Look look = Look::plain;
};

// Which part of the table of workers is shown, and in which order.
struct TableLayout {
  // The most characters of a line. The least important columns are left out
  // until the others fit, but never the rank and what is under way.
  size_t most_characters = SIZE_MAX;
  // Workers before the first and after the last are left out.
  size_t first_worker = 0;
  size_t most_workers = SIZE_MAX;
  // The title of the column by which workers are sorted. If it is empty, they
  // are sorted by rank. The lowest rank comes first; of every other column the
  // highest, longest or worst value does.
  std::string sorted_by{};
  bool is_reversed = false;
};

struct WorkerTable {
  std::vector<ViewLine> lines{};        // the first is that of the titles
  std::vector<std::string> left_out{};  // the titles of these columns
};

// Returns the lines before the table: the job, its state, and the sums over its
// workers.
std::vector<ViewLine> head_lines(const JobView& view);
// `widths` has the widths of the columns of the last table, or nothing if this
// is the first one. It is changed; columns only become wider, so that a table
// which is shown again and again does not jump.
WorkerTable worker_table(const JobView& view, const TableLayout& layout,
                         std::vector<size_t>& widths);
// Returns the lines after the table: the rank that the others wait for, and
// progress bars. Each part begins with an empty line.
std::vector<ViewLine> tail_lines(const JobView& view);
// The titles of the columns by which the view can be sorted, from left to
// right.
std::vector<std::string> column_titles(const JobView& view);

// Returns all of the view, with a newline after each line.
std::string view_text(const JobView& view, bool coloured);

// Returns whether standard output is a terminal that has colours, and NO_COLOR
// (no-color.org) is not set.
bool stdout_has_colours();
// Returns the line with the sequences for its look, or only its text, which
// shown_line() has made safe.
std::string line_text(const ViewLine& line, bool coloured);

// "00:12:04".
std::string duration_text(double seconds);
// Returns a command line, cut at 100 characters.
std::string program_text(const std::vector<std::string>& arguments);
// "2 of 3": how many of the workers run.
std::string running_text(const JobStatus& job);

}  // namespace lockstep::internal
