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

namespace internal {
template <class OptionsType>
struct ElementWise {
  using Options = OptionsType;
  static constexpr bool element_wise = true;
};
}  // namespace internal

template <>
struct ShardingTraits<torch::optim::SGD>
    : internal::ElementWise<torch::optim::SGDOptions> {};
template <>
struct ShardingTraits<torch::optim::Adam>
    : internal::ElementWise<torch::optim::AdamOptions> {};
template <>
struct ShardingTraits<torch::optim::AdamW>
    : internal::ElementWise<torch::optim::AdamWOptions> {};
template <>
struct ShardingTraits<torch::optim::Adagrad>
    : internal::ElementWise<torch::optim::AdagradOptions> {};
template <>
struct ShardingTraits<torch::optim::RMSprop>
    : internal::ElementWise<torch::optim::RMSpropOptions> {};
template <>
struct ShardingTraits<optim::SGD> : internal::ElementWise<optim::SGDOptions> {};
template <>
struct ShardingTraits<optim::Adam> : internal::ElementWise<optim::AdamOptions> {
};
template <>
struct ShardingTraits<optim::AdamW>
    : internal::ElementWise<optim::AdamWOptions> {};

// LBFGS works on all parameters as one vector, so no part of it can be stepped
// alone.
template <class Optimizer>
concept Shardable = std::derived_from<Optimizer, torch::optim::Optimizer> &&
                    !std::derived_from<Optimizer, torch::optim::LBFGS>;

}  // namespace lockstep
