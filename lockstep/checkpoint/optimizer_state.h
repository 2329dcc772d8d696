#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

// Returns state and hyperparameters of `optimizer` as the state_dict() of the
// Python optimizer of the same name: Python's load_state_dict() accepts them.
// Works for SGD, Adam, AdamW, RMSprop, Adagrad and classes derived from these,
// and for a PostLocalSGDOptimizer that steps one of them; throws
// std::invalid_argument for any other (LBFGS keeps a history that has no place
// in a snapshot yet). A parameter that a group names twice has one number, as
// in a Python program, whose module names it once. State tensors share their
// memory with the optimizer: save or copy them before the next step.
OptimizerState state_dict(const torch::optim::Optimizer& optimizer);

// Loads a state that state_dict() or Python made. Hyperparameters are loaded,
// too, as in Python; those that LibTorch lacks and that only choose an
// implementation (`foreach`, `fused`, `capturable`) are ignored. `maximize`
// must be that of the optimizer (lockstep::optim has it; LibTorch's optimizers
// cannot do True). State tensors are copied, with the dtype and to the device
// of their parameter; the optimizer's earlier state is dropped. If a parameter
// is divided over ranks, its state may be that of the whole one, of which this
// rank's part is copied.
//
// Throws std::invalid_argument, before anything is changed, if groups or
// parameters differ in number, if a state tensor does not have its parameter's
// shape, or if the state belongs to another kind of optimizer.
void load_state_dict(torch::optim::Optimizer& optimizer,
                     const OptimizerState& state);

}  // namespace lockstep
