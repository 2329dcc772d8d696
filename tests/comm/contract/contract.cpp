#include "tests/comm/contract/contract.h"

namespace lockstep::testing {
namespace {

struct ContractCase {
  std::string suite;
  std::string name;
  std::vector<int> sizes;
  ContractBody body;
  const char* file;
  int line;
};

// Backends and cases are registered by initialisers of different files, in no
// certain order: whichever comes later meets all of the other.
std::vector<ContractBackend>& backends() {
  static std::vector<ContractBackend> all;
  return all;
}
std::vector<ContractCase>& cases() {
  static std::vector<ContractCase> all;
  return all;
}

void combine(const ContractBackend& backend, const ContractCase& test) {
  auto body = [backend, run = test.body](const World& world) {
    c10::Device device(backend.device);
    if (!device.is_cpu()) {
      device.set_index(static_cast<c10::DeviceIndex>(get_local_rank()));
    }
    run(ContractWorld{world, backend.config, device});
  };
  register_world_test(backend.name + "/" + test.suite, test.name, test.sizes,
                      body, test.file, test.line);
}

}  // namespace

ProcessGroupGuard ContractWorld::init(InitProcessGroupOptions options) const {
  return init_process_group(backend, options);
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

}  // namespace lockstep::testing
