#include "lockstep/cli/doctor/libtorch.h"

#include <string>

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;

Finding describe_torch(const ordered_json& torch, int gpus) {
  Finding finding{.name = "LibTorch"};
  finding.values = torch;
  finding.values.erase("backends");
  const int seen = torch.at("gpus");
  const bool for_cuda = torch.at("cuda");
  finding.found = torch.at("version").get<std::string>() + ", " +
                  torch.at("cpu_capability").get<std::string>() + ", " +
                  std::to_string(torch.at("threads").get<int>()) + " threads";
  finding.found +=
      for_cuda ? ", " + std::to_string(seen) + " GPUs" : ", for CPUs only";
  if (gpus > 0 && !for_cuda) {
    finding.warn(
        "Ranks will not use the GPUs. Build Lockstep against a LibTorch for "
        "CUDA (cmake --preset cuda).");
  } else if (seen < gpus) {
    finding.fail("LibTorch sees " + std::to_string(seen) + " of " +
                 std::to_string(gpus) +
                 " GPUs. Its CUDA may need a newer driver: compare with the "
                 "version at the top of what nvidia-smi prints.");
  }
  return finding;
}

Finding describe_backends(const ordered_json& backends, int gpus) {
  Finding finding{.name = "backends"};
  finding.values = backends;
  std::string missing;
  for (const auto& [name, reason] : backends.items()) {
    if (reason.is_null()) {
      finding.found += (finding.found.empty() ? "" : ", ") + name;
      continue;
    }
    missing += (missing.empty() ? "; without " : ", ") + name;
    if (name == "nccl" && gpus > 0) {
      finding.warn("nccl: " + reason.get<std::string>() + ".");
    }
  }
  if (!missing.empty()) missing += " (--json says why)";
  finding.found += missing;
  return finding;
}

}  // namespace

std::vector<Finding> check_libtorch(
    const std::optional<CapturedProgram>& answer, int gpus) {
  Finding trouble{.name = "LibTorch"};
  if (!answer) {
    trouble.found = std::string("libexec/lockstep/") + kTorchProgram +
                    " is missing, so LibTorch and the backends are not known";
    trouble.warn("Build it (./dev build), or install Lockstep again.");
    return {trouble};
  }
  if (!answer->in_time) {
    trouble.found = "a program that links it did not start in time";
    trouble.fail(
        "Its libraries may lie on a slow or hanging file system, or the GPUs' "
        "driver hangs (does nvidia-smi answer?).");
    return {trouble};
  }
  const auto torch = ordered_json::parse(answer->out, nullptr, false);
  if (answer->exit_code != 0 || !torch.is_object()) {
    trouble.found = "a program that links it ended with exit code " +
                    std::to_string(answer->exit_code);
    if (!answer->last_line().empty()) {
      trouble.found += ": " + answer->last_line();
    }
    trouble.fail(
        "No rank can start. Install the LibTorch that Lockstep was built with "
        "at its place, or build Lockstep again.");
    return {trouble};
  }
  return {describe_torch(torch, gpus),
          describe_backends(torch.at("backends"), gpus)};
}

}  // namespace lockstep::internal
