#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

// A value in a state dict without tensors, such as a learning-rate scheduler's:
// what Python has as None, bool, int, float, str, list, dict with names as
// keys, or collections.Counter of integers. A value type.
struct StateTree {
  using List = std::vector<StateTree>;
  // In the order in which the items were set.
  struct Dict {
    std::vector<std::pair<std::string, StateTree>> items;

    // Replaces the item of this name, or adds it at the end.
    void set(const std::string& name, StateTree value);
    // Does nothing if there is no such item.
    void erase(const std::string& name);
    // Returns nullptr if there is no such item.
    const StateTree* find(const std::string& name) const;
  };
  using Counter = std::map<int64_t, int64_t>;
  using Variant = std::variant<std::monostate, bool, int64_t, double,
                               std::string, List, Dict, Counter>;

  StateTree();  // None
  StateTree(bool value);
  StateTree(int value);
  StateTree(int64_t value);
  StateTree(double value);
  StateTree(const char* value);
  StateTree(std::string value);
  StateTree(List value);
  StateTree(Dict value);
  StateTree(Counter value);
  StateTree(const StateTree&);
  StateTree(StateTree&&) noexcept;
  StateTree& operator=(const StateTree&);
  StateTree& operator=(StateTree&&) noexcept;
  ~StateTree();

  // Returns nullptr if the value has another type.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&value);
  }

  Variant value;
};

// Types count: the int 1 is not the float 1.0. The order of a dict's items does
// not.
bool operator==(const StateTree& a, const StateTree& b);
bool operator==(const StateTree::Dict& a, const StateTree::Dict& b);

}  // namespace lockstep

namespace lockstep::internal {

// Returns the number that a state dict has under `name`. Throws
// std::invalid_argument, which names the class `owner`, if it has none.
inline int64_t state_entry(const std::map<std::string, int64_t>& state,
                           const std::string& name, const std::string& owner) {
  const auto found = state.find(name);
  if (found != state.end()) return found->second;
  throw std::invalid_argument(owner + ": the state has no entry \"" + name +
                              "\"; load what the state_dict() of a " + owner +
                              " returned");
}

}  // namespace lockstep::internal
