#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace lockstep {

// Makes the backend of one group, with the values that torch.distributed's
// extended API gives (PyTorch documentation, "Customize Process Group Backends
// Using Cpp Extensions"): `store` is the part of the store that belongs to this
// group and device type, `group_id` is "0" for the default group and the number
// that Python gives a new group, and `timeout` is in seconds.
using BackendCreator = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10d::DistributedBackendOptions&)>;

// Makes a backend that Lockstep does not have known by `name`, as
// torch.distributed.Backend.register_backend does. Afterwards
// init_process_group(name) and "xpu:name" name it, and a group that names no
// backend takes it for those of `devices` for which Lockstep has none.
//
//   register_backend("xccl", make_xccl, {at::kXPU});
//   auto group = init_process_group("cpu:gloo,xpu:xccl");
//
// `creator` is called on each rank of a group when the group is made, and
// blocks until the ranks are connected. An exception of it is the exception of
// init_process_group() or new_group().
//
// For an accelerator of which the host has a device for each rank, `creator` is
// called with local_device() as the current device, and the group is bound to
// it unless `creator` has bound the backend: numbers of Lockstep's own are
// exchanged there if the group has no backend for the CPU. When the group ends
// and was not aborted, shutdown() of the backend is called before its
// destructor, as Python's destroy_process_group() does.
//
// Call it before the first group is made, from one thread. Throws
// std::invalid_argument if the name is taken, is empty or has a ':' or ',', if
// `devices` is empty, or if `creator` is null.
void register_backend(const std::string& name, BackendCreator creator,
                      std::vector<c10::DeviceType> devices);

}  // namespace lockstep
