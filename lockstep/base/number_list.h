#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// Returns "node 1", "nodes 1 and 3" or "ranks 0, 2 and 4-7": numbers as
// messages write them. Three or more in a row are a run.
template <class Number>
std::string name_numbers(const std::string& kind,
                         const std::vector<Number>& numbers) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < numbers.size();) {
    size_t end = at + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (end - at < 3) end = at + 1;
    parts.push_back(std::to_string(numbers[at]));
    if (end > at + 1) parts.back() += "-" + std::to_string(numbers[end - 1]);
    at = end;
  }
  std::string text = kind + (numbers.size() == 1 ? " " : "s ");
  for (size_t at = 0; at < parts.size(); ++at) {
    if (at > 0) text += at + 1 == parts.size() ? " and " : ", ";
    text += parts[at];
  }
  return text;
}

// Reads what name_numbers() writes after `kind`: returns the numbers, and lets
// `text` begin after them. Of a run of more than a million it reads nothing.
inline std::vector<int> read_numbers(std::string_view& text) {
  constexpr int64_t kLongestRun = 1'000'000;
  const auto skip = [&](std::string_view word) {
    const bool is_there = text.starts_with(word);
    if (is_there) text.remove_prefix(word.size());
    return is_there;
  };
  const auto read = [&](int& number) {
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), number);
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return error == std::errc();
  };
  std::vector<int> numbers;
  for (int first = 0; read(first);) {
    int last = first;
    if (skip("-") && !read(last)) break;
    const int64_t more = int64_t{last} - first;
    for (int64_t i = 0; i <= more && more < kLongestRun; ++i) {
      numbers.push_back(static_cast<int>(first + i));
    }
    if (!skip(", ") && !skip(" and ")) break;
  }
  return numbers;
}

// A text and the ranks that say it.
struct RanksOfText {
  std::string text{};
  std::vector<int> ranks{};
};

// Adds to `all` that `rank` says `text`, each text once.
inline void add_text(std::vector<RanksOfText>& all, int rank,
                     const std::string& text) {
  auto same = std::ranges::find(all, text, &RanksOfText::text);
  if (same == all.end()) same = all.insert(all.end(), {.text = text});
  same->ranks.push_back(rank);
}

// Returns "rank 0: all_reduce #3; ranks 1-7: broadcast #3", with `between` in
// the place of ": ".
inline std::string name_texts(const std::vector<RanksOfText>& all,
                              const std::string& between = ": ") {
  std::string text;
  for (const auto& [said, ranks] : all) {
    text += (text.empty() ? "" : "; ") + name_numbers("rank", ranks) + between +
            said;
  }
  return text;
}

// How an error says of another rank that it has ended: "rank 1 died", "rank 1
// failed: ..." with that rank's own words. The launcher finds by these words
// which ranks an error names (ranks_named_in()).
struct EndingWords {
  static constexpr std::string_view died = "died";
  static constexpr std::string_view left = "has left the group";
  static constexpr std::string_view left_in_error = "left because of an error";
  static constexpr std::string_view failed = "failed:";

  static constexpr std::string_view all[] = {died, left, left_in_error, failed};
};

}  // namespace lockstep::internal
