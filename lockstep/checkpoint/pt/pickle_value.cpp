#include "lockstep/checkpoint/pt/pickle_value.h"

namespace lockstep::internal {

// These are out of line because GCC 12, when it inlines them into one another,
// mistakes the moves of a variant for reads of inactive members
// (-Wmaybe-uninitialized).
PickleValue::PickleValue() = default;
PickleValue::PickleValue(Variant variant) : value(std::move(variant)) {}
PickleValue::PickleValue(const PickleValue&) = default;
PickleValue::PickleValue(PickleValue&&) noexcept = default;
PickleValue& PickleValue::operator=(const PickleValue&) = default;
PickleValue& PickleValue::operator=(PickleValue&&) noexcept = default;
PickleValue::~PickleValue() = default;

void PickleValue::Dict::set(std::string key, PickleValue item) {
  PickleItem& added = items.emplace_back();
  added.key.value = std::move(key);
  added.value = std::move(item);
}

const PickleValue* PickleValue::Dict::find(const std::string& key) const {
  for (const PickleItem& item : items) {
    const auto* name = item.key.as<std::string>();
    if (name && *name == key) return &item.value;
  }
  return nullptr;
}

}  // namespace lockstep::internal
