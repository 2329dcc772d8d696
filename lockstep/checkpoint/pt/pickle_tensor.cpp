// The part of PickleMachine that knows PyTorch: which globals exist, what
// calling them means, and whether a tensor lies within its storage.

#include <ATen/Functions.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "lockstep/checkpoint/pt/pickle.h"
#include "lockstep/checkpoint/pt/pickle_machine.h"

namespace lockstep::internal {
namespace {

using Node = PickleMachine::Node;

constexpr size_t kMostNameBytes = 512;

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
  // One without elements may begin anywhere.
  if (!empty && last >= elements) {
    throw PickleError("a tensor reaches beyond its storage");
  }
}

// Whether it is None or a dict without items.
bool is_empty(const Node* node) {
  const auto* dict = std::get_if<PickleMachine::Dict>(&node->value);
  return std::get_if<std::monostate>(&node->value) ||
         (dict && dict->items.empty());
}

// The lazy views of LibTorch, whose values are computed when they are read.
struct Bits {
  bool conj = false;
  bool neg = false;
};

// Returns what torch._C._get_tensor_metadata() has said of a tensor; nothing if
// it says something else.
std::optional<Bits> bits_of(const Node* metadata, c10::ScalarType dtype) {
  Bits bits;
  if (is_empty(metadata)) return bits;
  const auto* dict = std::get_if<PickleMachine::Dict>(&metadata->value);
  if (!dict) return std::nullopt;
  for (const auto& [key, value] : dict->items) {
    const auto* name = std::get_if<std::string>(&key->value);
    const auto* flag = std::get_if<bool>(&value->value);
    if (!name || !flag || !*flag) return std::nullopt;
    if (*name == "conj" && c10::isComplexType(dtype)) {
      bits.conj = true;
    } else if (*name == "neg") {
      bits.neg = true;
    } else {
      return std::nullopt;
    }
  }
  return bits;
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
    if (name == "_rebuild_parameter_with_state") {
      return push(Global::kRebuildParameterWithState);
    }
  }
  if (module == "torch._tensor" && name == "_rebuild_from_type_v2") {
    return push(Global::kRebuildFromType);
  }
  if ((module == "torch" && name == "Tensor") ||
      (module == "torch.nn.parameter" &&
       (name == "Parameter" || name == "Buffer"))) {
    return push(Global::kTensorType);
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
  if (module.size() + name.size() > kMostNameBytes) {
    throw PickleError("a class has a name of " +
                      std::to_string(module.size() + name.size()) + " bytes");
  }
  push(Opaque{module + "." + name});
}

void PickleMachine::reduce() {
  const Node* arguments_node = pop();
  Node* callable = pop();
  const auto* arguments = std::get_if<Tuple>(&arguments_node->value);
  if (!arguments) {
    throw PickleError("it calls a function without a tuple of arguments");
  }
  // The result of an unknown function is unknown, too. The function's own node
  // stands for it, so that many calls take no memory.
  if (std::get_if<Opaque>(&callable->value)) {
    return stack_.push_back(callable);
  }
  const auto* global = std::get_if<Global>(&callable->value);
  if (!global) throw PickleError("it calls something that is not a function");
  call(*global, arguments->items);
}

void PickleMachine::call(Global function, const Nodes& given) {
  switch (function) {
    case Global::kOrderedDict:
      if (!given.empty()) throw PickleError("an OrderedDict has arguments");
      return push(Dict{.items = {}, .ordered = true});
    // The node that is given becomes the result of these two, so that many
    // calls take no memory.
    case Global::kCounter: {  // (a dict of the counts)
      auto* counts =
          given.size() == 1 ? std::get_if<Dict>(&given[0]->value) : nullptr;
      if (!counts) throw PickleError("a Counter is not made of a dict");
      counts->counter = true;
      return stack_.push_back(given[0]);
    }
    case Global::kSize:
      if (given.size() != 1 || !std::get_if<Tuple>(&given[0]->value)) {
        throw PickleError("a torch.Size is not a tuple");
      }
      return stack_.push_back(given[0]);
    case Global::kRebuildTensorV2:
    case Global::kRebuildTensorV3:
      return rebuild_tensor(given, function == Global::kRebuildTensorV3);
    case Global::kRebuildParameter:
      return rebuild_parameter(given, 3);
    case Global::kRebuildParameterWithState:
      return rebuild_parameter(given, 4);
    case Global::kRebuildFromType: {  // (function, type, arguments, attributes)
      if (given.size() != 4) throw PickleError("a tensor has no type");
      // Only a subclass knows what its elements mean.
      if (std::get_if<Opaque>(&given[1]->value)) {
        return stack_.push_back(given[1]);
      }
      const auto* type = std::get_if<Global>(&given[1]->value);
      const auto* arguments = std::get_if<Tuple>(&given[2]->value);
      const auto* rebuild = std::get_if<Global>(&given[0]->value);
      if (!type || *type != Global::kTensorType || !arguments) {
        throw PickleError("a tensor has an invalid type");
      }
      if (std::get_if<Opaque>(&given[0]->value)) {
        return stack_.push_back(given[0]);
      }
      // Not one of its own kind, which could nest calls without bound.
      if (!rebuild || *rebuild == Global::kRebuildFromType) {
        throw PickleError("a tensor is made by an invalid function");
      }
      return call(*rebuild, arguments->items);
    }
    case Global::kTensorType:
      return push(Opaque{"torch.Tensor"});
    case Global::kUntypedStorage:
      return push(Opaque{"torch.UntypedStorage"});
  }
  throw PickleError("it calls something that is not a function");
}

void PickleMachine::make_object() {
  const Node* arguments = pop();
  Node* type = pop();
  if (!std::get_if<Tuple>(&arguments->value)) {
    throw PickleError("it makes an object without a tuple of arguments");
  }
  if (!std::get_if<Opaque>(&type->value)) {
    throw PickleError("it makes an object of something that is not a class");
  }
  stack_.push_back(type);
}

void PickleMachine::build() {
  pop();  // the attributes
  Node* object = pop();
  if (!std::get_if<Dict>(&object->value) &&
      !std::get_if<Opaque>(&object->value)) {
    throw PickleError("it sets attributes of something that has none");
  }
  stack_.push_back(object);
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
  // A class of storages that is not known, such as those of quantized tensors.
  if (std::get_if<Opaque>(&items[1]->value)) {
    return stack_.push_back(items[1]);
  }
  const auto* global = std::get_if<Global>(&items[1]->value);
  const bool untyped = global && *global == Global::kUntypedStorage;
  if (!kind || *kind != "storage" || !key || key->size() > kMostNameBytes ||
      (!type && !untyped)) {
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
  // The loader has validated the bytes, if there are any, for that dtype and
  // size only.
  if (found->second.first.nbytes() != id.bytes ||
      (found->second.second != dtype && id.bytes > 0)) {
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
  for (Node* argument : {arguments[0], arguments[v3 ? 6 : 0]}) {
    if (std::get_if<Opaque>(&argument->value)) {
      return stack_.push_back(argument);
    }
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
  if (!std::get_if<bool>(&arguments[4]->value)) {
    throw PickleError("a tensor's requires_grad is not a bool");
  }
  if (!is_empty(arguments[5])) return push(Opaque{"tensor with hooks"});
  Bits bits;
  if (arguments.size() > least) {
    const auto understood = bits_of(arguments[least], dtype);
    if (!understood) return push(Opaque{"tensor with metadata"});
    bits = *understood;
  }
  // Untyped storages may have tensors of several dtypes, of which only Bool
  // does not take any bytes.
  const bool any_bytes = v3 && dtype != c10::ScalarType::Bool;
  const c10::Storage elements =
      storage(*id, any_bytes ? c10::ScalarType::Byte : dtype);
  at::Tensor tensor = at::empty(
      {0}, at::TensorOptions().dtype(dtype).device(elements.device()));
  tensor.set_(elements, offset, sizes, strides);
  tensor._set_conj(bits.conj);
  tensor._set_neg(bits.neg);
  push(std::move(tensor));
}

// The arguments are (data, requires_grad, backward_hooks[, attributes]).
void PickleMachine::rebuild_parameter(const Nodes& arguments, size_t count) {
  if (arguments.size() != count) {
    throw PickleError("a parameter has a wrong number of arguments");
  }
  if (std::get_if<Opaque>(&arguments[0]->value)) {
    return stack_.push_back(arguments[0]);
  }
  if (!std::get_if<at::Tensor>(&arguments[0]->value)) {
    throw PickleError("a parameter is not a tensor");
  }
  if (!std::get_if<bool>(&arguments[1]->value)) {
    throw PickleError("a parameter's requires_grad is not a bool");
  }
  if (!is_empty(arguments[2])) return push(Opaque{"parameter with hooks"});
  stack_.push_back(arguments[0]);
}

}  // namespace lockstep::internal
