#include "lockstep/cli/text.h"

#include <algorithm>

namespace lockstep::internal {

std::string table_text(const std::vector<std::vector<std::string>>& rows,
                       const std::vector<size_t>& right,
                       const std::string& indent) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line = indent;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - row[i].size(), ' ');
      const bool is_right = std::ranges::find(right, i) != right.end();
      line += (i == 0 ? "" : "  ") + (is_right ? gap + row[i] : row[i] + gap);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace lockstep::internal
