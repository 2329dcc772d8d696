#include "tests/comm/contract/contract.h"

#include <gtest/gtest.h>

#include <ATen/Context.h>
#include <cstdlib>

namespace lockstep::internal::testing {
namespace {

struct ContractCase {
  std::string suite;
  std::string name;
  std::vector<int> sizes;
  ContractBody body;
  const char* file;
  int line;
};

// Backends and cases are registered by initialisers of different files, in an
// unknown order: each one that registers is combined with all of the other kind
// so far.
std::vector<ContractBackend>& backends() {
  static std::vector<ContractBackend> all;
  return all;
}
std::vector<ContractCase>& cases() {
  static std::vector<ContractCase> all;
  return all;
}

void combine(const ContractBackend& backend, const ContractCase& test) {
  const auto cannot = backend.cannot.find(test.suite + "." + test.name);
  const auto why =
      cannot == backend.cannot.end() ? std::string() : cannot->second;
  auto body = [backend, why, run = test.body](const World& world) {
    if (!why.empty()) GTEST_SKIP() << why;
    c10::Device device(backend.device);
    if (!device.is_cpu()) {
      const int there = at::detail::getCUDAHooks().deviceCount();
      if (there < world.size) {
        GTEST_SKIP() << "needs a GPU a rank, " << world.size << "; there are "
                     << there;
      }
      device.set_index(static_cast<c10::DeviceIndex>(get_local_rank()));
    }
    run(ContractWorld{world, backend.config, device, backend.ranks_a_host});
  };
  register_world_test(backend.name + "/" + test.suite, test.name, test.sizes,
                      body, test.file, test.line);
}

}  // namespace

ProcessGroupGuard ContractWorld::init(InitProcessGroupOptions options) const {
  if (ranks_a_host > 0) {
    ::setenv("LOCKSTEP_HOST_ID", std::to_string(rank / ranks_a_host).c_str(),
             /*replace=*/1);
  } else {
    ::unsetenv("LOCKSTEP_HOST_ID");
  }
  return init_process_group(backend, options);
}

std::vector<ReduceOpType> ContractWorld::reduce_ops() const {
  auto ops = reduce_ops_for(size);
  if (device.is_cuda()) {
    std::erase_if(ops, [](ReduceOpType op) {
      return op == ReduceOp::BAND || op == ReduceOp::BOR ||
             op == ReduceOp::BXOR;
    });
  }
  return ops;
}

bool register_contract_backend(const ContractBackend& backend) {
  backends().push_back(backend);
  for (const auto& test : cases()) combine(backend, test);
  return true;
}

bool register_contract_case(const std::string& suite, const std::string& name,
                            const std::vector<int>& sizes, ContractBody body,
                            const char* file, int line) {
  cases().push_back({suite, name, sizes, std::move(body), file, line});
  for (const auto& backend : backends()) combine(backend, cases().back());
  return true;
}

}  // namespace lockstep::internal::testing
