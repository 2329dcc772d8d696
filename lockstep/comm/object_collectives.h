#pragma once

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "lockstep/comm/process_group.h"

// Collectives over values that are no tensors, after torch.distributed's
// broadcast_object_list, all_gather_object, gather_object and
// scatter_object_list.
//
// An object is a JSON value, or a byte string
// (nlohmann::json::binary({...})), or any nesting of both. It travels as CBOR
// (RFC 8949), never as a pickle: receiving runs no code, whoever sent it.
// Python's functions send pickles, so they do not understand each other.
//
// Include <nlohmann/json.hpp> to make and read objects. All block, until the
// operation has ended on this rank; up to 1 GiB an object, nested 1,000 deep,
// byte strings without subtypes. Errors as in
// collective_options.h, and c10::DistBackendError that names the rank whose
// bytes are no CBOR.
namespace lockstep {

using Object = nlohmann::json;

struct ObjectOptions {
  ProcessGroupPtr group{};               // none: the default group
  std::chrono::milliseconds timeout{0};  // zero: the group's
};

// The object of rank `src`; what the others give is not used.
Object broadcast_object(const Object& object, int src = 0,
                        const ObjectOptions& options = {});

// The objects of all ranks, in their order.
std::vector<Object> all_gather_object(const Object& object,
                                      const ObjectOptions& options = {});

// On rank `dst` the objects of all ranks, in their order; nothing on others.
std::vector<Object> gather_object(const Object& object, int dst = 0,
                                  const ObjectOptions& options = {});

// On rank i the i-th of `objects` of rank `src`, which holds one a rank; what
// the others give is not used.
Object scatter_object(const std::vector<Object>& objects, int src = 0,
                      const ObjectOptions& options = {});

}  // namespace lockstep
