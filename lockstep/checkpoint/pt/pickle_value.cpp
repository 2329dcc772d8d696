#include "lockstep/checkpoint/pt/pickle_value.h"

#include <string_view>

namespace lockstep::internal {
namespace {

struct TypeOf {
  std::string operator()(std::monostate) const { return "None"; }
  std::string operator()(bool) const { return "a bool"; }
  std::string operator()(int64_t) const { return "an int"; }
  std::string operator()(double) const { return "a float"; }
  std::string operator()(const std::string&) const { return "a str"; }
  std::string operator()(const at::Tensor&) const { return "a tensor"; }
  std::string operator()(const PickleValue::List&) const { return "a list"; }
  std::string operator()(const PickleValue::Tuple&) const { return "a tuple"; }
  std::string operator()(const PickleValue::Dict&) const { return "a dict"; }
  std::string operator()(const PickleValue::Opaque& value) const {
    const bool vowel = std::string_view("aeiou").find(value.type.front()) !=
                       std::string_view::npos;
    return (vowel ? "an " : "a ") + value.type;
  }
};

}  // namespace

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

std::string PickleValue::type() const { return std::visit(TypeOf(), value); }

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
