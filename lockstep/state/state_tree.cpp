#include "lockstep/state/state_tree.h"

#include <algorithm>

namespace lockstep {

// These are out of line because GCC 12, when it inlines them into one another,
// mistakes the moves of a variant for reads of inactive members
// (-Wmaybe-uninitialized).
StateTree::StateTree() = default;
StateTree::StateTree(bool v) : value(v) {}
StateTree::StateTree(int v) : value(int64_t{v}) {}
StateTree::StateTree(int64_t v) : value(v) {}
StateTree::StateTree(double v) : value(v) {}
StateTree::StateTree(const char* v) : value(std::string(v)) {}
StateTree::StateTree(std::string v) : value(std::move(v)) {}
StateTree::StateTree(List v) : value(std::move(v)) {}
StateTree::StateTree(Dict v) : value(std::move(v)) {}
StateTree::StateTree(Counter v) : value(std::move(v)) {}
StateTree::StateTree(const StateTree&) = default;
StateTree::StateTree(StateTree&&) noexcept = default;
StateTree& StateTree::operator=(const StateTree&) = default;
StateTree& StateTree::operator=(StateTree&&) noexcept = default;
StateTree::~StateTree() = default;

void StateTree::Dict::set(const std::string& name, StateTree item) {
  for (auto& [key, place] : items) {
    if (key != name) continue;
    place = std::move(item);
    return;
  }
  items.emplace_back(name, std::move(item));
}

void StateTree::Dict::erase(const std::string& name) {
  std::erase_if(items, [&](const auto& item) { return item.first == name; });
}

const StateTree* StateTree::Dict::find(const std::string& name) const {
  for (const auto& [key, item] : items) {
    if (key == name) return &item;
  }
  return nullptr;
}

bool operator==(const StateTree& a, const StateTree& b) {
  return a.value == b.value;
}

bool operator==(const StateTree::Dict& a, const StateTree::Dict& b) {
  return a.items.size() == b.items.size() &&
         std::all_of(a.items.begin(), a.items.end(), [&](const auto& item) {
           const StateTree* other = b.find(item.first);
           return other && *other == item.second;
         });
}

}  // namespace lockstep
