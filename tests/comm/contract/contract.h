#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/collective_options.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"

// The contract of lockstep/comm as tests that any backend must pass: one suite
// an interface (reductions, data movement, ...), the same cases for every
// backend. A backend joins by one line in a test program that links
// lockstep_comm_contract:
//
//   LOCKSTEP_COLLECTIVE_CONTRACT(Gloo, "gloo")
//   LOCKSTEP_COLLECTIVE_CONTRACT(Nccl, "cuda:nccl", "cuda")
//
// which registers every case as Gloo/Reductions.AllReduceSums/2 and so on.
namespace lockstep::testing {

struct ContractBackend {
  std::string name;           // of the tests
  std::string config;         // as init_process_group() takes it
  std::string device{"cpu"};  // of the tensors; "cuda": cuda:LOCAL_RANK
  // For backends that look which ranks share a host: neighbours in rank that
  // are told they do. 0: all that do.
  int ranks_a_host{0};
};

// Long enough for any operation of the suite, and shorter than kCaseDeadline,
// so that one that hangs is named by its own error.
inline constexpr std::chrono::seconds kGroupTimeout{30};

// What a case gets: its rank's place in the world and the backend under test.
struct ContractWorld : World {
  std::string backend;
  c10::Device device;
  int ranks_a_host;

  // The default group, of the backend under test.
  ProcessGroupGuard init(InitProcessGroupOptions options = {
                             .timeout = kGroupTimeout}) const;
};

using ContractBody = std::function<void(const ContractWorld& world)>;

bool register_contract_backend(const ContractBackend& backend);
bool register_contract_case(const std::string& suite, const std::string& name,
                            const std::vector<int>& sizes, ContractBody body,
                            const char* file, int line);

// The end of an operation that may have been called with async_op.
inline void finish(const WorkPtr& work) {
  if (work) work->wait();
}

}  // namespace lockstep::testing

#define LOCKSTEP_COLLECTIVE_CONTRACT(name, ...)        \
  [[maybe_unused]] static const bool name##_contract = \
      ::lockstep::testing::register_contract_backend({#name, __VA_ARGS__});

// As WORLD_TEST, for every backend; `world` is a ContractWorld.
#define CONTRACT_TEST(suite, name, ...)                                   \
  static void suite##_##name##_body(                                      \
      const ::lockstep::testing::ContractWorld&);                         \
  [[maybe_unused]] static const bool suite##_##name##_registered =        \
      ::lockstep::testing::register_contract_case(                        \
          #suite, #name, {__VA_ARGS__}, &suite##_##name##_body, __FILE__, \
          __LINE__);                                                      \
  static void suite##_##name##_body(                                      \
      [[maybe_unused]] const ::lockstep::testing::ContractWorld& world)
