#include "lockstep/comm/gloo/create.h"

#include <gloo/context.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/environment.h"

namespace lockstep::gloo {
namespace {

// A rank that leaves because of an error must not keep its peers waiting: with
// its connections closed, what they wait for fails at once. (Operations of its
// own that wait for a peer are not woken by that.)
class Gloo final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void abort() override {
    for (auto& context : contexts_) context->closeConnections();
  }
};

// Whether the environment says that all ranks are on this host. Gloo's own way,
// to look up the host's name, takes seconds where a name server is slow, and
// loopback is all that is needed then.
bool on_one_host(int size) {
  if (size == 1) return true;
  auto local = get_env("LOCAL_WORLD_SIZE");
  if (local && local == get_env("WORLD_SIZE")) return true;
  auto address = get_env("MASTER_ADDR").value_or("");
  return address == "localhost" || address == "::1" ||
         address.starts_with("127.");
}

std::shared_ptr<::gloo::transport::Device> choose_device(int size) {
  if (auto interface = get_env("GLOO_SOCKET_IFNAME")) {  // as Python's
    return c10d::ProcessGroupGloo::createDeviceForInterface(*interface);
  }
  if (on_one_host(size)) {
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  }
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

}  // namespace lockstep::gloo
