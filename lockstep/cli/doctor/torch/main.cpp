// Prints one JSON document about LibTorch and the backends of Lockstep, for
// `lockstep doctor` (../program_checks.h):
//
//   {"version": "2.13.0", "cpu_capability": "AVX512", "threads": 2,
//    "cuda": false, "gpus": 0,
//    "backends": {"gloo": null, "nccl": "why it cannot be used"}}

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/comm/backend_registry.h"

namespace {

using nlohmann::ordered_json;

ordered_json describe_backends() {
  ordered_json backends = ordered_json::object();
  for (const auto& backend : lockstep::internal::registered_backends()) {
    if (backend.imagines_peers) continue;
    const std::string reason = backend.missing ? backend.missing() : "";
    backends[backend.name] =
        reason.empty() ? ordered_json() : ordered_json(reason);
  }
  return backends;
}

}  // namespace

int main() {
  try {
    const bool runs_cuda = at::globalContext().hasCUDA();
    const ordered_json torch{
        {"version", TORCH_VERSION},
        {"cpu_capability", at::get_cpu_capability()},
        {"threads", at::get_num_threads()},
        {"cuda", at::globalContext().hasCUDART()},
        {"gpus", runs_cuda ? at::detail::getCUDAHooks().deviceCount() : 0},
        {"backends", describe_backends()}};
    std::cout << torch.dump() << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
