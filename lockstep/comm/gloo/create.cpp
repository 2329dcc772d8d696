#include "lockstep/comm/gloo/create.h"

#include <algorithm>

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

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->group_name = request.group_name;
  options->global_ranks_in_group.assign(request.global_ranks.begin(),
                                        request.global_ranks.end());
  // As Python's: the interface by name, else the one of this host's name.
  if (auto interface = get_env("GLOO_SOCKET_IFNAME")) {
    options->devices.push_back(
        c10d::ProcessGroupGloo::createDeviceForInterface(*interface));
  } else {
    options->devices.push_back(
        c10d::ProcessGroupGloo::createDefaultDevice());
  }
  return c10::make_intrusive<Gloo>(request.store, request.rank, request.size,
                                   options);
}

}  // namespace lockstep::gloo
