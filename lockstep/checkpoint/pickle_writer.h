#pragma once

#include <functional>
#include <string>

#include "lockstep/checkpoint/pickle_value.h"

namespace lockstep {

// Gives the storage of a tensor its key in the archive ("0" for data/0).
using StorageNamer = std::function<std::string(const at::Tensor&)>;

// `value` as a pickle of protocol 2 that holds what torch.save would put into
// data.pkl: tensors as torch._utils._rebuild_tensor_v2 over a persistent id.
// Tensors must be contiguous, start their storage and be of a dtype that
// Python has a storage class for; throws std::invalid_argument otherwise.
std::string write_pickle(const PickleValue& value, const StorageNamer& namer);

}  // namespace lockstep
