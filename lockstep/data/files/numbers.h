#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::internal {

enum class Parsed {
  ok,
  not_a_number,
  out_of_range,
};

// Read the decimal number that `text` holds and nothing else, whatever the
// locale; blanks (spaces and tabs) around it and a leading "+" are allowed.
// Write `value` only if the result is Parsed::ok.
//
// A double is the nearest one, as Python's float() gives it; "nan" and "inf"
// are numbers, too. Too small a number becomes 0; too large a one is out of
// range.
Parsed parse_double(std::string_view text, double& value);
Parsed parse_int64(std::string_view text, int64_t& value);

}  // namespace lockstep::internal
