#include "lockstep/parallel/fsdp/unit_order.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/object_collectives.h"

namespace lockstep::internal {
namespace {

// Bounds the memory if a program only ever runs forwards.
constexpr size_t kMostNoted = 4096;

}  // namespace

void UnitOrder::note(Act act, size_t unit, size_t part,
                     const std::string& trained) {
  ++count_;
  // FNV-1a over words (Fowler, Noll and Vo).
  const auto mix = [this](uint64_t word) {
    digest_ ^= word;
    digest_ *= 0x100000001b3;
  };
  mix(4 * unit + static_cast<uint64_t>(act) + 1);
  mix(part);
  for (const char bit : trained) mix(static_cast<uint64_t>(bit));
  last_.push_back({act, unit, part, trained});
  if (last_.size() > kMostNoted) last_.pop_front();
}

void UnitOrder::clear() {
  count_ = 0;
  digest_ = 0;
  last_.clear();
}

std::optional<std::string> UnitOrder::difference(
    const ProcessGroupPtr& group,
    const std::function<std::string(size_t)>& unit_name,
    std::vector<int64_t>& bits) {
  const auto options =
      at::TensorOptions(at::kLong).device(group->control_device());
  std::vector<int64_t> sent{count_, static_cast<int64_t>(digest_)};
  sent.insert(sent.end(), bits.begin(), bits.end());
  const auto own = at::tensor(sent, at::kLong).to(options.device());
  std::vector<at::Tensor> by_rank;
  for (int rank = 0; rank < group->size(); ++rank) {
    by_rank.push_back(at::empty_like(own));
  }
  all_gather(by_rank, own, {.group = group});
  const auto all = at::stack(by_rank).cpu();
  const auto* numbers = all.const_data_ptr<int64_t>();
  const auto* other_numbers = numbers + sent.size();
  int other = 1;
  while (other < group->size() && other_numbers[0] == numbers[0] &&
         other_numbers[1] == numbers[1]) {
    ++other;
    other_numbers += sent.size();
  }
  if (other == group->size()) {
    for (size_t i = 0; i < bits.size(); ++i) {
      for (int rank = 0; rank < other; ++rank) {
        bits[i] |= numbers[rank * sent.size() + 2 + i];
      }
    }
    clear();
    return std::nullopt;
  }

  Object names = Object::array();
  for (const auto& [act, unit, part, trained] : last_) {
    std::string name = act == Act::gave_up  ? "gave up"
                       : act == Act::gather ? "gathered " + unit_name(unit)
                                            : "reduced " + unit_name(unit);
    if (part > 0) name += c10::str(" (part ", part + 1, ")");
    if (!trained.empty()) {
      name += ", whose parameters had requires_grad " + trained;
    }
    names.push_back(name);
  }
  const auto first = count_ - static_cast<int64_t>(last_.size());
  clear();
  const auto lists =
      all_gather_object({{"first", first}, {"names", names}}, {.group = group});
  const auto at = [&](int rank, int64_t place) -> std::string {
    const auto begin = lists[rank]["first"].get<int64_t>();
    const auto& list = lists[rank]["names"];
    if (place < begin) return "something that is forgotten";
    if (place - begin >= static_cast<int64_t>(list.size())) return "ended";
    return list[static_cast<size_t>(place - begin)].get<std::string>();
  };
  int64_t place = std::max(lists[0]["first"].get<int64_t>(),
                           lists[other]["first"].get<int64_t>());
  while (at(0, place) == at(other, place) && at(0, place) != "ended") ++place;
  return c10::str("the ranks do not go through the same units: rank ",
                  group->global_rank(0), " ", at(0, place), ", but rank ",
                  group->global_rank(other), " ", at(other, place),
                  "; all ranks must call the same units, and compute the loss "
                  "from them, in the same order, and set the same "
                  "requires_grad");
}

}  // namespace lockstep::internal
