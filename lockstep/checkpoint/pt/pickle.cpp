#include "lockstep/checkpoint/pt/pickle.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "lockstep/checkpoint/pt/pickle_machine.h"

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

namespace {

// The comments name opcodes as CPython's Lib/pickletools.py does.
class Writer {
 public:
  explicit Writer(const StorageNamer& namer) : namer_(namer) {}

  std::string finish(const PickleValue& value) {
    out_ = "\x80\x02";  // PROTO 2
    write(value);
    op('.');  // STOP
    return std::move(out_);
  }

  void operator()(std::monostate) { op('N'); }                  // NONE
  void operator()(bool value) { op(value ? '\x88' : '\x89'); }  // NEWTRUE
  void operator()(int64_t value) {
    if (value >= INT32_MIN && value <= INT32_MAX) {
      op('J');  // BININT
      little_endian(static_cast<int32_t>(value));
    } else {
      op('\x8a');  // LONG1
      op(8);
      little_endian(value);
    }
  }
  void operator()(double value) {
    op('G');  // BINFLOAT, big-endian
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) {
      op(static_cast<char>(bits >> shift));
    }
  }
  void operator()(const std::string& value) {
    if (value.size() > UINT32_MAX) {
      throw std::invalid_argument("a string of 4 GiB cannot be pickled");
    }
    op('X');  // BINUNICODE
    little_endian(static_cast<uint32_t>(value.size()));
    out_ += value;
  }
  void operator()(const PickleValue::List& value) {
    op(']');  // EMPTY_LIST
    op('(');
    for (const PickleValue& item : value) write(item);
    op('e');  // APPENDS
  }
  void operator()(const PickleValue::Tuple& value) {
    op('(');  // MARK
    for (const PickleValue& item : value.items) {
      write(item);
    }
    op('t');  // TUPLE
  }
  void operator()(const PickleValue::Dict& value) {
    if (value.counter) global("collections", "Counter");
    if (value.ordered) {
      empty_ordered_dict();
    } else {
      op('}');  // EMPTY_DICT
    }
    op('(');
    for (const PickleItem& item : value.items) {
      write(item.key);
      write(item.value);
    }
    op('u');  // SETITEMS
    if (value.counter) {
      op('\x85');  // TUPLE1
      op('R');
    }
  }
  void operator()(const PickleValue::Opaque& value) {
    throw std::invalid_argument("a " + value.type + " cannot be saved as .pt");
  }
  void operator()(const at::Tensor& tensor) {
    const PickledDtype& dtype = dtype_of(tensor);
    const bool typed = !dtype.storage.empty();
    global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    op('(');
    op('(');
    (*this)(std::string("storage"));
    if (typed) {
      global("torch", std::string(dtype.storage));
    } else {
      global("torch.storage", "UntypedStorage");
    }
    (*this)(namer_(tensor));
    (*this)(std::string("cpu"));
    (*this)(typed ? tensor.numel() : static_cast<int64_t>(tensor.nbytes()));
    op('t');
    op('Q');              // BINPERSID
    (*this)(int64_t{0});  // storage_offset
    dimensions(tensor.sizes());
    dimensions(tensor.strides());
    (*this)(false);        // requires_grad
    empty_ordered_dict();  // backward_hooks
    if (!typed) global("torch", std::string(dtype.name));
    op('t');
    op('R');  // REDUCE
  }

 private:
  void write(const PickleValue& value) {
    if (depth_ > kMostPickleDepth) {
      throw std::invalid_argument(
          "a .pt file cannot hold a value that is nested in more than " +
          std::to_string(kMostPickleDepth) +
          " lists and dicts; give a flatter one");
    }
    ++depth_;
    std::visit(*this, value.value);
    --depth_;
  }

  void op(char code) { out_ += code; }

  template <class T>
  void little_endian(T value) {
    std::array<char, sizeof value> bytes;
    std::memcpy(bytes.data(), &value, sizeof value);
    out_.append(bytes.data(), bytes.size());
  }

  void global(const char* module, const std::string& name) {
    op('c');  // GLOBAL
    out_ += std::string(module) + "\n" + name + "\n";
  }

  void empty_ordered_dict() {
    global("collections", "OrderedDict");
    op(')');  // EMPTY_TUPLE
    op('R');
  }

  void dimensions(at::IntArrayRef values) {
    op('(');
    for (const int64_t value : values) (*this)(value);
    op('t');
  }

  static const PickledDtype& dtype_of(const at::Tensor& tensor) {
    for (const PickledDtype& known : kPickledDtypes) {
      if (known.dtype == tensor.scalar_type()) return known;
    }
    throw std::invalid_argument(std::string("a tensor of dtype ") +
                                c10::toString(tensor.scalar_type()) +
                                " cannot be saved as .pt; convert it first");
  }

  const StorageNamer& namer_;
  int depth_ = 0;  // in how many values the next one is
  std::string out_;
};

}  // namespace

std::string write_pickle(const PickleValue& value, const StorageNamer& namer) {
  return Writer(namer).finish(value);
}

}  // namespace lockstep::internal
