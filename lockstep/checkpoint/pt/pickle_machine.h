#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/pt/pickle.h"

namespace lockstep::internal {

// The stack machine of the pickle format (CPython, Lib/pickletools.py), for the
// opcodes that protocols 2 to 5 write. It builds a graph, because a pickle may
// refer to a container again before it is filled; read_pickle() turns the graph
// into a tree. The machine owns all nodes, so a cycle leaks nothing. A class or
// function that it does not know, and whatever is made with it, is Opaque.
class PickleMachine {
 public:
  struct Node;
  using Nodes = std::vector<Node*>;
  struct List {
    Nodes items;
  };
  struct Tuple {
    Nodes items;
  };
  struct Dict {
    std::vector<std::pair<Node*, Node*>> items;
    bool ordered = false;
    bool counter = false;
  };
  enum class Global {
    kOrderedDict,
    kCounter,
    kRebuildTensorV2,
    kRebuildTensorV3,
    kRebuildParameter,
    kRebuildParameterWithState,
    kRebuildFromType,
    kTensorType,
    kSize,
    kUntypedStorage,
  };
  using Opaque = PickleValue::Opaque;
  struct StorageClass {
    c10::ScalarType dtype;
  };
  struct Dtype {
    c10::ScalarType dtype;
  };
  // The identity of a storage. If `untyped` is set, `dtype` is Byte, and the
  // tensor's own dtype says what the bytes mean.
  struct StorageId {
    std::string key;
    c10::ScalarType dtype;
    uint64_t bytes;
    bool untyped;
  };
  struct Node {
    std::variant<std::monostate, bool, int64_t, double, std::string, at::Tensor,
                 List, Tuple, Dict, Global, StorageClass, Dtype, StorageId,
                 Opaque>
        value;
  };

  PickleMachine(std::string_view pickle, const StorageLoader& loader)
      : pickle_(pickle), loader_(loader) {}

  // Runs to STOP and returns the result, which the machine owns.
  const Node* run();

 private:
  static constexpr size_t kMostNodes = size_t{8} << 20;

  // Removes and returns the next `count` bytes of the pickle.
  std::string_view take(uint64_t count);
  template <class T>
  T take_number();
  std::string take_line();

  template <class T>
  void push(T value) {
    push_node(Node{std::move(value)});
  }
  void push_node(Node node);
  Node* pop();
  Nodes pop_to_mark();
  Nodes pop_tuple(size_t count);
  void memoize(uint64_t index);
  void recall(uint64_t index);

  bool step(uint8_t op);
  bool step_scalar(uint8_t op);
  bool step_container(uint8_t op);
  bool step_opaque(uint8_t op);
  bool step_memo(uint8_t op);
  void take_long(uint32_t size);
  void take_opaque(const char* type, uint64_t size);
  void append(const Nodes& items);
  void set_items(const Nodes& items);
  void push_global(const std::string& module, const std::string& name);
  void reduce();
  void call(Global function, const Nodes& given);
  void make_object();
  void build();
  void persistent_load();
  void rebuild_tensor(const Nodes& arguments, bool v3);
  void rebuild_parameter(const Nodes& arguments, size_t count);
  c10::Storage storage(const StorageId& id, c10::ScalarType dtype);

  std::string_view pickle_;
  const StorageLoader& loader_;
  std::deque<Node> nodes_;
  Nodes stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, Node*> memo_;
  std::map<std::string, std::pair<c10::Storage, c10::ScalarType>> storages_;
};

}  // namespace lockstep::internal
