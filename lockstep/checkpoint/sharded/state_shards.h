#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"

// A model and an optimizer as named shards.
namespace lockstep::internal {

// Returns what this rank has of the optimizer's state: its OptimizerShards, or,
// for an optimizer that is not sharded, everything as one part for each
// parameter. Throws std::invalid_argument for an optimizer that snapshots
// cannot hold.
OptimizerShards::State optimizer_state_of(torch::optim::Optimizer& optimizer);

// Returns as much of that as is known without the other ranks: of a sharded
// optimizer only the parameters of its groups.
OptimizerShards::State known_state_of(torch::optim::Optimizer& optimizer);

// Appends the model's tensors that this rank has, with this prefix: those with
// a layout (tensor_layout.h) as parts of the whole ones. Buffers of which ranks
// have no parts are those of the first rank that has them, as
// DistributedDataParallel keeps them.
void add_model(const torch::nn::Module& model, const std::string& prefix,
               std::vector<TensorShard>& shards);

// Appends the optimizer's tensors that this rank has, with this prefix. `model`
// has its parameters.
void add_optimizer(const OptimizerShards::State& state,
                   const torch::nn::Module& model, const std::string& prefix,
                   std::vector<TensorShard>& shards);

// Returns the shape of the tensor of which `tensor` is a part by its layout,
// and how it is placed in that: Replicate without a layout.
Sizes whole_shape(const at::Tensor& tensor);
Placement placement_of(const at::Tensor& tensor);

// Returns the placement, in the whole parameter, of a part's state whose values
// have more than one element.
Placement placement_of(const OptimizerShards::Part& part,
                       const at::Tensor& parameter);

// Returns the names of the optimizer's parameters, by number; "" for one that
// has no elements and is not the model's (Pipeline::empty_parameter()). Throws
// std::invalid_argument if the model lacks another one.
std::vector<std::string> names_of(const OptimizerShards::State& state,
                                  const torch::nn::Module& model);

// Returns whether names_of() does not throw.
bool has_all_parameters(const OptimizerShards::State& state,
                        const torch::nn::Module& model);

// Returns the further names of the model's parameters that have several, each
// with the parameter's first name.
std::map<std::string, std::string> tied_names(const torch::nn::Module& model);

// Returns, if ranks have different parameters because some are a pipeline's
// stage's or a rank's own (placement.h), for the names of all parameters whose
// they are: {"name": "rank 1 of its pipeline"}, or the tied weight; "" for one
// that all ranks have. With `buffers`, also for the names of the buffers that
// not all ranks have: {"name": ["rank 1 of its pipeline", checksum of the
// values]}. Otherwise {}.
nlohmann::json stages_of(const torch::nn::Module& model, bool buffers);

// Throws std::invalid_argument if ranks have different parameters under one
// name, or different stages have buffers of different values. `all`: the
// stages_of() all ranks, in rank order.
void require_names_differ(const std::vector<nlohmann::json>& all);

// Returns the hyperparameters with parameters by name.
std::vector<NamedGroup> named_groups(const OptimizerShards::State& state,
                                     const torch::nn::Module& model);

}  // namespace lockstep::internal
