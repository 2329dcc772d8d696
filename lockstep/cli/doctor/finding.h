#pragma once

#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/control_groups.h"

namespace lockstep::internal {

// The folders in which the kernel describes the machine. Tests give others.
struct MachineRoots {
  std::filesystem::path proc = "/proc";
  std::filesystem::path sys = "/sys";
  std::filesystem::path dev = "/dev";

  ControlGroupPlace control_groups() const {
    return {.root = sys / "fs/cgroup", .membership = proc / "self/cgroup"};
  }
};

enum class Health {
  ok,
  warn,  // jobs run, but slower, or not all kinds of them
  fail   // jobs cannot run, or stop with an error
};

// The result of one check of `lockstep doctor`.
struct Finding {
  std::string name;  // "open files"
  Health health = Health::ok;
  std::string found{};  // the finding: a part of a sentence
  // The advice, in sentences. It may be given if all is well.
  std::string advice{};
  // The figures, for programs.
  nlohmann::ordered_json values = nlohmann::ordered_json::object();

  // The health becomes worse, never better; all sentences are kept.
  void warn(const std::string& sentences) { advise(Health::warn, sentences); }
  void fail(const std::string& sentences) { advise(Health::fail, sentences); }
  void advise(Health at_best, const std::string& sentences) {
    if (at_best > health) health = at_best;
    advice += (advice.empty() ? "" : " ") + sentences;
  }
};

// Returns what `check`, which returns a Finding or several, finds. If it throws
// a std::exception, that is the finding: the check `name` fails.
template <typename Check>
std::vector<Finding> findings_of(const std::string& name, const Check& check) {
  try {
    if constexpr (std::is_same_v<decltype(check()), Finding>) {
      return {check()};
    } else {
      return check();
    }
  } catch (const std::exception& error) {
    Finding finding{
        .name = name,
        .found = std::string("could not be examined: ") + error.what()};
    finding.fail(
        "Correct what the error names, then run lockstep doctor again.");
    return {finding};
  }
}

// Returns the line of a finding, and its advice below in lines of at most 80
// columns.
std::string finding_text(const Finding& finding);

// Returns "18 ok, 2 warnings, 0 failures" and a newline.
std::string summary_text(const std::vector<Finding>& findings);

// Returns one document, with a newline at its end; docs/doctor.md has its
// fields.
std::string findings_json(const std::vector<Finding>& findings);

// Returns the worst health of all; ok if there are none.
Health worst_of(const std::vector<Finding>& findings);

}  // namespace lockstep::internal
