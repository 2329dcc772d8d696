#include "lockstep/observe/progress_line.h"

#include <locale.h>
#include <wchar.h>

#include <algorithm>
#include <cstdio>
#include <cwchar>
#include <string_view>
#include <utility>

#include "lockstep/base/shown_text.h"

namespace lockstep::internal {
namespace {

constexpr int kLeastBar = 5;  // columns; a shorter one says nothing

template <class... Values>
std::string print(const char* format, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// Reads the characters of a text in UTF-8 and how many columns of a terminal
// each takes: 2 for Chinese characters or emoji, 0 for combining accents.
class Characters {
 public:
  explicit Characters(const std::string& text)
      : rest_(text), before_(uselocale(utf8())) {}
  ~Characters() { uselocale(before_); }
  Characters(const Characters&) = delete;
  Characters& operator=(const Characters&) = delete;

  bool at_end() const { return rest_.empty(); }

  // Returns the bytes and the columns of the next character. A byte that is not
  // UTF-8 counts as one column.
  std::pair<size_t, int> next() {
    wchar_t character = 0;
    std::mbstate_t state{};
    const size_t bytes =
        std::mbrtowc(&character, rest_.data(), rest_.size(), &state);
    // The results for errors are larger than any size.
    const bool valid = bytes > 0 && bytes <= rest_.size();
    const size_t taken = valid ? bytes : 1;
    rest_.remove_prefix(taken);
    const int columns = valid ? wcwidth(character) : 1;
    return {taken, columns >= 0 ? columns : 1};
  }

 private:
  // The program's own locale may be "C", in which no character is known. If the
  // system lacks this one, newlocale() returns 0, and uselocale() changes
  // nothing.
  static locale_t utf8() {
    static const locale_t locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
    return locale;
  }

  std::string_view rest_;
  locale_t before_;
};

int columns(const std::string& text) {
  int sum = 0;
  for (Characters characters(text); !characters.at_end();) {
    sum += characters.next().second;
  }
  return sum;
}

std::string cut(const std::string& text, int width) {
  size_t bytes = 0;
  for (Characters characters(text); !characters.at_end();) {
    const auto [size, columns] = characters.next();
    width -= columns;
    if (width < 0) break;
    bytes += size;
  }
  return text.substr(0, bytes);
}

std::string times(const ProgressState& state) {
  std::string text = "[" + clock_text(state.elapsed_seconds);
  const bool known = state.rate > 0;
  if (state.total) {
    const auto left = std::max<int64_t>(*state.total - state.count, 0);
    text += "<" + (known ? clock_text(static_cast<double>(left) / state.rate)
                         : std::string("?"));
  }
  // Slow loops have seconds a unit, as in tqdm.
  const bool slow = known && state.rate < 1;
  text += ", " + (known ? short_number(slow ? 1 / state.rate : state.rate)
                        : std::string("?"));
  text += slow ? "s/" + state.unit : state.unit + "/s";
  if (!state.postfix.empty()) text += ", " + state.postfix;
  return text + "]";
}

}  // namespace

std::string short_number(double value) { return print("%.4g", value); }

std::string clock_text(double seconds) {
  // More than a hundred years are as good as any other number.
  const auto whole = static_cast<long long>(std::clamp(seconds, 0.0, 4e9));
  const auto hours = whole / 3600;
  const auto minutes = whole / 60 % 60;
  return hours > 0 ? print("%lld:%02lld:%02lld", hours, minutes, whole % 60)
                   : print("%02lld:%02lld", minutes, whole % 60);
}

std::string progress_line(const ProgressState& given, int width) {
  ProgressState state = given;
  for (auto* text : {&state.description, &state.unit, &state.postfix}) {
    *text = shown_line(*text);
  }
  // The total was wrong; tqdm leaves it out then, too.
  if (state.total && state.count > *state.total) state.total.reset();
  const std::string before =
      state.description.empty() ? "" : state.description + ": ";
  if (!state.total) {
    const std::string line =
        before + std::to_string(state.count) + state.unit + " " + times(state);
    return width > 0 ? cut(line, width) : line;
  }
  const double part =
      *state.total == 0 ? 1.0
                        : std::min(1.0, static_cast<double>(state.count) /
                                            static_cast<double>(*state.total));
  // Rounded down, so that only what is done shows 100 %.
  const std::string left =
      before + print("%3d%%", static_cast<int>(part * 100));
  const std::string right = " " + std::to_string(state.count) + "/" +
                            std::to_string(*state.total) + " " + times(state);
  const int bar = width - columns(left) - columns(right) - 2;
  if (bar < kLeastBar) {
    return width > 0 ? cut(left + right, width) : left + right;
  }
  const auto done = static_cast<size_t>(part * bar);
  return left + "|" + std::string(done, '#') +
         std::string(static_cast<size_t>(bar) - done, '.') + "|" + right;
}

}  // namespace lockstep::internal
