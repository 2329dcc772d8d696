#include "lockstep/cli/doctor/nccl_interface.h"

#include <algorithm>
#include <sstream>

namespace lockstep::internal {
namespace {

// Returns the interfaces that one pattern of NCCL_SOCKET_IFNAME selects.
std::vector<std::string> selected(
    const std::vector<NetworkInterface>& interfaces, std::string pattern) {
  const bool leave_out = pattern.starts_with('^');
  if (leave_out) pattern.erase(0, 1);
  const bool whole = pattern.starts_with('=');
  if (whole) pattern.erase(0, 1);
  std::vector<std::string> words;
  std::istringstream list(pattern);
  for (std::string word; std::getline(list, word, ',');) words.push_back(word);
  std::vector<std::string> names;
  for (const auto& one : interfaces) {
    if (!one.up || one.addresses.empty()) continue;
    const bool named = std::ranges::any_of(words, [&](const auto& word) {
      return whole ? one.name == word : one.name.starts_with(word);
    });
    if (named != leave_out) names.push_back(one.name);
  }
  return names;
}

}  // namespace

std::vector<std::string> nccl_interfaces(
    const std::vector<NetworkInterface>& interfaces,
    const std::optional<std::string>& wanted) {
  if (wanted) return selected(interfaces, *wanted);
  for (const char* pattern : {"ib", "^docker,lo,virbr", "docker", "lo"}) {
    auto names = selected(interfaces, pattern);
    if (!names.empty()) return names;
  }
  return {};
}

Finding check_nccl(const std::vector<NetworkInterface>& interfaces,
                   const std::optional<std::string>& wanted, int gpus) {
  Finding finding{.name = "NCCL"};
  const auto names = nccl_interfaces(interfaces, wanted);
  finding.values = {{"interfaces", names}};
  for (const auto& name : names) {
    finding.found += (finding.found.empty() ? "" : ", ") + name;
  }
  if (finding.found.empty()) finding.found = "no interface";
  finding.found += " for its sockets";
  if (wanted) finding.found += ", by NCCL_SOCKET_IFNAME=" + *wanted;
  if (names.empty()) {
    finding.advise(gpus > 0 ? Health::fail : Health::warn,
                   "Groups of GPUs cannot begin. Correct or unset "
                   "NCCL_SOCKET_IFNAME; the interfaces that are up: " +
                       names_of(interfaces) + ".");
  }
  return finding;
}

}  // namespace lockstep::internal
