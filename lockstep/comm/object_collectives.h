#pragma once

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "lockstep/comm/process_group.h"

// Collectives over values that are not tensors, like torch.distributed's
// broadcast_object_list, all_gather_object, gather_object and
// scatter_object_list.
//
// An object is a JSON value, or a byte string (nlohmann::json::binary({...})),
// or any nesting of both. It travels as CBOR (RFC 8949), never as a pickle:
// receiving an object runs no code, whichever rank sent it. Python's functions
// send pickles, so these functions do not understand Python's.
//
// Include <nlohmann/json.hpp> to make and read objects. All functions block
// until the operation has ended on this rank. An object has at most 1 GiB, is
// nested at most 1,000 deep, and has byte strings without subtypes. Errors are
// those of collective_options.h, and c10::DistBackendError that names the rank
// whose bytes are not CBOR.
namespace lockstep {

using Object = nlohmann::json;

// Group and timeout as in CollectiveOptions (collective_options.h).
struct ObjectOptions {
  ProcessGroupPtr group{};
  std::optional<std::chrono::milliseconds> timeout{};
};

// Returns the object of rank `src`; the objects of the others are not used.
Object broadcast_object(const Object& object, int src = 0,
                        const ObjectOptions& options = {});

// Returns the objects of all ranks, in rank order.
std::vector<Object> all_gather_object(const Object& object,
                                      const ObjectOptions& options = {});

// Returns the objects of all ranks, in rank order, on rank `dst`; nothing on
// the others.
std::vector<Object> gather_object(const Object& object, int dst = 0,
                                  const ObjectOptions& options = {});

// Returns `objects[i]` of rank `src` on rank i. The list holds one object for
// each rank; the lists of the others are not used.
Object scatter_object(const std::vector<Object>& objects, int src = 0,
                      const ObjectOptions& options = {});

}  // namespace lockstep
