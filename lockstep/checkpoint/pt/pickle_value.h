#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace lockstep::internal {

struct PickleItem;

// A value in a snapshot's pickle, as a tree: None, bool, int (64 bits), float,
// str, tensor, list, tuple, dict. A value type.
struct PickleValue {
  using List = std::vector<PickleValue>;
  struct Tuple {
    List items;
  };
  // In the order of insertion. read_pickle() guarantees that no key occurs
  // twice.
  struct Dict {
    std::vector<PickleItem> items;
    bool ordered = false;  // written as collections.OrderedDict
    bool counter = false;  // written as collections.Counter

    void set(std::string key, PickleValue value);
    // Returns nullptr if there is no such key.
    const PickleValue* find(const std::string& key) const;
  };

  using Variant = std::variant<std::monostate, bool, int64_t, double,
                               std::string, at::Tensor, List, Tuple, Dict>;

  PickleValue();
  PickleValue(Variant variant);
  PickleValue(const PickleValue&);
  PickleValue(PickleValue&&) noexcept;
  PickleValue& operator=(const PickleValue&);
  PickleValue& operator=(PickleValue&&) noexcept;
  ~PickleValue();

  Variant value;

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
