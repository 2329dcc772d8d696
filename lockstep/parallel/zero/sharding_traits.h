#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <concepts>

#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"

namespace lockstep {

// Describes the type of an optimizer for ZeroRedundancyOptimizer. Specialise it
// for a type of your own, or give that type a member `Options`.
//
//   Options       the constructor's argument after a std::vector of parameters
//                 or of torch::optim::OptimizerParamGroup
//   element_wise  whether it treats each element by itself, so that a parameter
//                 may be cut. Not inherited: a class derived from SGD may look
//                 at a parameter's norm.
template <class Optimizer>
struct ShardingTraits {
  using Options = typename Optimizer::Options;
  static constexpr bool element_wise = false;
};

// The traits of an optimizer that treats each element by itself:
//
//   template <>
//   struct lockstep::ShardingTraits<Lion> : ElementWiseSharding<LionOptions>
//   {};
template <class OptionsType>
struct ElementWiseSharding {
  using Options = OptionsType;
  static constexpr bool element_wise = true;
};

template <>
struct ShardingTraits<torch::optim::SGD>
    : ElementWiseSharding<torch::optim::SGDOptions> {};
template <>
struct ShardingTraits<torch::optim::Adam>
    : ElementWiseSharding<torch::optim::AdamOptions> {};
template <>
struct ShardingTraits<torch::optim::AdamW>
    : ElementWiseSharding<torch::optim::AdamWOptions> {};
template <>
struct ShardingTraits<torch::optim::Adagrad>
    : ElementWiseSharding<torch::optim::AdagradOptions> {};
template <>
struct ShardingTraits<torch::optim::RMSprop>
    : ElementWiseSharding<torch::optim::RMSpropOptions> {};
template <>
struct ShardingTraits<optim::SGD> : ElementWiseSharding<optim::SGDOptions> {};
template <>
struct ShardingTraits<optim::Adam> : ElementWiseSharding<optim::AdamOptions> {};
template <>
struct ShardingTraits<optim::AdamW> : ElementWiseSharding<optim::AdamWOptions> {
};

// LBFGS works on all parameters as one vector, so no part of it can be stepped
// alone.
template <class Optimizer>
concept Shardable = std::derived_from<Optimizer, torch::optim::Optimizer> &&
                    !std::derived_from<Optimizer, torch::optim::LBFGS>;

}  // namespace lockstep
