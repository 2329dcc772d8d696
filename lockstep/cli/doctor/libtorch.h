#pragma once

#include <optional>
#include <vector>

#include "lockstep/cli/doctor/captured_program.h"
#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// The program of libexec/lockstep that links LibTorch and describes it as JSON
// (torch/main.cpp).
inline constexpr const char* kTorchProgram = "lockstep-doctor-torch";

// LibTorch, and the backends of Lockstep that can be used here. `answer`: what
// that program did; nothing if it is missing. `gpus`: how many ranks will see.
std::vector<Finding> check_libtorch(
    const std::optional<CapturedProgram>& answer, int gpus);

}  // namespace lockstep::internal
