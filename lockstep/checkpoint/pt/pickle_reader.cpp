#include "lockstep/checkpoint/pt/pickle_reader.h"

#include <algorithm>
#include <set>

#include "lockstep/checkpoint/pt/pickle_machine.h"

namespace lockstep::internal {
namespace {

using Node = PickleMachine::Node;

// Turns the graph into a tree. A node to which the pickle refers many times is
// copied as many times, so a small pickle could grow without bound; a budget
// pays for each copy.
class Unfolder {
 public:
  explicit Unfolder(size_t budget) : budget_(budget) {}

  PickleValue unfold(const Node* node, int depth) {
    pay(sizeof(PickleItem));
    if (depth > kMostPickleDepth) {
      return opaque("value in more than " + std::to_string(kMostPickleDepth) +
                    " lists and dicts");
    }
    return std::visit(
        [&](const auto& value) { return convert(value, depth + 1); },
        node->value);
  }

 private:
  void pay(size_t cost) {
    if (cost > budget_) throw PickleError("it repeats its values too often");
    budget_ -= cost;
  }

  template <class Scalar>
  PickleValue convert(const Scalar& value, int) {
    return PickleValue{value};
  }
  PickleValue convert(const std::string& value, int) {
    pay(value.size());
    return PickleValue{value};
  }
  PickleValue::List unfold_all(const PickleMachine::Nodes& items, int depth) {
    PickleValue::List list;
    for (const Node* item : items) list.push_back(unfold(item, depth));
    return list;
  }
  PickleValue convert(const PickleMachine::List& list, int depth) {
    return PickleValue{unfold_all(list.items, depth)};
  }
  PickleValue convert(const PickleMachine::Tuple& tuple, int depth) {
    return PickleValue{PickleValue::Tuple{unfold_all(tuple.items, depth)}};
  }
  PickleValue convert(const PickleMachine::Dict& dict, int depth) {
    PickleValue::Dict unfolded;
    unfolded.ordered = dict.ordered;
    unfolded.counter = dict.counter;
    std::set<std::variant<std::string, int64_t>> keys;
    for (const auto& [key, value] : dict.items) {
      PickleItem item{unfold(key, depth), unfold(value, depth)};
      bool fresh = true;
      if (const auto* text = item.key.as<std::string>()) {
        fresh = keys.emplace(*text).second;
      } else if (const auto* number = item.key.as<int64_t>()) {
        fresh = keys.emplace(*number).second;
      }
      if (!fresh) throw PickleError("a key of a dict occurs twice");
      unfolded.items.push_back(std::move(item));
    }
    return PickleValue{std::move(unfolded)};
  }
  PickleValue convert(PickleMachine::Global, int) {
    return opaque("class or function of torch");
  }
  PickleValue convert(const PickleMachine::StorageClass&, int) {
    return opaque("class of storages");
  }
  PickleValue convert(const PickleMachine::Dtype& dtype, int) {
    return opaque("torch.dtype (" + std::string(c10::toString(dtype.dtype)) +
                  ")");
  }
  PickleValue convert(const PickleMachine::StorageId&, int) {
    return opaque("storage");
  }
  PickleValue convert(const PickleMachine::Opaque& value, int) {
    return opaque(value.type);
  }
  PickleValue opaque(std::string type) {
    pay(type.size());
    return PickleValue{PickleValue::Opaque{std::move(type)}};
  }

  size_t budget_;
};

}  // namespace

PickleValue read_pickle(std::string_view pickle, const StorageLoader& loader) {
  if (pickle.size() > kMostPickleBytes) {
    throw PickleError("it has " + std::to_string(pickle.size()) +
                      " bytes, at most " + std::to_string(kMostPickleBytes) +
                      " are read");
  }
  PickleMachine machine(pickle, loader);
  const Node* root = machine.run();
  // A second reference to a value takes two bytes in the file and about a
  // hundred in the tree; real files, which are mostly names, stay far below
  // this budget.
  constexpr size_t kBudgetPerByte = 256;
  constexpr size_t kMostBudget = size_t{2} << 30;
  return Unfolder(std::min(kBudgetPerByte * pickle.size(), kMostBudget))
      .unfold(root, 0);
}

}  // namespace lockstep::internal
