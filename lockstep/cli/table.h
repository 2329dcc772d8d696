#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::internal {

// Returns the table of `rows`, whose first is the header, as lines of text with
// columns of equal width, two blanks between them, and none at the end of a
// line. Every row has as many cells as the header. Columns in `right` are
// aligned to the right. Each line begins with `indent`.
std::string table_text(const std::vector<std::vector<std::string>>& rows,
                       const std::vector<size_t>& right = {},
                       const std::string& indent = "");

}  // namespace lockstep::internal
