#pragma once

#include <string>

namespace lockstep::internal {

// The names of tensors in a folder are those of PyTorch's distributed
// checkpoint for the state dict
//
//   {"model": model.state_dict(),
//    "optimizer": get_optimizer_state_dict(model, optimizer)}
//
// (torch.distributed.checkpoint.state_dict): each is the keys on its way,
// joined by dots.
inline constexpr const char* kModelPrefix = "model.";
// Before the parameter's name, a dot, and the name of the value.
inline constexpr const char* kStatePrefix = "optimizer.state.";
inline constexpr const char* kOptionPrefix = "optimizer.param_groups.";
inline constexpr const char* kOptimizerPrefix = "optimizer.";
// After the name of an item that is an optimizer, and a dot.
inline constexpr const char* kItemStateInfix = "state.";
// Before the number of a rank; Lockstep's own.
inline constexpr const char* kGeneratorPrefix = "lockstep.generator.";

}  // namespace lockstep::internal
