// The stand-in for NCCL as a backend that a program registers, for devices of
// the type XPU. As c10d's backends, it does not bind itself to a device, and
// its destructor aborts pending operations.

#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "lockstep/comm/init.h"
#include "lockstep/comm/register_backend.h"
#include "tests/simulated_cuda/settings.h"

namespace lockstep::internal::simulated_cuda {
namespace {

class ProcessGroupXCCL final : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;
  const std::string getBackendName() const override { return "xccl"; }
};

c10::intrusive_ptr<c10d::Backend> make_xccl(
    const c10d::DistributedBackendOptions& given) {
  auto options = ProcessGroupXCCL::Options::create();
  options->timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(given.timeout);
  options->group_name = given.group_id;
  options->global_ranks_in_group.assign(given.global_ranks_in_group.begin(),
                                        given.global_ranks_in_group.end());
  auto backend = c10::make_intrusive<ProcessGroupXCCL>(
      given.store, given.group_rank, given.group_size, std::move(options));
  backend->eagerConnectSingleDevice(local_device());
  return backend;
}

[[maybe_unused]] const bool registered = [] {
  register_backend("xccl", make_xccl, {kDeviceType});
  return true;
}();

}  // namespace
}  // namespace lockstep::internal::simulated_cuda
