#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "lockstep/checkpoint/module_state.h"
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

// Does the same, and adds the names that the parameters have in `module`
// (`param_names`, as in Python). Snapshots have them.
OptimizerState state_dict(const torch::optim::Optimizer& optimizer,
                          const torch::nn::Module& module);

// Loads a state that state_dict() or Python made. Hyperparameters are loaded,
// too, as in Python; those that LibTorch lacks and that only choose an
// implementation (`foreach`, `fused`, `capturable`) are ignored. `maximize`
// must be that of the optimizer (lockstep::optim has it; LibTorch's optimizers
// cannot do True). State tensors are copied, with the dtype and to the device
// of their parameter; the optimizer's earlier state is dropped. If a parameter
// is divided over ranks, its state may be that of the whole one, of which this
// rank's part is copied. As in Python, parameters are told apart by their
// number alone, so the optimizer must have them in the same order.
//
// Throws std::invalid_argument, before anything is changed, if groups or
// parameters differ in number, if a state tensor does not have its parameter's
// shape, or if the state belongs to another kind of optimizer.
void load_state_dict(torch::optim::Optimizer& optimizer,
                     const OptimizerState& state);

struct LoadOptimizerOptions {
  // False loads the state of the parameters that both have, in whatever groups
  // they are, and leaves the others and all hyperparameters unchanged. Set it
  // to false to go on with a part of another model (fine-tuning). If true,
  // groups and names must be the same.
  bool strict{true};
};

// Loads the state of each parameter by its name in `module`; the order of the
// parameters does not matter. `state` must have names: those that load_snapshot
// and load_snapshot_file() read from snapshots of Lockstep, and from Python if
// the optimizer was given model.named_parameters(). If all of them begin with
// "module.", that prefix is ignored. Of a parameter that has several names
// (tied weights), any counts. Parameters that are not the module's are told
// apart by their order in the group.
//
// Returns the names that were left out because `strict` is false: parameters of
// the optimizer that the state lacks, and names in the state that are none of
// its parameters.
//
// Throws, before anything is changed, std::invalid_argument if the state has no
// names; if strict and a group lacks a name or has another one; and what the
// function above throws.
IncompatibleKeys load_state_dict(torch::optim::Optimizer& optimizer,
                                 const OptimizerState& state,
                                 const torch::nn::Module& module,
                                 const LoadOptimizerOptions& options = {});

}  // namespace lockstep
