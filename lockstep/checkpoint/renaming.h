#pragma once

#include <concepts>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// Maps names in a file to names of a module, if the two differ:
//
//   .rename = {{"backbone.", ""}, {"head.", "fc."}}
//   .rename = [](const std::string& name) { return "net." + name; }
//
// Only the first prefix in the list with which a name begins is replaced. A
// name that begins with none of them stays as it is.
class Renaming {
 public:
  using Prefixes = std::vector<std::pair<std::string, std::string>>;

  Renaming() = default;
  Renaming(std::initializer_list<Prefixes::value_type> prefixes)
      : Renaming(Prefixes(prefixes)) {}
  Renaming(Prefixes prefixes);

  template <class Function>
    requires(!std::same_as<std::remove_cvref_t<Function>, Renaming> &&
             std::is_invocable_r_v<std::string, Function&, const std::string&>)
  Renaming(Function function) : function_(std::move(function)) {}

  // Returns the tensors under their new names, in the same order. Throws
  // std::invalid_argument if two tensors would get the same name.
  NamedTensors apply(NamedTensors tensors) const;

 private:
  std::function<std::string(const std::string&)> function_;
};

}  // namespace lockstep::internal
