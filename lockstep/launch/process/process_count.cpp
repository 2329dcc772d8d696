#include "lockstep/launch/process/process_count.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lockstep/base/environment.h"
#include "lockstep/launch/process/usable_cores.h"
#include "lockstep/launch/process/visible_gpus.h"

namespace lockstep {
namespace {

constexpr int kMostProcesses = 4096;

bool is_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
}

}  // namespace

int resolve_process_count(std::string_view text) {
  if (text == "cpu") return usable_cores();
  if (text == "auto") {
    const int gpus = visible_gpus();
    return gpus > 0 ? gpus : usable_cores();
  }
  if (text == "gpu") {
    const int gpus = visible_gpus();
    if (gpus > 0) return gpus;
    throw std::invalid_argument(
        std::getenv("CUDA_VISIBLE_DEVICES") != nullptr
            ? "--nproc-per-node is \"gpu\", and CUDA_VISIBLE_DEVICES leaves no "
              "GPU of this host visible; unset it, or give a number, \"cpu\" "
              "or \"auto\""
            : "--nproc-per-node is \"gpu\", and this host has no NVIDIA GPU "
              "(/dev/nvidia0); give a number, \"cpu\" or \"auto\"");
  }
  if (!is_number(text)) {
    throw std::invalid_argument("--nproc-per-node is \"" + std::string(text) +
                                "\"; allowed is a whole number from 1 to " +
                                std::to_string(kMostProcesses) +
                                ", \"auto\", \"cpu\" or \"gpu\"");
  }
  return static_cast<int>(
      internal::parse_int("--nproc-per-node", text, 1, kMostProcesses));
}

}  // namespace lockstep
