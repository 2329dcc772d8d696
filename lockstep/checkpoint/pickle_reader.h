#pragma once

#include <c10/core/Storage.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lockstep/checkpoint/pickle_value.h"

namespace lockstep {

// What is wrong with a pickle, for a message that names its file.
class PickleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The storage of that key, which must hold exactly `size` bytes of `dtype`;
// called once a key. May throw.
using StorageLoader = std::function<c10::Storage(
    const std::string& key, c10::ScalarType dtype, uint64_t size)>;

// The value of a pickle that torch.save wrote (protocols 2 to 5).
//
// Nothing is executed: the only classes and functions it knows are those of
// tensors and of OrderedDict, all built in here; any other is refused by
// name. What a hostile pickle can cost is bounded by its size: depth by
// kDepth, memory by a multiple of its bytes (values that it mentions again
// and again are counted each time). Tensors are views of their storages and
// lie within them; two that share a storage in the file share it here.
// Attributes that BUILD would set (`_metadata` of a state_dict) are dropped.
//
// Throws PickleError.
PickleValue read_pickle(std::string_view pickle, const StorageLoader& loader);

// The most bytes of a pickle, the deepest nesting and the most dimensions of
// a tensor that are read.
inline constexpr size_t kMostPickleBytes = size_t{64} << 20;
inline constexpr int kMostPickleDepth = 32;
inline constexpr size_t kMostDimensions = 64;

}  // namespace lockstep
