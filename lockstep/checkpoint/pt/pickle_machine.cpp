#include "lockstep/checkpoint/pt/pickle_machine.h"

#include <bit>
#include <cstring>

namespace lockstep::internal {

std::string_view PickleMachine::take(uint64_t count) {
  if (count > pickle_.size()) throw PickleError("it ends too early");
  const std::string_view bytes = pickle_.substr(0, count);
  pickle_.remove_prefix(count);
  return bytes;
}

template <class T>
T PickleMachine::take_number() {
  T value;
  const auto bytes = take(sizeof value);
  std::memcpy(&value, bytes.data(), bytes.size());
  return value;
}

std::string PickleMachine::take_line() {
  const size_t end = pickle_.substr(0, 256).find('\n');
  if (end == std::string_view::npos) throw PickleError("a name has no end");
  std::string line(take(end));
  take(1);
  return line;
}

void PickleMachine::push_node(Node node) {
  if (nodes_.size() == kMostNodes) throw PickleError("it has too many values");
  stack_.push_back(&nodes_.emplace_back(std::move(node)));
}

PickleMachine::Node* PickleMachine::pop() {
  // Values below the last mark cannot be popped.
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) {
    throw PickleError("its stack is empty");
  }
  Node* top = stack_.back();
  stack_.pop_back();
  return top;
}

PickleMachine::Nodes PickleMachine::pop_to_mark() {
  if (marks_.empty()) throw PickleError("a mark is missing");
  const auto from = stack_.begin() + static_cast<ptrdiff_t>(marks_.back());
  Nodes items(from, stack_.end());
  stack_.erase(from, stack_.end());
  marks_.pop_back();
  return items;
}

PickleMachine::Nodes PickleMachine::pop_tuple(size_t count) {
  Nodes items(count);
  while (count-- > 0) items[count] = pop();
  return items;
}

void PickleMachine::memoize(uint64_t index) {
  Node* top = pop();
  stack_.push_back(top);
  memo_[index] = top;
}

void PickleMachine::recall(uint64_t index) {
  const auto found = memo_.find(index);
  if (found == memo_.end()) {
    throw PickleError("it refers to a value that it never stored");
  }
  stack_.push_back(found->second);
}

const PickleMachine::Node* PickleMachine::run() {
  while (step(take_number<uint8_t>())) {
  }
  const Node* result = pop();
  if (!stack_.empty() || !pickle_.empty()) {
    throw PickleError("something is left over at its end");
  }
  return result;
}

// step() returns whether to go on; the other step functions return whether they
// knew the opcode.
bool PickleMachine::step(uint8_t op) {
  switch (op) {
    case '.':  // STOP
      return false;
    case 0x80: {  // PROTO
      const auto protocol = take_number<uint8_t>();
      if (protocol < 2 || protocol > 5) {
        throw PickleError("its protocol is " + std::to_string(protocol) +
                          ", 2 to 5 are read");
      }
      return true;
    }
    case 0x95:  // FRAME: only a hint for buffering
      take(8);
      return true;
    case 'c': {  // GLOBAL
      const std::string module = take_line();
      push_global(module, take_line());
      return true;
    }
    case 0x93: {  // STACK_GLOBAL
      const auto* name = std::get_if<std::string>(&pop()->value);
      const auto* module = std::get_if<std::string>(&pop()->value);
      if (!name || !module) throw PickleError("a global has no name");
      push_global(*module, *name);
      return true;
    }
    case 'R':
      reduce();
      return true;
    case 0x81:  // NEWOBJ
      make_object();
      return true;
    case 0x92:  // NEWOBJ_EX: with keyword arguments
      pop();
      make_object();
      return true;
    case 'b':
      build();
      return true;
    case 'Q':
      persistent_load();
      return true;
    default:
      if (step_scalar(op) || step_container(op) || step_opaque(op) ||
          step_memo(op)) {
        return true;
      }
      throw PickleError("opcode " + std::to_string(op) +
                        " is not one that protocols 2 to 5 write");
  }
}

bool PickleMachine::step_scalar(uint8_t op) {
  switch (op) {
    case 'N':  // NONE
      push(std::monostate());
      return true;
    case 0x88:  // NEWTRUE
    case 0x89:  // NEWFALSE
      push(op == 0x88);
      return true;
    case 'J':  // BININT
      push(int64_t{take_number<int32_t>()});
      return true;
    case 'K':  // BININT1
      push(int64_t{take_number<uint8_t>()});
      return true;
    case 'M':  // BININT2
      push(int64_t{take_number<uint16_t>()});
      return true;
    case 0x8a:  // LONG1
      take_long(take_number<uint8_t>());
      return true;
    case 0x8b:  // LONG4
      take_long(take_number<uint32_t>());
      return true;
    case 'G': {  // BINFLOAT, big-endian
      uint64_t bits = 0;
      for (const char byte : take(8)) {
        bits = bits << 8 | static_cast<uint8_t>(byte);
      }
      push(std::bit_cast<double>(bits));
      return true;
    }
    case 0x8c:  // SHORT_BINUNICODE
      push(std::string(take(take_number<uint8_t>())));
      return true;
    case 'X':  // BINUNICODE
      push(std::string(take(take_number<uint32_t>())));
      return true;
    case 0x8d:  // BINUNICODE8
      push(std::string(take(take_number<uint64_t>())));
      return true;
    default:
      return false;
  }
}

void PickleMachine::take_long(uint32_t size) {
  if (size > 8) return take_opaque("int of more than 64 bits", size);
  const std::string_view bytes = take(size);
  // Two's complement; the last byte carries the sign.
  uint64_t value =
      size > 0 && (static_cast<uint8_t>(bytes[size - 1]) & 0x80) != 0
          ? ~uint64_t{0}
          : 0;
  for (size_t i = size; i-- > 0;) {
    value = value << 8 | static_cast<uint8_t>(bytes[i]);
  }
  push(static_cast<int64_t>(value));
}

bool PickleMachine::step_container(uint8_t op) {
  switch (op) {
    case '(':  // MARK
      marks_.push_back(stack_.size());
      return true;
    case '0':  // POP
      pop();
      return true;
    case '1':  // POP_MARK
      pop_to_mark();
      return true;
    case '}':  // EMPTY_DICT
      push(Dict());
      return true;
    case ']':  // EMPTY_LIST
      push(List());
      return true;
    case ')':  // EMPTY_TUPLE
      push(Tuple());
      return true;
    case 't':  // TUPLE
      push(Tuple{pop_to_mark()});
      return true;
    case 0x85:  // TUPLE1
    case 0x86:  // TUPLE2
    case 0x87:  // TUPLE3
      push(Tuple{pop_tuple(op - 0x84u)});
      return true;
    case 'a':  // APPEND
      append({pop()});
      return true;
    case 'e':  // APPENDS
      append(pop_to_mark());
      return true;
    case 's':  // SETITEM
      set_items(pop_tuple(2));
      return true;
    case 'u':  // SETITEMS
      set_items(pop_to_mark());
      return true;
    default:
      return false;
  }
}

void PickleMachine::take_opaque(const char* type, uint64_t size) {
  take(size);
  push(Opaque{type});
}

bool PickleMachine::step_opaque(uint8_t op) {
  switch (op) {
    case 'C':  // SHORT_BINBYTES
      take_opaque("bytes", take_number<uint8_t>());
      return true;
    case 'B':  // BINBYTES
      take_opaque("bytes", take_number<uint32_t>());
      return true;
    case 0x8e:  // BINBYTES8
      take_opaque("bytes", take_number<uint64_t>());
      return true;
    case 0x96:  // BYTEARRAY8
      take_opaque("bytearray", take_number<uint64_t>());
      return true;
    case 0x8f:  // EMPTY_SET
      push(Opaque{"set"});
      return true;
    case 0x90:  // ADDITEMS
      append(pop_to_mark());
      return true;
    case 0x91:  // FROZENSET
      pop_to_mark();
      push(Opaque{"frozenset"});
      return true;
    default:
      return false;
  }
}

bool PickleMachine::step_memo(uint8_t op) {
  switch (op) {
    case 'q':  // BINPUT
      memoize(take_number<uint8_t>());
      return true;
    case 'r':  // LONG_BINPUT
      memoize(take_number<uint32_t>());
      return true;
    case 0x94:  // MEMOIZE
      memoize(memo_.size());
      return true;
    case 'h':  // BINGET
      recall(take_number<uint8_t>());
      return true;
    case 'j':  // LONG_BINGET
      recall(take_number<uint32_t>());
      return true;
    default:
      return false;
  }
}

void PickleMachine::append(const Nodes& items) {
  Node* top = pop();
  stack_.push_back(top);
  if (std::get_if<Opaque>(&top->value)) return;
  auto* list = std::get_if<List>(&top->value);
  if (!list) throw PickleError("it appends to something that is not a list");
  list->items.insert(list->items.end(), items.begin(), items.end());
}

void PickleMachine::set_items(const Nodes& items) {
  Node* top = pop();
  stack_.push_back(top);
  if (std::get_if<Opaque>(&top->value)) return;
  auto* dict = std::get_if<Dict>(&top->value);
  if (!dict) {
    throw PickleError("it sets an item of something that is not a dict");
  }
  if (items.size() % 2 != 0) throw PickleError("a key of a dict has no value");
  for (size_t i = 0; i < items.size(); i += 2) {
    dict->items.emplace_back(items[i], items[i + 1]);
  }
}

}  // namespace lockstep::internal
