#include "lockstep/checkpoint/full_state_dict.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/save_plan.h"
#include "lockstep/checkpoint/sharded/shard_file.h"
#include "lockstep/checkpoint/sharded/state_shards.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/trace/current_call.h"

namespace lockstep {
namespace {

using internal::Ranks;

// Tells the others what this rank has. Returns what each rank has, or throws on
// every rank.
std::vector<nlohmann::json> gather_claims(
    const torch::nn::Module& module,
    const std::vector<internal::TensorShard>& shards, const Ranks& ranks) {
  const auto told = internal::gather_or_fail(
      ranks,
      [&](nlohmann::json& mine) {
        mine["claims"] = internal::claims_of(shards);
        mine["stages"] = internal::stages_of(module, /*buffers=*/true);
      },
      [](const std::string& words, bool /*is_mistake*/) {
        throw std::invalid_argument(words);
      });
  std::vector<nlohmann::json> all;
  std::vector<nlohmann::json> stages;
  for (const nlohmann::json& rank : told) {
    all.push_back(rank.at("claims"));
    stages.push_back(rank.at("stages"));
  }
  internal::require_names_differ(stages);
  return all;
}

// Throws on every rank if ranks have different values of one part, of which the
// result would be a mixture.
void compare_replicas(
    const internal::SavePlan& plan,
    const std::map<std::pair<std::string, internal::Box>, at::Tensor>& held,
    const Ranks& ranks) {
  internal::ReplicaChecksums checksums;
  for (const auto& part : plan.parts) {
    const auto found = held.find({part.name, part.box});
    if (found == held.end() || part.box.numel() == 0 ||
        plan.holders[part.held_by].size() == 1) {
      continue;
    }
    std::string& text = checksums[std::to_string(part.held_by)][part.name];
    for (const uint64_t sum : internal::block_checksums(found->second)) {
      text += internal::hex_of(sum);
    }
  }
  internal::require_equal_replicas(
      ranks.gather_objects(internal::digests_of(checksums)), checksums, ranks);
}

// Returns the names in the order of the ranks' models.
std::vector<std::string> names_of(const std::vector<nlohmann::json>& claims) {
  std::vector<std::string> names;
  std::set<std::string> known;
  for (const nlohmann::json& rank : claims) {
    for (const nlohmann::json& claim : rank) {
      auto name = claim.at("name").get<std::string>();
      if (known.insert(name).second) names.push_back(std::move(name));
    }
  }
  return names;
}

}  // namespace

NamedTensors full_state_dict(const torch::nn::Module& module,
                             const FullStateDictOptions& options) {
  const internal::UserFunction function("full_state_dict()");
  const at::NoGradGuard no_grad;
  const Ranks ranks(options.group);
  const bool first = ranks.rank() == 0;
  std::vector<internal::TensorShard> shards;
  internal::add_model(module, internal::kModelPrefix, shards);
  const auto claims = gather_claims(module, shards, ranks);
  const internal::SavePlan plan = internal::plan_save(claims);

  std::map<std::string, std::vector<internal::SavePlan::Part>> parts;
  for (const auto& part : plan.parts) parts[part.name].push_back(part);
  std::map<std::pair<std::string, internal::Box>, at::Tensor> mine;
  for (const auto& file : internal::entries_of(plan, ranks.rank(), shards)) {
    for (const auto& entry : file) {
      mine[{entry.name, entry.box}] = entry.elements;
    }
  }
  auto held = mine;
  for (const auto& entry : internal::replicas_of(plan, ranks.rank(), shards)) {
    held[{entry.name, entry.box}] = entry.elements;
  }
  compare_replicas(plan, held, ranks);
  std::set<std::string> whole_on_first;
  for (const nlohmann::json& claim : claims.front()) {
    if (claim.at("placement") == text_of(internal::Replicate{})) {
      whole_on_first.insert(claim.at("name").get<std::string>());
    }
  }
  std::map<std::string, at::Tensor> own;
  for (const auto& shard : shards) own[shard.name] = shard.tensor;

  NamedTensors result;
  for (const std::string& name : names_of(claims)) {
    const std::string short_name =
        name.substr(std::string_view(internal::kModelPrefix).size());
    if (whole_on_first.contains(name)) {
      if (first) result.emplace_back(short_name, own.at(name).cpu());
      continue;
    }
    const internal::SavePlan::Tensor& tensor = plan.tensors.at(name);
    at::Tensor whole;
    if (first) {
      whole = at::empty(tensor.shape, at::TensorOptions().dtype(tensor.dtype));
    }
    for (const internal::SavePlan::Part& part : parts[name]) {
      at::Tensor elements;
      if (part.rank == ranks.rank()) {
        elements = mine.at({name, part.box});
      } else if (first) {
        elements = at::empty(part.box.sizes, whole.options());
      } else {
        continue;
      }
      if (part.rank != 0) elements = ranks.to_first(elements, part.rank);
      if (!first) continue;
      internal::narrow_to(whole, internal::whole_box(tensor.shape), part.box)
          .copy_(elements);
    }
    if (first) result.emplace_back(short_name, std::move(whole));
  }
  return result;
}

}  // namespace lockstep
