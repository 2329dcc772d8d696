#include "lockstep/checkpoint/pt/pickle_writer.h"

#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "lockstep/checkpoint/pt/pickle_reader.h"
#include "lockstep/checkpoint/pt/pickle_types.h"

namespace lockstep::internal {
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
