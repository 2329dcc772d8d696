#pragma once

// More headers whose names the documentation uses.
#include <lockstep/checkpoint/full_state_dict.h>
#include <lockstep/checkpoint/module_state.h>
#include <lockstep/checkpoint/optimizer_state.h>
#include <lockstep/lockstep.h>
#include <lockstep/model_parallel.h>
#include <lockstep/parallel/comm_hooks/comm_hooks.h>
#include <lockstep/parallel/model_averaging/post_local_sgd_optimizer.h>
#include <torch/torch.h>

#include <type_traits>

// LOCKSTEP_HAS(Type, name) does not compile unless the class lockstep::Type has
// a member of that name, of any kind. If it has, `name` is ambiguous in a class
// that also inherits another `name`.
#define LOCKSTEP_HAS(Type, name)              \
  {                                           \
    struct Other {                            \
      int name;                               \
    };                                        \
    struct Both : Type, Other {};             \
    static_assert(                            \
        ![]<class T>(std::type_identity<T>) { \
          return requires { &T::name; };      \
        }(std::type_identity<Both>{}),        \
        "lockstep::" #Type " has no " #name); \
  }

// Lockstep's names as the documentation writes them: templates are given a
// module or a dataset.
namespace lockstep_names {
using namespace lockstep;  // NOLINT
using DistributedDataParallel =
    ::lockstep::DistributedDataParallel<torch::nn::Linear>;
using DataParallel = ::lockstep::DataParallel<torch::nn::Linear>;
using FullyShard = ::lockstep::FullyShard<torch::nn::Linear>;
using ZeroRedundancyOptimizer =
    ::lockstep::ZeroRedundancyOptimizer<::lockstep::optim::AdamW>;
using AveragedModel = ::lockstep::AveragedModel<torch::nn::Linear>;
using DataLoader = ::lockstep::DataLoader<::lockstep::TensorDataset>;
}  // namespace lockstep_names
