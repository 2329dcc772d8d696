#include "lockstep/cli/doctor/nodes/node_record.h"

#include <sys/utsname.h>

#include <algorithm>
#include <stdexcept>

#include "lockstep/launch/nodes/node_protocol.h"

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;

constexpr int kRecordFormat = 1;
// A store's value has 60,000 bytes at most.
constexpr size_t kMostTroubles = 40;

std::string text_in(const ordered_json& document, const char* name) {
  const auto& value = document.at(name);
  return value.is_null() ? "" : printable(value.get<std::string>());
}

std::optional<int64_t> count_in(const ordered_json& document,
                                const char* name) {
  const auto& value = document.at(name);
  if (value.is_null()) return std::nullopt;
  return std::max<int64_t>(value.get<int64_t>(), 0);
}

template <class T>
ordered_json value_or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

// Returns a figure of a check; null if there is none.
ordered_json figure(const std::vector<Finding>& findings,
                    const std::string& check, const char* name) {
  for (const auto& finding : findings) {
    if (finding.name == check)
      return finding.values.value(name, ordered_json());
  }
  return nullptr;
}

std::optional<int64_t> number_or_nothing(const ordered_json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  return value.get<int64_t>();
}

std::string text_or_empty(const ordered_json& value) {
  return value.is_string() ? value.get<std::string>() : "";
}

}  // namespace

std::string printable(std::string text, size_t most) {
  if (text.size() > most) text.resize(most);
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text;
}

std::string NodeRecord::text() const {
  ordered_json all_troubles = ordered_json::array();
  for (const auto& trouble : troubles) {
    if (all_troubles.size() == kMostTroubles) break;
    all_troubles.push_back({{"name", printable(trouble.name)},
                            {"fails", trouble.health == Health::fail},
                            {"found", printable(trouble.found)}});
  }
  const ordered_json document{{"format", kRecordFormat},
                              {"id", id},
                              {"host", printable(host)},
                              {"lockstep", lockstep},
                              {"architecture", architecture},
                              {"torch", printable(torch)},
                              {"cpu_capability", printable(cpu_capability)},
                              {"cores", value_or_null(cores)},
                              {"memory_bytes", value_or_null(memory_bytes)},
                              {"gpus", value_or_null(gpus)},
                              {"troubles", std::move(all_troubles)},
                              {"address", address},
                              {"port", port},
                              {"token", token}};
  return document.dump();
}

NodeRecord NodeRecord::parse(const std::string& text) try {
  const auto document = ordered_json::parse(text);
  if (document.at("format") != kRecordFormat) {
    throw std::runtime_error(
        "its record has another format; give all nodes the same Lockstep");
  }
  NodeRecord record{.id = text_in(document, "id"),
                    .host = text_in(document, "host"),
                    .lockstep = text_in(document, "lockstep"),
                    .architecture = text_in(document, "architecture"),
                    .torch = text_in(document, "torch"),
                    .cpu_capability = text_in(document, "cpu_capability"),
                    .cores = count_in(document, "cores"),
                    .memory_bytes = count_in(document, "memory_bytes"),
                    .gpus = count_in(document, "gpus"),
                    .address = text_in(document, "address"),
                    .port = document.at("port").get<uint16_t>(),
                    .token = text_in(document, "token")};
  for (const auto& trouble : document.at("troubles")) {
    if (record.troubles.size() == kMostTroubles) break;
    record.troubles.push_back({.name = text_in(trouble, "name"),
                               .health = trouble.at("fails").get<bool>()
                                             ? Health::fail
                                             : Health::warn,
                               .found = text_in(trouble, "found")});
  }
  return record;
} catch (const nlohmann::json::exception&) {
  throw std::runtime_error("its record in the agents' store is no such record");
}

NodeRecord own_record(const std::vector<Finding>& findings) {
  utsname system{};
  uname(&system);
  NodeRecord record{
      .id = random_id(),
      .host = system.nodename,
      .lockstep = LOCKSTEP_VERSION,
      .architecture = system.machine,
      .torch = text_or_empty(figure(findings, "LibTorch", "version")),
      .cpu_capability =
          text_or_empty(figure(findings, "LibTorch", "cpu_capability")),
      .cores = number_or_nothing(figure(findings, "cores", "usable")),
      .memory_bytes =
          number_or_nothing(figure(findings, "memory", "total_bytes")),
      .gpus = number_or_nothing(figure(findings, "GPUs", "visible"))};
  for (const auto& finding : findings) {
    if (finding.health == Health::ok) continue;
    record.troubles.push_back({finding.name, finding.health, finding.found});
  }
  return record;
}

}  // namespace lockstep::internal
