#include "lockstep/cli/doctor/finding.h"

#include <algorithm>
#include <sstream>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

constexpr int kFormat = 1;  // of the JSON
constexpr size_t kColumns = 80;
constexpr size_t kHealthWidth = 6;
constexpr size_t kNameWidth = 15;

std::string name_of(Health health) {
  switch (health) {
    case Health::ok:
      return "ok";
    case Health::warn:
      return "warn";
    case Health::fail:
      return "fail";
  }
  return {};
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(text.size() + 1, width), ' ');
  return text;
}

std::string counted(long number, const std::string& noun) {
  return std::to_string(number) + " " + noun + (number == 1 ? "" : "s");
}

long count_of(const std::vector<Finding>& findings, Health health) {
  return std::ranges::count(findings, health, &Finding::health);
}

// The output of other programs may have several lines.
std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

}  // namespace

std::string finding_text(const Finding& finding) {
  const std::string indent(kHealthWidth + kNameWidth, ' ');
  std::string text = padded(name_of(finding.health), kHealthWidth) +
                     padded(finding.name, kNameWidth);
  size_t column = text.size();
  const auto add = [&](const std::string& words) {
    std::istringstream stream(words);
    bool first = true;
    for (std::string word; stream >> word;) {
      if (!first && column + 1 + word.size() > kColumns) {
        text += "\n" + indent;
        column = indent.size();
        first = true;
      }
      text += (first ? "" : " ") + word;
      column += word.size() + (first ? 0 : 1);
      first = false;
    }
  };
  add(finding.found);
  if (!finding.advice.empty()) {
    text += "\n" + indent;
    column = indent.size();
    add(finding.advice);
  }
  return text + "\n";
}

std::string summary_text(const std::vector<Finding>& findings) {
  return std::to_string(count_of(findings, Health::ok)) + " ok, " +
         counted(count_of(findings, Health::warn), "warning") + ", " +
         counted(count_of(findings, Health::fail), "failure") + "\n";
}

std::string findings_json(const std::vector<Finding>& findings) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const auto& finding : findings) {
    checks.push_back({{"name", finding.name},
                      {"health", name_of(finding.health)},
                      {"found", one_line(finding.found)},
                      {"advice", one_line(finding.advice)},
                      {"values", finding.values}});
  }
  const nlohmann::ordered_json document{{"format", kFormat},
                                        {"lockstep", LOCKSTEP_VERSION},
                                        {"host", host_name()},
                                        {"health", name_of(worst_of(findings))},
                                        {"checks", std::move(checks)}};
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  return document.dump(1, ' ', false, kReplace) + "\n";
}

Health worst_of(const std::vector<Finding>& findings) {
  Health worst = Health::ok;
  for (const auto& finding : findings) worst = std::max(worst, finding.health);
  return worst;
}

}  // namespace lockstep::internal
