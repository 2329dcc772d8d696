#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// Parses `text` as JSON in which no object has a key twice and nothing is
// nested deeper than `depth`. (Readers differ in which of two equal keys they
// take; a file must not have two meanings.) Throws std::runtime_error.
inline nlohmann::json parse_strict_json(std::string_view text, int depth) {
  using Json = nlohmann::json;
  std::vector<std::set<std::string>> open;
  const auto check = [&](int level, Json::parse_event_t event, Json& parsed) {
    if (level > depth) throw std::runtime_error("it is nested too deeply");
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key &&
        !open.back().insert(parsed.get<std::string>()).second) {
      throw std::runtime_error("key " + parsed.dump() + " occurs twice");
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const Json::exception&) {
    throw std::runtime_error("it is not valid JSON");
  }
}

}  // namespace lockstep::internal
