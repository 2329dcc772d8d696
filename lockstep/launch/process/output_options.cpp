#include "lockstep/launch/process/output_options.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

constexpr int kHighestRank = 4095;

// Returns the items without the white space around them.
std::vector<std::string> split_at_commas(std::string_view text) {
  std::vector<std::string> items;
  while (true) {
    const size_t comma = text.find(',');
    items.push_back(stripped(text.substr(0, comma)));
    if (comma == std::string_view::npos) return items;
    text.remove_prefix(comma + 1);
  }
}

std::optional<Streams> stream_set(std::string_view text) {
  if (text.size() != 1 || text[0] < '0' || text[0] > '3') return std::nullopt;
  return static_cast<Streams>(text[0] - '0');
}

void replace_all(std::string& text, std::string_view what,
                 std::string_view with) {
  for (size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + with.size())) {
    text.replace(at, what.size(), with);
  }
}

}  // namespace

StreamSelection StreamSelection::parse(std::string_view option,
                                       std::string_view text) {
  StreamSelection selection;
  if (auto all = stream_set(stripped(text))) {
    selection.everywhere_ = *all;
    return selection;
  }
  for (const std::string& item : split_at_commas(text)) {
    const size_t colon = item.find(':');
    const auto streams = colon == std::string::npos
                             ? std::nullopt
                             : stream_set(stripped(item.substr(colon + 1)));
    if (!streams) {
      throw std::invalid_argument(
          std::string(option) + " is \"" + std::string(text) +
          "\"; allowed is 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or "
          "such a number for some local ranks: 0:3,1:2");
    }
    const int rank = static_cast<int>(
        parse_int(option, stripped(item.substr(0, colon)), 0, kHighestRank));
    selection.by_rank_[rank] = *streams;
  }
  return selection;
}

Streams StreamSelection::of(int local_rank) const {
  const auto found = by_rank_.find(local_rank);
  return found != by_rank_.end() ? found->second : everywhere_;
}

bool StreamSelection::empty() const {
  return everywhere_ == Streams::none &&
         std::all_of(by_rank_.begin(), by_rank_.end(), [](const auto& entry) {
           return entry.second == Streams::none;
         });
}

int StreamSelection::highest_rank() const {
  return by_rank_.empty() ? -1 : by_rank_.rbegin()->first;
}

std::set<int> parse_local_ranks(std::string_view option,
                                std::string_view text) {
  std::set<int> ranks;
  for (const std::string& item : split_at_commas(text)) {
    ranks.insert(static_cast<int>(parse_int(option, item, 0, kHighestRank)));
  }
  return ranks;
}

std::vector<std::string> parse_line_filters(std::string_view option,
                                            std::string_view text) {
  std::vector<std::string> filters;
  if (text.empty()) return filters;
  filters.emplace_back();
  for (size_t at = 0; at < text.size(); ++at) {
    const bool comma = text[at] == ',';
    const bool doubled = comma && text.substr(at + 1).starts_with(',');
    if (comma && !doubled) {
      filters.emplace_back();
    } else {
      filters.back() += text[at];
    }
    if (doubled) ++at;
  }
  if (std::ranges::count(filters, "") > 0) {
    throw std::invalid_argument(
        std::string(option) + " is \"" + std::string(text) +
        "\", in which a text is empty, so that every line would match; allowed "
        "are texts separated by commas, with ,, for a comma in a text");
  }
  return filters;
}

std::string line_prefix(const OutputOptions& options, std::string_view role,
                        int local_rank, int rank) {
  std::string prefix = options.prefix_template;
  replace_all(prefix, "${local_rank}", std::to_string(local_rank));
  replace_all(prefix, "${rank}", std::to_string(rank));
  replace_all(prefix, "${role_name}", role);
  return prefix;
}

}  // namespace lockstep::internal
