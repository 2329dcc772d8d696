#pragma once

#include <string>
#include <vector>

#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

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
