#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <array>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep::internal {

// A dtype as pickles name it: by a storage class of module `torch`, or, if the
// dtype has no such class, by its own name.
struct PickledDtype {
  c10::ScalarType dtype;
  std::string_view storage;  // empty if there is no class
  std::string_view name;
};

inline constexpr std::array<PickledDtype, 21> kPickledDtypes{{
    {c10::ScalarType::Float, "FloatStorage", "float32"},
    {c10::ScalarType::Double, "DoubleStorage", "float64"},
    {c10::ScalarType::Half, "HalfStorage", "float16"},
    {c10::ScalarType::BFloat16, "BFloat16Storage", "bfloat16"},
    {c10::ScalarType::Long, "LongStorage", "int64"},
    {c10::ScalarType::Int, "IntStorage", "int32"},
    {c10::ScalarType::Short, "ShortStorage", "int16"},
    {c10::ScalarType::Char, "CharStorage", "int8"},
    {c10::ScalarType::Byte, "ByteStorage", "uint8"},
    {c10::ScalarType::Bool, "BoolStorage", "bool"},
    {c10::ScalarType::ComplexFloat, "ComplexFloatStorage", "complex64"},
    {c10::ScalarType::ComplexDouble, "ComplexDoubleStorage", "complex128"},
    {c10::ScalarType::UInt16, "", "uint16"},
    {c10::ScalarType::UInt32, "", "uint32"},
    {c10::ScalarType::UInt64, "", "uint64"},
    {c10::ScalarType::ComplexHalf, "", "complex32"},
    {c10::ScalarType::Float8_e5m2, "", "float8_e5m2"},
    {c10::ScalarType::Float8_e4m3fn, "", "float8_e4m3fn"},
    {c10::ScalarType::Float8_e5m2fnuz, "", "float8_e5m2fnuz"},
    {c10::ScalarType::Float8_e4m3fnuz, "", "float8_e4m3fnuz"},
    {c10::ScalarType::Float8_e8m0fnu, "", "float8_e8m0fnu"},
}};

struct PickleItem;

// A value in a snapshot's pickle, as a tree: None, bool, int (64 bits), float,
// str, tensor, list, tuple, dict, or anything else, which stays opaque. A value
// type.
struct PickleValue {
  using List = std::vector<PickleValue>;
  struct Tuple {
    List items;
  };
  // A value that no snapshot needs, of which only the type is known:
  // "argparse.Namespace", "set", "numpy._core.multiarray.scalar".
  struct Opaque {
    std::string type;
  };
  // In the order of insertion. read_pickle() guarantees that no key that is a
  // str or an int occurs twice.
  struct Dict {
    std::vector<PickleItem> items;
    bool ordered = false;  // written as collections.OrderedDict
    bool counter = false;  // written as collections.Counter

    void set(std::string key, PickleValue value);
    // Returns nullptr if there is no such key.
    const PickleValue* find(const std::string& key) const;
  };

  using Variant =
      std::variant<std::monostate, bool, int64_t, double, std::string,
                   at::Tensor, List, Tuple, Dict, Opaque>;

  PickleValue();
  PickleValue(Variant variant);
  PickleValue(const PickleValue&);
  PickleValue(PickleValue&&) noexcept;
  PickleValue& operator=(const PickleValue&);
  PickleValue& operator=(PickleValue&&) noexcept;
  ~PickleValue();

  Variant value;

  // Returns the name of the value's type in Python, for errors: "a str", "an
  // argparse.Namespace".
  std::string type() const;

  // Returns nullptr if the value has another type.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&value);
  }
};

struct PickleItem {
  PickleValue key;
  PickleValue value;
};

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

// Returns the key of a tensor's storage in the archive ("0" for data/0).
using StorageNamer = std::function<std::string(const at::Tensor&)>;

// Returns `value` as a pickle of protocol 2 with what torch.save would write to
// data.pkl: tensors are torch._utils._rebuild_tensor_v2 with a persistent id,
// or _v3 if Python has no storage class for their dtype. Tensors must be
// contiguous and begin at the start of their storage, dtypes must be those of
// kPickledDtypes, and values must not be nested deeper than read_pickle()
// reads; throws std::invalid_argument otherwise.
std::string write_pickle(const PickleValue& value, const StorageNamer& namer);

}  // namespace lockstep::internal
