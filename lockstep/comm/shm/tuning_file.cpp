#include "lockstep/comm/shm/tuning_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>

#include "lockstep/base/environment.h"

namespace lockstep::shm {
namespace {

using nlohmann::json;

constexpr const char* kVariable = "LOCKSTEP_TUNING";
constexpr int64_t kMostRanks = 64;
// A file of 64 tables takes a tenth of this.
constexpr std::streamsize kMostBytes = 1 << 16;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

void require_fields(const json& object, const std::set<std::string>& names,
                    const std::string& what) {
  if (!object.is_object()) refuse(what + " is not an object");
  for (const auto& [name, value] : object.items()) {
    if (!names.contains(name)) {
      refuse(what + " has an unknown field \"" + name + "\"");
    }
  }
  for (const auto& name : names) {
    if (!object.contains(name)) refuse(what + " has no \"" + name + "\"");
  }
}

uint64_t number(const json& object, const char* name, const std::string& what) {
  const auto& value = object.at(name);
  if (!value.is_number_unsigned()) {
    refuse(what + "." + name + " is " + value.dump() +
           "; allowed is a whole number of 0 or more");
  }
  return value.get<uint64_t>();
}

void require_valid(const std::vector<TuningTable>& tables) {
  std::set<int> seen;
  for (const auto& table : tables) {
    const auto what = "the table of " + std::to_string(table.ranks) + " ranks";
    if (table.ranks < 1 || table.ranks > kMostRanks) {
      refuse(what + ": allowed are 1 to " + std::to_string(kMostRanks));
    }
    if (!seen.insert(table.ranks).second) refuse(what + " is there twice");
    try {
      check(table.tuning);
    } catch (const std::invalid_argument& error) {
      refuse(what + ": " + error.what());
    }
  }
}

std::vector<TuningTable> parse(const std::string& text) {
  json file;
  try {
    file = json::parse(text);
  } catch (const json::parse_error& error) {
    refuse("is not valid JSON (at byte " + std::to_string(error.byte) + ")");
  }
  require_fields(file, {"version", "tables"}, "the file");
  if (file["version"] != 1) {
    refuse("version is " + file["version"].dump() + "; allowed is 1");
  }
  if (!file["tables"].is_array()) refuse("\"tables\" is not a list");
  std::vector<TuningTable> tables;
  for (const auto& entry : file["tables"]) {
    const auto what = "tables[" + std::to_string(tables.size()) + "]";
    require_fields(
        entry, {"ranks", "one_shot_bytes", "chunk_bytes", "streaming_bytes"},
        what);
    const auto ranks = number(entry, "ranks", what);
    if (ranks < 1 || ranks > kMostRanks) {
      refuse(what + ".ranks is " + std::to_string(ranks) +
             "; allowed are 1 to " + std::to_string(kMostRanks));
    }
    tables.push_back(
        {.ranks = static_cast<int>(ranks),
         .tuning = {
             .one_shot_bytes = number(entry, "one_shot_bytes", what),
             .chunk_bytes = number(entry, "chunk_bytes", what),
             .streaming_bytes = number(entry, "streaming_bytes", what)}});
  }
  require_valid(tables);
  return tables;
}

}  // namespace

std::vector<TuningTable> read_tuning_file(const std::filesystem::path& path) {
  try {
    std::ifstream in(path, std::ios::binary);
    if (!in) refuse("cannot be read");
    std::string text(kMostBytes + 1, '\0');
    in.read(text.data(), kMostBytes + 1);
    if (in.gcount() > kMostBytes) {
      refuse("is too large; allowed are " + std::to_string(kMostBytes) +
             " bytes");
    }
    text.resize(in.gcount());
    return parse(text);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        "tuning file " + path.string() + ": " + error.what() +
        "; write it again with `lockstep bench --tune`, or remove it (and "
        "unset " +
        kVariable + " if that names it)");
  }
}

void write_tuning_file(const std::filesystem::path& path,
                       const std::vector<TuningTable>& tables) {
  require_valid(tables);
  json file{{"version", 1}, {"tables", json::array()}};
  for (const auto& [ranks, tuning] : tables) {
    file["tables"].push_back({{"ranks", ranks},
                              {"one_shot_bytes", tuning.one_shot_bytes},
                              {"chunk_bytes", tuning.chunk_bytes},
                              {"streaming_bytes", tuning.streaming_bytes}});
  }
  if (path.has_parent_path()) {
    std::filesystem::create_directories(path.parent_path());
  }
  auto aside = path;
  aside += "." + std::to_string(::getpid());
  {
    std::ofstream out(aside, std::ios::binary);
    out << file.dump(1) << '\n';
    out.close();
    if (!out) {
      const std::error_code error(errno, std::generic_category());
      std::error_code ignored;
      std::filesystem::remove(aside, ignored);
      throw std::system_error(error, "writing " + aside.string());
    }
  }
  std::filesystem::rename(aside, path);
}

std::filesystem::path tuning_file_path() {
  if (auto named = get_env(kVariable)) return *named;
  if (auto config = get_env("XDG_CONFIG_HOME")) {
    return std::filesystem::path(*config) / "lockstep" / "tuning.json";
  }
  if (auto home = get_env("HOME")) {
    return std::filesystem::path(*home) / ".config" / "lockstep" /
           "tuning.json";
  }
  return {};
}

Tuning choose_tuning(int ranks) {
  const auto path = tuning_file_path();
  std::error_code ignored;
  if (!get_env(kVariable) &&
      (path.empty() || !std::filesystem::exists(path, ignored))) {
    return default_tuning(ranks);
  }
  const TuningTable* nearest = nullptr;
  const auto tables = read_tuning_file(path);
  auto distance = [&](const TuningTable& table) {
    return 2 * std::abs(table.ranks - ranks) + (table.ranks > ranks ? 1 : 0);
  };
  for (const auto& table : tables) {
    if (nearest == nullptr || distance(table) < distance(*nearest)) {
      nearest = &table;
    }
  }
  return nearest != nullptr ? nearest->tuning : default_tuning(ranks);
}

}  // namespace lockstep::shm
