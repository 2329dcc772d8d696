#pragma once

#include <c10/core/Storage.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lockstep/checkpoint/pt/pickle_value.h"

namespace lockstep::internal {

// Says what is wrong with a pickle; the caller adds the name of the file.
class PickleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns the storage with that key, which must hold exactly `size` bytes of
// `dtype`; called once for each key. Its tensors are on its device. May throw.
using StorageLoader = std::function<c10::Storage(
    const std::string& key, c10::ScalarType dtype, uint64_t size)>;

// Returns the value of a pickle that torch.save wrote (protocols 2 to 5).
//
// Nothing is executed: the only classes and functions that it knows are those
// of tensors and OrderedDict, all built in here. Whatever is made with another
// one is Opaque, and so are values of Python that no snapshot needs (bytes,
// sets, long integers) and what is nested in more than kMostPickleDepth values.
// The cost of a hostile pickle is bounded: memory by a multiple of the pickle's
// size (a value counts again for each reference to it).
//
// Tensors are views of their storages and lie within them; two tensors that
// share a storage in the file share it here. A tensor that was a lazy conjugate
// or negative is one here, too, so its memory is not its values: copy it, or
// call resolve_conj().resolve_neg(). Whatever else a tensor carries makes it
// Opaque, except requires_grad, its device and Python attributes, which are not
// part of its values. Attributes are dropped, as all that BUILD would set
// (`_metadata` of a state_dict).
//
// Throws PickleError.
PickleValue read_pickle(std::string_view pickle, const StorageLoader& loader);

// Limits of what is read: bytes of a pickle, depth of nesting, and dimensions
// of a tensor.
inline constexpr size_t kMostPickleBytes = size_t{64} << 20;
inline constexpr int kMostPickleDepth = 32;
inline constexpr size_t kMostDimensions = 64;

}  // namespace lockstep::internal
