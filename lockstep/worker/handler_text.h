#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <string_view>

namespace lockstep::internal {

// A text of at most kBytes that a signal handler can build; more is cut off.
template <size_t kBytes>
class HandlerText {
 public:
  void add(std::string_view text) {
    const size_t count = std::min(text.size(), kBytes - size_);
    std::copy_n(text.begin(), count, bytes_.begin() + size_);
    size_ += count;
  }
  template <class Integer>
  void add_number(Integer value, int base = 10) {
    std::array<char, 24> digits;
    const auto end =
        std::to_chars(digits.data(), digits.data() + digits.size(), value, base)
            .ptr;
    add({digits.data(), static_cast<size_t>(end - digits.data())});
  }
  std::string_view view() const { return {bytes_.data(), size_}; }

 private:
  std::array<char, kBytes> bytes_;
  size_t size_ = 0;
};

}  // namespace lockstep::internal
