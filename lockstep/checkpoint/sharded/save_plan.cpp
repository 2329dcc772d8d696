#include "lockstep/checkpoint/sharded/save_plan.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <stdexcept>
#include <tuple>

#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/tensor_bytes.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

// The member of a claim that says TensorShard::of_first_rank.
constexpr const char* kOfFirstRank = "of_first_rank";
// The same for TensorShard::duplicate.
constexpr const char* kDuplicate = "duplicate";

// A part, and the ranks that have it.
struct Item {
  std::string name;
  Box box;
  int64_t bytes = 0;
  size_t held_by = 0;
};

std::string dtype_and_shape(const SavePlan::Tensor& tensor) {
  std::string text = safetensors_dtype(tensor.dtype) + "[";
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(tensor.shape[d]);
  }
  return text + "]";
}

void add_tensor(SavePlan& plan, const std::string& name,
                const SavePlan::Tensor& tensor, size_t rank) {
  const auto [known, is_new] = plan.tensors.emplace(name, tensor);
  if (!is_new && (known->second.dtype != tensor.dtype ||
                  known->second.shape != tensor.shape)) {
    throw std::invalid_argument(
        "rank " + std::to_string(rank) + " has the tensor \"" + name +
        "\" as " + dtype_and_shape(tensor) + ", a rank before it as " +
        dtype_and_shape(known->second) +
        "; all ranks must save the same model and optimizer");
  }
}

// Returns the names of which some rank has more than a duplicate.
std::set<std::string> names_with_owners(const std::vector<Json>& claims) {
  std::set<std::string> names;
  for (const Json& rank : claims) {
    for (const Json& claim : rank) {
      if (claim.contains(kDuplicate)) continue;
      names.insert(claim.at("name").get<std::string>());
    }
  }
  return names;
}

std::vector<Item> items_of(const std::vector<Json>& claims, SavePlan& plan) {
  const std::set<std::string> owned = names_with_owners(claims);
  std::map<std::pair<std::string, Box>, std::vector<size_t>> holders;
  for (size_t rank = 0; rank < claims.size(); ++rank) {
    for (const Json& claim : claims[rank]) {
      const auto name = claim.at("name").get<std::string>();
      const bool of_first_rank = claim.contains(kOfFirstRank);
      if (of_first_rank && plan.tensors.contains(name) &&
          claim.at("placement") == text_of(Placement(Replicate{}))) {
        continue;
      }
      const SavePlan::Tensor tensor{
          dtype_of_safetensors(claim.at("dtype").get<std::string>()),
          claim.at("shape").get<Sizes>(),
          claim.at("placement").get<std::string>()};
      add_tensor(plan, name, tensor, rank);
      if (claim.contains(kDuplicate) && owned.contains(name)) continue;
      const auto add_holder = [&](Box box) {
        auto& list = holders[{name, std::move(box)}];
        if (of_first_rank && !list.empty()) return;
        if (list.empty() || list.back() != rank) list.push_back(rank);
      };
      // A rank may claim no box of a tensor without elements.
      if (numel_of(tensor.shape) == 0) {
        add_holder(whole_box(tensor.shape));
        continue;
      }
      for (const Json& pair : claim.at("boxes")) {
        Box box{pair.at(0).get<Sizes>(), pair.at(1).get<Sizes>()};
        if (box.numel() > 0) add_holder(std::move(box));
      }
    }
  }
  std::vector<Item> items;
  std::map<std::vector<size_t>, size_t> sets;
  for (auto& [key, ranks] : holders) {
    const auto& [name, box] = key;
    const auto item_size =
        static_cast<int64_t>(c10::elementSize(plan.tensors.at(name).dtype));
    const auto [set, is_new] = sets.emplace(ranks, sets.size());
    if (is_new) plan.holders.push_back(std::move(ranks));
    items.push_back({name, box, box.numel() * item_size, set->second});
  }
  return items;
}

void check_cover(const SavePlan& plan, const std::vector<Item>& items) {
  std::map<std::string, std::vector<Box>> boxes;
  for (const Item& item : items) boxes[item.name].push_back(item.box);
  for (const auto& [name, tensor] : plan.tensors) {
    const std::string problem = cover_problem(tensor.shape, boxes[name]);
    if (problem.empty()) continue;
    throw std::invalid_argument(
        "the parts of tensor \"" + name +
        "\" that the ranks have are not the "
        "whole tensor: " +
        problem +
        "; the ranks that save together must be those of the optimizer");
  }
}

// Cuts the box along its first dimension that is long enough, into `count`
// parts whose sizes differ by one at most. Returns nothing if no dimension is.
std::vector<Box> cut(const Box& box, size_t count) {
  const auto parts = static_cast<int64_t>(count);
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    const int64_t size = box.sizes[d];
    if (size < parts) continue;
    std::vector<Box> cuts;
    for (int64_t i = 0; i < parts; ++i) {
      Box part = box;
      part.offsets[d] = box.offsets[d] + size * i / parts;
      part.sizes[d] = size * (i + 1) / parts - size * i / parts;
      cuts.push_back(std::move(part));
    }
    return cuts;
  }
  return {};
}

void assign(SavePlan& plan, std::vector<Item> items, size_t ranks) {
  // Parts that only one rank has come first, then large ones before small ones,
  // so that the small ones even out the sums.
  std::stable_sort(
      items.begin(), items.end(), [&](const Item& a, const Item& b) {
        const auto key = [&](const Item& item) {
          return std::tuple(plan.holders[item.held_by].size() > 1, -item.bytes);
        };
        return key(a) < key(b);
      });
  const int64_t share = std::accumulate(items.begin(), items.end(), int64_t{0},
                                        [](int64_t sum, const Item& item) {
                                          return sum + item.bytes;
                                        }) /
                        static_cast<int64_t>(ranks);
  std::vector<int64_t> load(ranks);
  for (const Item& item : items) {
    const auto& holders = plan.holders[item.held_by];
    if (holders.size() > 1 && item.bytes >= kSmallestCut &&
        item.bytes > share / 4) {
      const auto parts = cut(item.box, holders.size());
      for (size_t i = 0; i < parts.size(); ++i) {
        load[holders[i]] += item.bytes / static_cast<int64_t>(parts.size());
        plan.parts.push_back(
            {item.name, parts[i], holders[i], 0, item.held_by});
      }
      if (!parts.empty()) continue;
    }
    const size_t rank = *std::min_element(
        holders.begin(), holders.end(),
        [&](size_t a, size_t b) { return load[a] < load[b]; });
    load[rank] += item.bytes;
    plan.parts.push_back({item.name, item.box, rank, 0, item.held_by});
  }
}

// A tensor's largest part of each rank goes to that rank's first file, the next
// one to its second.
void choose_files(SavePlan& plan, size_t ranks) {
  std::stable_sort(plan.parts.begin(), plan.parts.end(),
                   [](const SavePlan::Part& a, const SavePlan::Part& b) {
                     const auto key = [](const SavePlan::Part& part) {
                       return std::tuple(part.name, part.rank,
                                         -part.box.numel(), part.box);
                     };
                     return key(a) < key(b);
                   });
  plan.files.assign(ranks, 0);
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    SavePlan::Part& part = plan.parts[i];
    if (i > 0 && plan.parts[i - 1].name == part.name &&
        plan.parts[i - 1].rank == part.rank) {
      part.file = plan.parts[i - 1].file + 1;
    }
    plan.files[part.rank] = std::max(plan.files[part.rank], part.file + 1);
  }
  std::stable_sort(plan.parts.begin(), plan.parts.end(),
                   [](const SavePlan::Part& a, const SavePlan::Part& b) {
                     return std::tie(a.name, a.box) < std::tie(b.name, b.box);
                   });
}

// The elements of tensors that a rank has, by name.
class HeldElements {
 public:
  explicit HeldElements(const std::vector<TensorShard>& shards) {
    for (const TensorShard& shard : shards) {
      held_[shard.name] = held_boxes(shard);
    }
  }

  // The rank must have the part.
  at::Tensor of(const SavePlan::Part& part) const {
    for (const HeldBox& whole : held_.at(part.name)) {
      if (part.box == whole.box ||
          intersection(part.box, whole.box) == part.box) {
        return narrow_to(whole.elements, whole.box, part.box);
      }
    }
    throw std::logic_error("the rank does not have a part of \"" + part.name +
                           "\" that the plan says it has");
  }

 private:
  std::map<std::string, std::vector<HeldBox>> held_;
};

}  // namespace

Json claims_of(const std::vector<TensorShard>& shards) {
  Json claims = Json::array();
  std::set<std::string> names;
  for (const TensorShard& shard : shards) {
    if (!names.insert(shard.name).second) {
      throw std::invalid_argument("two tensors are named \"" + shard.name +
                                  "\"; a snapshot needs one name for each");
    }
    require_dense(shard.name, shard.tensor);
    Json boxes = Json::array();
    for (const HeldBox& held : held_boxes(shard)) {
      boxes.push_back({held.box.offsets, held.box.sizes});
    }
    claims.push_back({{"name", shard.name},
                      {"dtype", safetensors_dtype(shard.tensor.scalar_type())},
                      {"shape", shard.shape},
                      {"placement", text_of(shard.placement)},
                      {"boxes", std::move(boxes)}});
    if (shard.of_first_rank) claims.back()[kOfFirstRank] = true;
    if (shard.duplicate) claims.back()[kDuplicate] = true;
  }
  return claims;
}

SavePlan plan_save(const std::vector<Json>& claims) {
  SavePlan plan;
  std::vector<Item> items = items_of(claims, plan);
  check_cover(plan, items);
  assign(plan, std::move(items), claims.size());
  choose_files(plan, claims.size());
  return plan;
}

std::vector<std::vector<PlannedEntry>> entries_of(
    const SavePlan& plan, size_t rank, const std::vector<TensorShard>& shards) {
  const HeldElements held(shards);
  std::vector<std::vector<PlannedEntry>> files(plan.files.at(rank));
  for (const SavePlan::Part& part : plan.parts) {
    if (part.rank != rank) continue;
    if (part.box.numel() == 0) {
      files[part.file].push_back(
          {part.name, part.box,
           at::empty(part.box.sizes, plan.tensors.at(part.name).dtype)});
    } else {
      files[part.file].push_back({part.name, part.box, held.of(part)});
    }
  }
  return files;
}

std::vector<PlannedEntry> replicas_of(const SavePlan& plan, size_t rank,
                                      const std::vector<TensorShard>& shards) {
  const HeldElements held(shards);
  std::vector<PlannedEntry> replicas;
  for (const SavePlan::Part& part : plan.parts) {
    const auto& holders = plan.holders[part.held_by];
    if (part.rank == rank || part.box.numel() == 0 ||
        !std::binary_search(holders.begin(), holders.end(), rank)) {
      continue;
    }
    replicas.push_back({part.name, part.box, held.of(part)});
  }
  return replicas;
}

}  // namespace lockstep::internal
