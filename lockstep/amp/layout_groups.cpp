#include "lockstep/amp/layout_groups.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/amp/optimizer_gradients.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {

namespace {

// More than any chain of groups that wait for each other is long: the axes of a
// mesh.
constexpr int kMostPasses = 64;

// Any order will do that is the same on all ranks. This one orders numbers
// ("2", "10") by their values.
bool comes_first(const std::string& a, const std::string& b) {
  return std::pair(a.size(), a) < std::pair(b.size(), b);
}

}  // namespace

LayoutGroups::LayoutGroups(at::TensorList parameters) {
  for (const auto& parameter : parameters) {
    const auto* layout = layout_of(parameter);
    if (layout == nullptr) continue;
    any_ = true;
    std::vector<const ProcessGroup*> inner;
    for (auto it = layout->groups.rbegin(); it != layout->groups.rend(); ++it) {
      const auto& group = *it;
      if (group->size() == 1) continue;
      auto entry = std::ranges::find(entries_, group, &Entry::group);
      if (entry == entries_.end()) {
        entry = entries_.insert(entry, {group, {}});
      }
      for (const auto* other : inner) {
        if (std::ranges::find(entry->inner, other) == entry->inner.end()) {
          entry->inner.push_back(other);
        }
      }
      inner.push_back(group.get());
    }
  }
  std::ranges::sort(entries_, comes_first,
                    [](const Entry& entry) { return entry.group->name(); });
}

double LayoutGroups::share_of(const at::Tensor& parameter) const {
  const auto* layout = layout_of(parameter);
  if (layout != nullptr && layout->duplicate) return 0;
  double share = 1;
  for (const auto& entry : entries_) {
    const bool divides =
        layout != nullptr &&
        std::ranges::find(layout->groups, entry.group) != layout->groups.end();
    if (!divides) share /= entry.group->size();
  }
  return share;
}

at::Tensor LayoutGroups::reduced(const at::Tensor& numbers,
                                 const ReduceOp& op) const {
  auto result = numbers;
  std::vector<const Entry*> open;
  for (const auto& entry : entries_) open.push_back(&entry);
  for (int pass = 0; !open.empty(); ++pass) {
    if (pass == kMostPasses) {
      throw std::invalid_argument(
          "The layouts of the parameters list the group " +
          open.front()->group->name() +
          " and others in orders that contradict each other, on this rank or "
          "another. Each layout must list its groups from the outermost (a "
          "pipeline's) to the innermost.");
    }
    for (auto it = open.begin(); it != open.end();) {
      const Entry& entry = **it;
      const bool waits = std::ranges::any_of(open, [&](const Entry* other) {
        return std::ranges::find(entry.inner, other->group.get()) !=
               entry.inner.end();
      });
      const auto flag = at::full({1}, waits ? 1 : 0, result.options());
      const auto all = agreed(at::cat({result, flag}), op, entry.group);
      if (all[result.numel()].item<double>() > 0) {
        ++it;
        continue;
      }
      result = all.slice(0, 0, result.numel());
      it = open.erase(it);
    }
  }
  return result;
}

}  // namespace lockstep::internal
