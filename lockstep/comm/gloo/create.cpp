#include "lockstep/comm/gloo/create.h"

#include <gloo/context.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/environment.h"
#include "lockstep/base/own_address.h"
#include "lockstep/base/rank_environment.h"
#include "lockstep/comm/backend_traits.h"

namespace lockstep::internal::gloo {
namespace {

// A rank that leaves because of an error must not keep its peers waiting, so
// abort() closes its connections: operations in which peers wait for this rank
// then fail at once. (That does not wake this rank's own operations that wait
// for a peer.)
class Gloo final : public c10d::ProcessGroupGloo, public BackendTraits {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  bool failure_needs_abort() const override { return true; }

  void abort() override {
    for (auto& context : contexts_) context->closeConnections();
  }
};

// Whether the environment says that all ranks are on this host.
bool on_one_host(int size) {
  if (size == 1) return true;
  auto local = get_rank_env("LOCAL_WORLD_SIZE");
  if (local && local == get_rank_env("WORLD_SIZE")) return true;
  return is_loopback(get_rank_env("MASTER_ADDR").value_or(""));
}

std::shared_ptr<::gloo::transport::Device> choose_device(int size) {
  const auto own = own_address(on_one_host(size));
  if (!own.interface.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(own.interface);
  }
  if (!own.address.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForHostname(own.address);
  }
  // Gloo's default, the address of the host's own name, is often loopback.
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->group_name = request.group_name;
  options->global_ranks_in_group.assign(request.global_ranks.begin(),
                                        request.global_ranks.end());
  options->devices.push_back(choose_device(request.size));
  return c10::make_intrusive<Gloo>(request.store, request.rank, request.size,
                                   options);
}

}  // namespace lockstep::internal::gloo
