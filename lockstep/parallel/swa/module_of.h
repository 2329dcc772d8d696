#pragma once

#include <torch/nn/module.h>

#include <concepts>

namespace lockstep::internal {

// Returns the module that `given` is or has: a module itself; the `module()`
// of a wrapper, such as DistributedDataParallel; what a holder or a shared_ptr
// points to, even if that is const.
template <typename Given>
torch::nn::Module& module_of(const Given& given) {
  if constexpr (std::derived_from<Given, torch::nn::Module>) {
    return const_cast<Given&>(given);
  } else if constexpr (requires { given.module(); }) {
    return module_of(given.module());
  } else if constexpr (requires { given.ptr(); }) {
    return *given.ptr();
  } else {
    return *given;
  }
}

}  // namespace lockstep::internal
