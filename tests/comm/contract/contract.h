#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/collective_options.h"
#include "lockstep/comm/init.h"
#include "tests/comm/contract/tensors.h"
#include "tests/harness/process_world.h"

// The contract of lockstep/comm as tests that any backend must pass: one suite
// per interface (reductions, data movement, ...), the same cases for every
// backend. A backend joins with one line in a test program that links
// lockstep_comm_contract:
//
//   LOCKSTEP_COLLECTIVE_CONTRACT(Gloo, "gloo")
//   LOCKSTEP_COLLECTIVE_CONTRACT(Nccl, "cuda:nccl", "cuda")
//
// This line registers every case as Gloo/Reductions.AllReduceSums/2 and so on.
namespace lockstep::internal::testing {

struct ContractBackend {
  std::string name;           // names the tests
  std::string config;         // as init_process_group() takes it
  std::string device{"cpu"};  // holds the tensors; "cuda": cuda:LOCAL_RANK
  // For backends that find out which ranks share a host: this many neighbouring
  // ranks are told that they share one. If it is 0, LOCKSTEP_HOST_ID is unset,
  // so all ranks share the host.
  int ranks_a_host{0};
  // Cases that are beyond what the backend's library does, "Suite.Name", with
  // the reason for which they are skipped.
  std::map<std::string, std::string> cannot{};
};

// Long enough for any operation of the suite, and shorter than kCaseDeadline,
// so that the error of an operation that hangs names it.
inline constexpr std::chrono::seconds kGroupTimeout{30};

// The arguments of a case: its rank's place in the world and the backend under
// test.
struct ContractWorld : World {
  std::string backend;
  c10::Device device;
  int ranks_a_host;

  // Makes the default group, with the backend under test.
  ProcessGroupGuard init(InitProcessGroupOptions options = {
                             .timeout = kGroupTimeout}) const;
  // Returns reduce_ops_for() this world, as far as the backend has them: NCCL
  // has no bitwise operations.
  std::vector<ReduceOpType> reduce_ops() const;
};

using ContractBody = std::function<void(const ContractWorld& world)>;

bool register_contract_backend(const ContractBackend& backend);
bool register_contract_case(const std::string& suite, const std::string& name,
                            const std::vector<int>& sizes, ContractBody body,
                            const char* file, int line);

// Waits for an operation that may have been called with async_op.
inline void finish(const WorkPtr& work) {
  if (work) work->wait();
}

}  // namespace lockstep::internal::testing

#define LOCKSTEP_COLLECTIVE_CONTRACT(name, ...)                 \
  [[maybe_unused]] static const bool name##_contract =          \
      ::lockstep::internal::testing::register_contract_backend( \
          {#name, __VA_ARGS__});

// Like WORLD_TEST, for every backend; `world` is a ContractWorld.
#define CONTRACT_TEST(suite, name, ...)                                    \
  static void suite##_##name##_body(                                       \
      const ::lockstep::internal::testing::ContractWorld&);                \
  [[maybe_unused]] static const bool suite##_##name##_registered =         \
      ::lockstep::internal::testing::register_contract_case(               \
          #suite, #name, {__VA_ARGS__}, &suite##_##name##_body, __FILE__,  \
          __LINE__);                                                       \
  static void suite##_##name##_body(                                       \
      [[maybe_unused]] const ::lockstep::internal::testing::ContractWorld& \
          world)
