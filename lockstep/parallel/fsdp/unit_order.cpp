#include "lockstep/parallel/fsdp/unit_order.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <vector>

#include "lockstep/comm/agreement.h"

namespace lockstep::internal {
namespace {

// Bounds the memory if a program only ever runs forwards.
constexpr size_t kMostNoted = 4096;

}  // namespace

void UnitOrder::note(Act act, size_t unit, size_t part,
                     const std::string& trained) {
  ++count_;
  digest_.add(4 * unit + static_cast<uint64_t>(act));
  digest_.add(uint64_t{part});
  digest_.add(trained);
  last_.push_back({act, unit, part, trained});
  if (last_.size() > kMostNoted) last_.pop_front();
}

void UnitOrder::clear() {
  count_ = 0;
  digest_ = {};
  last_.clear();
}

std::optional<std::string> UnitOrder::difference(
    const ProcessGroupPtr& group,
    const std::function<std::string(size_t)>& unit_name,
    std::vector<int64_t>& bits) {
  Agreement same(group);
  same.hold("the order of units", c10::str(count_, " ", digest_.value()));
  same.tell(bits);
  if (same.is_same()) {
    for (const auto& rank : same.told()) {
      for (size_t i = 0; i < bits.size(); ++i) bits[i] |= rank[i];
    }
    clear();
    return std::nullopt;
  }

  // Compare what all ranks remember.
  const int64_t forgotten = count_ - static_cast<int64_t>(last_.size());
  int64_t first = 0;
  for (const auto& rank : gather_numbers(group, {forgotten})) {
    first = std::max(first, rank[0]);
  }
  Agreement agreement(group);
  for (int64_t place = first; place < count_; ++place) {
    const auto& [act, unit, part, trained] =
        last_[static_cast<size_t>(place - forgotten)];
    std::string name = act == Act::gave_up  ? "gave up"
                       : act == Act::gather ? "gathered " + unit_name(unit)
                                            : "reduced " + unit_name(unit);
    if (part > 0) name += c10::str(" (part ", part + 1, ")");
    if (!trained.empty()) {
      name += ", whose parameters had requires_grad " + trained;
    }
    agreement.hold(std::to_string(place), name);
  }
  clear();
  const auto found = agreement.compare();
  const auto done = [](const std::string& text) {
    return text == "nothing" ? "ended" : text;
  };
  return c10::str(
      "the ranks do not go through the same units: ",
      found ? c10::str("rank ", found->first_rank, " ", done(found->first_text),
                       ", but rank ", found->rank, " ", done(found->text))
            : "where they differ is forgotten",
      "; all ranks must call the same units, and compute the loss from them, "
      "in the same order, and set the same requires_grad");
}

}  // namespace lockstep::internal
