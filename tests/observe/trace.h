#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep::internal::testing {

// A trace that a profiler has written, Lockstep's or Python's.
class Trace {
 public:
  using json = nlohmann::json;

  explicit Trace(const std::string& path) {
    std::ifstream in(path);
    if (!in) throw std::runtime_error("there is no trace " + path);
    json_ = json::parse(in);
  }

  const json& operator[](const char* key) const { return json_.at(key); }
  bool contains(const char* key) const { return json_.contains(key); }

  // The events that have a duration, in the order of their begins.
  std::vector<json> events(const std::string& begin_of_name) const {
    std::vector<json> found;
    for (const auto& event : json_.at("traceEvents")) {
      if (event.value("ph", "") == "X" &&
          event.at("name").get<std::string>().starts_with(begin_of_name)) {
        found.push_back(event);
      }
    }
    std::ranges::stable_sort(found, {}, [](const json& event) {
      return event.at("ts").get<double>();
    });
    return found;
  }

  // How often each name that begins so occurs.
  std::map<std::string, int> counts(const std::string& begin_of_name) const {
    std::map<std::string, int> counted;
    for (const auto& event : events(begin_of_name)) {
      ++counted[event.at("name").get<std::string>()];
    }
    return counted;
  }

  // Nanoseconds since 1970 on the clock of the process that wrote the trace.
  int64_t begin_ns(const json& event) const {
    return json_.at("baseTimeNanoseconds").get<int64_t>() +
           std::llround(event.at("ts").get<double>() * 1e3);
  }
  int64_t end_ns(const json& event) const {
    return begin_ns(event) + std::llround(event.at("dur").get<double>() * 1e3);
  }

 private:
  json json_;
};

}  // namespace lockstep::internal::testing
