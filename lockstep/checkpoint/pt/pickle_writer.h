#pragma once

#include <functional>
#include <string>

#include "lockstep/checkpoint/pt/pickle_value.h"

namespace lockstep::internal {

// Returns the key of a tensor's storage in the archive ("0" for data/0).
using StorageNamer = std::function<std::string(const at::Tensor&)>;

// Returns `value` as a pickle of protocol 2 with what torch.save would write to
// data.pkl: tensors are torch._utils._rebuild_tensor_v2 with a persistent id,
// or _v3 if Python has no storage class for their dtype. Tensors must be
// contiguous and begin at the start of their storage, dtypes must be those of
// pickle_types.h, and values must not be nested deeper than read_pickle()
// reads; throws std::invalid_argument otherwise.
std::string write_pickle(const PickleValue& value, const StorageNamer& namer);

}  // namespace lockstep::internal
