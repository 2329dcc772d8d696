#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace lockstep::internal {

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

}  // namespace lockstep::internal
