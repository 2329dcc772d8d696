#include "lockstep/base/system_file.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

// More processors or nodes than any host has: what is larger is not a list.
constexpr int kHighest = 1 << 16;

// Reads a number at the beginning of `text` and removes it.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t number = 0;
  const auto [rest, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(rest - text.data()));
  return number;
}

}  // namespace

std::optional<std::string> first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::optional<std::string> field_of(const fs::path& path,
                                    const std::string& key, char separator) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key + separator)) continue;
    const size_t begin = line.find_first_not_of(" \t", key.size() + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return std::nullopt;
}

std::optional<int64_t> number_in(const fs::path& path) {
  const auto line = first_line(path);
  if (!line) return std::nullopt;
  std::string_view text = *line;
  return take_number(text);
}

std::optional<int64_t> memory_field(const std::string& key,
                                    const std::filesystem::path& path) {
  const auto text = field_of(path, key);
  int64_t kilobytes = 0;
  if (!text ||
      std::from_chars(text->data(), text->data() + text->size(), kilobytes)
              .ec != std::errc()) {
    return std::nullopt;
  }
  return kilobytes * 1024;
}

std::optional<std::string> chosen_word(const fs::path& path) {
  const std::string line = first_line(path).value_or("");
  const size_t begin = line.find('[');
  const size_t end = line.find(']', begin == line.npos ? 0 : begin);
  if (begin == line.npos || end == line.npos) return std::nullopt;
  return line.substr(begin + 1, end - begin - 1);
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (fs::directory_iterator at(folder, ignored), end; at != end;
       at.increment(ignored)) {
    names.push_back(at->path().filename());
  }
  std::ranges::sort(names);
  return names;
}

std::vector<int> numbers_of(const std::string& list) {
  std::vector<int> numbers;
  std::string_view rest = list;
  while (!rest.empty()) {
    const auto first = take_number(rest);
    auto last = first;
    if (rest.starts_with('-')) {
      rest.remove_prefix(1);
      last = take_number(rest);
    }
    if (!first || !last || *first < 0 || *last > kHighest) return {};
    for (auto number = *first; number <= *last; ++number) {
      numbers.push_back(static_cast<int>(number));
    }
    if (!rest.empty() && !rest.starts_with(',')) return {};
    if (!rest.empty()) rest.remove_prefix(1);
  }
  return numbers;
}

std::optional<ProcessUsage> usage_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  // The program's name is in parentheses and may hold anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessUsage usage;
  fields >> usage.state;
  // The next field is the 4th of proc(5); utime is the 14th.
  std::string skipped;
  for (int field = 4; field < 14; ++field) fields >> skipped;
  int64_t user = 0;
  int64_t system = 0;
  fields >> user >> system;
  for (int field = 16; field < 24; ++field) fields >> skipped;
  int64_t pages = 0;
  fields >> pages;
  if (!fields) return std::nullopt;
  usage.cpu_ns = (user + system) * (1'000'000'000 / sysconf(_SC_CLK_TCK));
  usage.resident_bytes = pages * sysconf(_SC_PAGESIZE);
  return usage;
}

}  // namespace lockstep::internal
