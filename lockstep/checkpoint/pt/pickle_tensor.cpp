// The part of PickleMachine that knows PyTorch: which globals exist, what
// calling them means, and whether a tensor lies within its storage.

#include <ATen/Functions.h>

#include <algorithm>
#include <limits>

#include "lockstep/checkpoint/pt/pickle_machine.h"
#include "lockstep/checkpoint/pt/pickle_types.h"

namespace lockstep::internal {
namespace {

using Node = PickleMachine::Node;

int64_t integer(const Node* node) {
  const auto* value = std::get_if<int64_t>(&node->value);
  if (!value) throw PickleError("a tensor has a shape that is not a number");
  return *value;
}

std::vector<int64_t> integers(const Node* node) {
  const auto* tuple = std::get_if<PickleMachine::Tuple>(&node->value);
  if (!tuple || tuple->items.size() > kMostDimensions) {
    throw PickleError("a tensor has an invalid shape");
  }
  std::vector<int64_t> values;
  for (const Node* item : tuple->items) values.push_back(integer(item));
  return values;
}

// Throws unless every element of the tensor lies in a storage of `elements`
// elements.
void check_extent(int64_t offset, const std::vector<int64_t>& sizes,
                  const std::vector<int64_t>& strides, uint64_t elements) {
  using Wide = unsigned __int128;
  constexpr Wide kMost = std::numeric_limits<int64_t>::max() / 16;
  const auto negative = [](int64_t value) { return value < 0; };
  if (sizes.size() != strides.size() || offset < 0 ||
      std::any_of(sizes.begin(), sizes.end(), negative) ||
      std::any_of(strides.begin(), strides.end(), negative)) {
    throw PickleError("a tensor has a negative size or stride");
  }
  // No product overflows 128 bits: each factor is below 2^63, and the loop
  // stops when a sum passes kMost.
  Wide count = 1;
  Wide last = static_cast<Wide>(offset);
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!empty) {
      last += static_cast<Wide>(sizes[i] - 1) * static_cast<Wide>(strides[i]);
    }
    count *= std::max<Wide>(static_cast<Wide>(sizes[i]), 1);
    if (count > kMost || last > kMost) {
      throw PickleError("a tensor is larger than memory can be");
    }
  }
  if (empty ? last > elements : last >= elements) {
    throw PickleError("a tensor reaches beyond its storage");
  }
}

}  // namespace

void PickleMachine::push_global(const std::string& module,
                                const std::string& name) {
  if (module == "collections" && name == "OrderedDict") {
    return push(Global::kOrderedDict);
  }
  if (module == "collections" && name == "Counter") {
    return push(Global::kCounter);
  }
  if (module == "torch._utils") {
    if (name == "_rebuild_tensor_v2") return push(Global::kRebuildTensorV2);
    if (name == "_rebuild_tensor_v3") return push(Global::kRebuildTensorV3);
    if (name == "_rebuild_parameter") return push(Global::kRebuildParameter);
  }
  if (module == "torch.storage" && name == "UntypedStorage") {
    return push(Global::kUntypedStorage);
  }
  if (module == "torch") {
    if (name == "Size") return push(Global::kSize);
    for (const PickledDtype& known : kPickledDtypes) {
      if (!known.storage.empty() && name == known.storage) {
        return push(StorageClass{known.dtype});
      }
      if (name == known.name) return push(Dtype{known.dtype});
    }
  }
  throw PickleError("it asks for " + module + "." + name +
                    ", which tensors do not need");
}

void PickleMachine::reduce() {
  const Node* arguments_node = pop();
  const Node* callable = pop();
  const auto* arguments = std::get_if<Tuple>(&arguments_node->value);
  const auto* global = std::get_if<Global>(&callable->value);
  if (!arguments || !global) {
    throw PickleError("it calls something that is not a function");
  }
  const Nodes& given = arguments->items;
  switch (*global) {
    case Global::kOrderedDict:
      if (!given.empty()) throw PickleError("an OrderedDict has arguments");
      return push(Dict{.items = {}, .ordered = true});
    case Global::kCounter: {  // (a dict of the counts)
      const auto* counts =
          given.size() == 1 ? std::get_if<Dict>(&given[0]->value) : nullptr;
      if (!counts) throw PickleError("a Counter is not made of a dict");
      return push(Dict{.items = counts->items, .counter = true});
    }
    case Global::kSize: {
      const auto* items =
          given.size() == 1 ? std::get_if<Tuple>(&given[0]->value) : nullptr;
      if (!items) throw PickleError("a torch.Size is not a tuple");
      return push(Tuple{items->items});
    }
    case Global::kRebuildTensorV2:
    case Global::kRebuildTensorV3:
      return rebuild_tensor(given, *global == Global::kRebuildTensorV3);
    case Global::kRebuildParameter:  // (data, requires_grad, backward_hooks)
      if (given.size() != 3 || !std::get_if<at::Tensor>(&given[0]->value)) {
        throw PickleError("a parameter is not a tensor");
      }
      return stack_.push_back(given[0]);
    case Global::kUntypedStorage:
      break;
  }
  throw PickleError("it calls something that is not a function");
}

void PickleMachine::build() {
  pop();  // the attributes
  const Node* object = pop();
  if (!std::get_if<Dict>(&object->value)) {
    throw PickleError("it sets attributes of something that is not a dict");
  }
  stack_.push_back(const_cast<Node*>(object));
}

// The tuple is ("storage", class, key, location, number of elements).
void PickleMachine::persistent_load() {
  const Node* id = pop();
  const auto* tuple = std::get_if<Tuple>(&id->value);
  if (!tuple || tuple->items.size() != 5) {
    throw PickleError("a storage has an invalid identity");
  }
  const Nodes& items = tuple->items;
  const auto* kind = std::get_if<std::string>(&items[0]->value);
  const auto* key = std::get_if<std::string>(&items[2]->value);
  const auto* type = std::get_if<StorageClass>(&items[1]->value);
  const auto* global = std::get_if<Global>(&items[1]->value);
  const bool untyped = global && *global == Global::kUntypedStorage;
  if (!kind || *kind != "storage" || !key || (!type && !untyped)) {
    throw PickleError("a storage has an invalid identity");
  }
  const int64_t count = integer(items[4]);
  const auto dtype = untyped ? c10::ScalarType::Byte : type->dtype;
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  if (count < 0 || count > std::numeric_limits<int64_t>::max() / width) {
    throw PickleError("storage " + *key + " claims " + std::to_string(count) +
                      " elements");
  }
  push(StorageId{*key, dtype, static_cast<uint64_t>(count * width), untyped});
}

c10::Storage PickleMachine::storage(const StorageId& id,
                                    c10::ScalarType dtype) {
  const auto found = storages_.find(id.key);
  if (found == storages_.end()) {
    c10::Storage loaded = loader_(id.key, dtype, id.bytes);
    storages_.emplace(id.key, std::make_pair(loaded, dtype));
    return loaded;
  }
  // The loader has validated the bytes for that dtype and size only.
  if (found->second.second != dtype ||
      found->second.first.nbytes() != id.bytes) {
    throw PickleError("storage " + id.key + " is described in two ways");
  }
  return found->second.first;
}

// Arguments of v2: (storage, storage_offset, size, stride, requires_grad,
// backward_hooks[, metadata]); v3 has the dtype after backward_hooks.
void PickleMachine::rebuild_tensor(const Nodes& arguments, bool v3) {
  const size_t least = v3 ? 7 : 6;
  if (arguments.size() < least || arguments.size() > least + 1) {
    throw PickleError("a tensor has a wrong number of arguments");
  }
  const auto* id = std::get_if<StorageId>(&arguments[0]->value);
  if (!id || id->untyped != v3) throw PickleError("a tensor has no storage");
  c10::ScalarType dtype = id->dtype;
  if (v3) {
    const auto* named = std::get_if<Dtype>(&arguments[6]->value);
    if (!named) throw PickleError("a tensor has no dtype");
    dtype = named->dtype;
  }
  const int64_t offset = integer(arguments[1]);
  const std::vector<int64_t> sizes = integers(arguments[2]);
  const std::vector<int64_t> strides = integers(arguments[3]);
  check_extent(offset, sizes, strides,
               id->bytes / static_cast<uint64_t>(c10::elementSize(dtype)));
  const c10::Storage elements = storage(*id, dtype);
  at::Tensor tensor = at::empty(
      {0}, at::TensorOptions().dtype(dtype).device(elements.device()));
  tensor.set_(elements, offset, sizes, strides);
  push(std::move(tensor));
}

}  // namespace lockstep::internal
