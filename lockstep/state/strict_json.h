#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace lockstep::internal {

// Parses `text` as JSON in which no object has a key twice and nothing is
// nested deeper than `depth`. (Readers differ in which of two equal keys they
// take; a file must not have two meanings.) Throws std::runtime_error.
//
// The time is that of n log n, for objects of n members: the library's parser
// with a callback looks through an object for each object in it.
nlohmann::json parse_strict_json(std::string_view text, int depth);

}  // namespace lockstep::internal
