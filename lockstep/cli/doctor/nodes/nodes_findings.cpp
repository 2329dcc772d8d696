#include "lockstep/cli/doctor/nodes/nodes_findings.h"

#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <set>
#include <stdexcept>

#include "lockstep/base/shown_text.h"
#include "lockstep/cli/text.h"
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

std::string printable(std::string_view text, size_t most) {
  return shown_line(text.substr(0, most));
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

namespace {

// Within a data centre a round trip takes tens of microseconds, and Ethernet of
// 1 Gbit/s carries 0.117 GB/s.
constexpr int64_t kLongRoundTrip = 2000;
constexpr int64_t kLowBandwidth = 100'000'000;
// How much worse than usual a link may be. The times of a round trip differ
// much between quiet and busy hosts.
constexpr int64_t kTimesRoundTrip = 5;
constexpr int64_t kLeastRoundTrip = 500;
constexpr int64_t kTimesBandwidth = 3;
constexpr int64_t kLargeClockDifference = 100'000;  // as check_clock()

std::string formatted(const char* format, double value) {
  char text[48];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string time_text(int64_t microseconds) {
  const auto us = static_cast<double>(microseconds);
  if (microseconds < 1000) return formatted("%.0f us", us);
  if (microseconds < 1'000'000) return formatted("%.3g ms", us / 1e3);
  return formatted("%.6g s", us / 1e6);
}

std::string rate_text(int64_t bytes_per_second) {
  return formatted("%.3g GB/s", static_cast<double>(bytes_per_second) / 1e9);
}

std::string count_text(int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string node_name(const NodesFound& found, int rank) {
  const auto record = found.records.find(rank);
  return "node " + std::to_string(rank) +
         (record == found.records.end() ? ""
                                        : " (" + record->second.host + ")");
}

const LinkFigures* way(const NodesFound& found, int from, int to) {
  const auto at = found.ways.find({from, to});
  return at == found.ways.end() ? nullptr : &at->second;
}

// Returns what most nodes have; of several such values that of the first node.
// Nodes that do not know it do not count.
std::string most_common(const NodesFound& found,
                        std::string NodeRecord::*member) {
  std::map<std::string, int> counts;
  for (const auto& [rank, record] : found.records) ++counts[record.*member];
  std::string best;
  for (const auto& [rank, record] : found.records) {
    const std::string& value = record.*member;
    if (value.empty()) continue;
    if (best.empty() || counts[value] > counts[best]) best = value;
  }
  return best;
}

// The lead of each node's clock over the first one's, along the links that were
// measured, and by how much that may be wrong.
struct ClockDifference {
  int64_t ahead_us = 0;
  int64_t error_us = 0;
};

std::map<int, ClockDifference> clock_differences(const NodesFound& found) {
  std::map<int, ClockDifference> known;
  if (found.records.empty()) return known;
  std::deque<int> next{found.records.begin()->first};
  known[next.front()] = {};
  while (!next.empty()) {
    const int from = next.front();
    next.pop_front();
    for (const auto& [ends, figures] : found.ways) {
      if (!figures.error.empty()) continue;
      const bool forward = ends.first == from;
      if (!forward && ends.second != from) continue;
      const int to = forward ? ends.second : ends.first;
      if (known.count(to) > 0) continue;
      const int64_t offset = figures.clock_offset_us;
      known[to] = {known[from].ahead_us + (forward ? offset : -offset),
                   known[from].error_us + figures.clock_error_us};
      next.push_back(to);
    }
  }
  return known;
}

class NodeFinding {
 public:
  NodeFinding(const NodesFound& found, int rank)
      : found_(found),
        rank_(rank),
        finding_{.name = "node " + std::to_string(rank)} {}

  Finding absent() {
    finding_.found = "absent";
    finding_.fail(
        "It did not come in time. Start lockstep doctor there, too, with the "
        "same --nnodes, --rdzv-endpoint and secret; a host that cannot reach "
        "the endpoint, or has another secret, says so itself.");
    return finding_;
  }

  Finding present(const std::optional<ClockDifference>& clock) {
    const NodeRecord& record = found_.records.at(rank_);
    finding_.found = record.host + ": " + record.architecture;
    if (record.cores)
      finding_.found += ", " + count_text(*record.cores, "core");
    if (record.memory_bytes) {
      finding_.found += ", " + size_text(*record.memory_bytes);
    }
    if (record.gpus && *record.gpus > 0) {
      finding_.found += ", " + count_text(*record.gpus, "GPU");
    }
    finding_.found += ", Lockstep " + record.lockstep;
    if (!record.torch.empty()) finding_.found += ", LibTorch " + record.torch;
    finding_.values = {{"host", record.host},
                       {"architecture", record.architecture},
                       {"lockstep", record.lockstep},
                       {"torch", or_null(record.torch)},
                       {"cpu_capability", or_null(record.cpu_capability)},
                       {"clock_ahead_us", nullptr}};
    compare("architecture", "processors", &NodeRecord::architecture,
            Health::fail,
            "A program that was built for one does not run on the other.");
    compare("Lockstep", "versions of Lockstep", &NodeRecord::lockstep,
            Health::fail, "Install the same on all hosts.");
    compare("LibTorch", "versions of LibTorch", &NodeRecord::torch,
            Health::fail, "Install the same on all hosts.");
    compare("CPU capability", "instruction sets", &NodeRecord::cpu_capability,
            Health::warn,
            "Ranks compute with other rounding there, and the slowest sets the "
            "pace. To round alike, set ATEN_CPU_CAPABILITY on all hosts to the "
            "lesser one.");
    add_troubles(record);
    if (clock) add_clock(*clock);
    return finding_;
  }

 private:
  static nlohmann::ordered_json or_null(const std::string& text) {
    return text.empty() ? nlohmann::ordered_json(nullptr)
                        : nlohmann::ordered_json(text);
  }

  void compare(const std::string& what, const std::string& plural,
               std::string NodeRecord::*member, Health health,
               const std::string& remedy) {
    const std::string usual = most_common(found_, member);
    const std::string& own = found_.records.at(rank_).*member;
    if (own.empty() || own == usual) return;
    finding_.advise(health, "The nodes have different " + plural + ": " + what +
                                " " + own + " here, " + usual + " elsewhere. " +
                                remedy);
  }

  void add_troubles(const NodeRecord& record) {
    for (const Health health : {Health::fail, Health::warn}) {
      std::string names;
      for (const auto& trouble : record.troubles) {
        if (trouble.health != health) continue;
        names += (names.empty() ? "" : ", ") + trouble.name;
        if (health == Health::fail) names += " (" + trouble.found + ")";
      }
      if (names.empty()) continue;
      finding_.advise(health, std::string("Its own checks ") +
                                  (health == Health::fail ? "fail" : "warn") +
                                  ": " + names +
                                  ". Its screen says what to do.");
    }
  }

  void add_clock(const ClockDifference& clock) {
    finding_.values["clock_ahead_us"] = clock.ahead_us;
    if (std::abs(clock.ahead_us) - clock.error_us <= kLargeClockDifference) {
      return;
    }
    finding_.warn("Its clock is " + time_text(std::abs(clock.ahead_us)) +
                  (clock.ahead_us > 0 ? " ahead of" : " behind") + " that of " +
                  node_name(found_, found_.records.begin()->first) +
                  ", so that times in logs cannot be compared. Run chrony or "
                  "systemd-timesyncd on both.");
  }

  const NodesFound& found_;
  int rank_;
  Finding finding_;
};

// The figure that the best quarter of the ways reaches.
struct Usual {
  int64_t round_trip_us = 0;
  int64_t bytes_per_second = 0;
};

Usual usual_of(const NodesFound& found) {
  std::vector<int64_t> trips;
  std::vector<int64_t> rates;
  for (const auto& [ends, figures] : found.ways) {
    if (!figures.error.empty()) continue;
    trips.push_back(figures.round_trip_us);
    rates.push_back(figures.bytes_per_second);
  }
  if (trips.empty()) return {};
  std::ranges::sort(trips);
  std::ranges::sort(rates, std::greater<>());
  const size_t quarter = (trips.size() - 1) / 4;
  return {trips[quarter], rates[quarter]};
}

class LinkFinding {
 public:
  LinkFinding(const NodesFound& found, const Usual& usual,
              const std::pair<int, int>& ends)
      : found_(found),
        usual_(usual),
        ends_(ends),
        finding_{.name = "link " + std::to_string(ends.first) + "-" +
                         std::to_string(ends.second)} {}

  Finding get() {
    const auto [one, other] = ends_;
    finding_.found =
        node_name(found_, one) + " and " + node_name(found_, other);
    const LinkFigures* const there = way(found_, one, other);
    const LinkFigures* const back = way(found_, other, one);
    add_values("there", there);
    add_values("back", back);
    check_reach(there, back);
    if (there != nullptr && there->error.empty()) check_way(one, other, *there);
    if (back != nullptr && back->error.empty()) check_way(other, one, *back);
    check_mtu(there, back);
    return finding_;
  }

 private:
  void add_values(const char* name, const LinkFigures* figures) {
    finding_.values[name] = nullptr;
    if (figures != nullptr) finding_.values[name] = figures->json();
  }

  // Returns "node 0 (a) does not reach node 1 (b): Connection refused".
  std::string trouble(int from, int to, const LinkFigures* figures) const {
    if (figures == nullptr) {
      return node_name(found_, from) +
             " has not told what it found on the way "
             "to " +
             node_name(found_, to);
    }
    return node_name(found_, from) + " does not reach " +
           node_name(found_, to) + ": " + figures->error;
  }

  void check_reach(const LinkFigures* there, const LinkFigures* back) {
    const bool reached = there != nullptr && there->error.empty();
    const bool returns = back != nullptr && back->error.empty();
    if (reached && returns) return;
    const auto [one, other] = ends_;
    finding_.found.clear();
    if (!reached) finding_.found = trouble(one, other, there);
    if (!returns) {
      finding_.found += (reached ? "" : "; ") + trouble(other, one, back);
    } else {
      finding_.found += "; the other way is open";
    }
    if (reached) finding_.found += "; the other way is open";
    finding_.fail(
        "Ranks connect in both directions, to ports that the system chooses. "
        "Let all TCP ports through between the two hosts (firewall, security "
        "group, network policy), and look at the route from each to the other "
        "(ip route get ADDRESS).");
  }

  void check_way(int from, int to, const LinkFigures& figures) {
    const std::string name =
        "From " + node_name(found_, from) + " to " + node_name(found_, to);
    if (figures.bytes_per_second == 0) {
      finding_.fail(name +
                    " single bytes go through and large packets do not. Their "
                    "interfaces, or something between them, may have different "
                    "MTUs: compare ip link on both, and try ping -M do -s 1472 "
                    "ADDRESS.");
      return;
    }
    const int64_t trip = figures.round_trip_us;
    if (trip > kLongRoundTrip ||
        trip >
            std::max(kTimesRoundTrip * usual_.round_trip_us, kLeastRoundTrip)) {
      finding_.warn(name + " a round trip takes " + time_text(trip) + "; " +
                    usual(time_text(usual_.round_trip_us),
                          usual_.round_trip_us > kLongRoundTrip,
                          "less than 0.5 ms within a data centre") +
                    ". Ranks wait that long in every collective between hosts: "
                    "place the hosts nearer to each other, and look for a busy "
                    "host or a saving of power on its network card.");
    }
    const int64_t rate = figures.bytes_per_second;
    if (rate < kLowBandwidth ||
        rate * kTimesBandwidth < usual_.bytes_per_second) {
      finding_.warn(name + " one connection carries " + rate_text(rate) + "; " +
                    usual(rate_text(usual_.bytes_per_second),
                          usual_.bytes_per_second < kLowBandwidth,
                          "more than 0.1 GB/s for training on several hosts") +
                    ". Look at the speed of both network cards (ethtool), at "
                    "what else they carry, and whether the traffic takes the "
                    "right interface (GLOO_SOCKET_IFNAME, --local-addr).");
    }
  }

  // Returns "usual here are 2 GB/s", or what is usual elsewhere if all links
  // are bad.
  static std::string usual(const std::string& here, bool all_bad,
                           const std::string& elsewhere) {
    return "usual is " + (all_bad ? elsewhere : here + " between these nodes");
  }

  void check_mtu(const LinkFigures* there, const LinkFigures* back) {
    if (there == nullptr || back == nullptr || !there->mtu || !back->mtu ||
        *there->mtu == *back->mtu) {
      return;
    }
    finding_.warn("The largest packets (MTU) are " +
                  std::to_string(*there->mtu) + " B from " +
                  node_name(found_, ends_.first) + " and " +
                  std::to_string(*back->mtu) + " B from " +
                  node_name(found_, ends_.second) +
                  ". Give both interfaces the same (ip link set dev NAME mtu "
                  "NUMBER): connections may hang otherwise.");
  }

  const NodesFound& found_;
  const Usual& usual_;
  std::pair<int, int> ends_;
  Finding finding_;
};

}  // namespace

std::vector<Finding> nodes_findings(const NodesFound& found) {
  std::vector<Finding> findings;
  const auto clocks = clock_differences(found);
  for (int rank = 0; rank < found.nodes; ++rank) {
    NodeFinding node(found, rank);
    if (found.records.count(rank) == 0) {
      findings.push_back(node.absent());
      continue;
    }
    const auto clock = clocks.find(rank);
    findings.push_back(node.present(
        clock == clocks.end() ? std::nullopt : std::optional(clock->second)));
  }
  const Usual usual = usual_of(found);
  Finding all{.name = "links"};
  int64_t well = 0;
  for (const auto& ends : found.links) {
    Finding link = LinkFinding(found, usual, ends).get();
    all.values[link.name] = link.values;
    if (link.health == Health::ok) {
      ++well;
    } else {
      findings.push_back(std::move(link));
    }
  }
  if (well > 0) {
    all.found = std::to_string(well) + " of " +
                count_text(std::ssize(found.links), "link") +
                (well == 1 ? " is" : " are") + " well; usual are " +
                time_text(usual.round_trip_us) + " for a round trip and " +
                rate_text(usual.bytes_per_second) + " for one connection";
    findings.push_back(std::move(all));
  }
  return findings;
}

Finding nodes_verdict(const NodesFound& found,
                      const std::vector<Finding>& findings) {
  Finding verdict{.name = "nodes", .health = worst_of(findings)};
  const std::string all = count_text(found.nodes, "node") + " and " +
                          count_text(std::ssize(found.links), "link");
  if (verdict.health == Health::ok) {
    verdict.found = all + ": all are well";
    return verdict;
  }
  constexpr int kMostNames = 16;
  verdict.found = all;
  for (const Health health : {Health::fail, Health::warn}) {
    int count = 0;
    for (const auto& finding : findings) {
      if (finding.health != health) continue;
      if (++count > kMostNames) continue;
      verdict.found += count > 1                ? ", "
                       : health == Health::fail ? "; fail: "
                                                : "; warn: ";
      verdict.found += finding.name;
    }
    if (count > kMostNames) {
      verdict.found += " and " + std::to_string(count - kMostNames) + " more";
    }
  }
  const int shown_by = found.records.empty() ? 0 : found.records.begin()->first;
  verdict.advice = node_name(found, shown_by) + " shows what was found.";
  verdict.advice.front() = 'N';
  return verdict;
}

}  // namespace lockstep::internal
