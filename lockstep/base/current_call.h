#pragma once

#include <cstdint>
#include <vector>

// What the calling thread is doing for the user: the collective of a process
// group that it is in, and the function of the library that called that. The
// layers below, which see neither the group nor the user's tensors, compare it
// between ranks and name it in their errors. Per thread; WorkQueue takes it
// along to the thread that runs an asynchronous operation.
namespace lockstep {

// A dtype of the user's tensors. Backends may get such elements as others: a
// complex number as two reals, a dtype that they lack as bytes.
struct ElementType {
  uint8_t code = 0;            // equal on two ranks if the dtypes are
  const char* name = nullptr;  // "ComplexFloat", a literal; nullptr: unknown
  uint8_t units = 1;           // elements of a backend for one of the user's
};

struct CurrentCall {
  const char* operation = nullptr;  // "all_reduce", a literal
  uint64_t number = 0;  // of the group's collectives: the flight recorder's
  // The same, but counted without what needs no other collective's order, as
  // reductions of buckets, which another thread may call beside collectives.
  // Equal on all ranks that have made the same calls. 0: none.
  uint64_t entry = 0;
  // What a call with lists of tensors consists of, and the dtypes of these in
  // the order in which they are exchanged: the first, and the others.
  uint16_t parts = 1;
  ElementType dtype{};
  std::vector<ElementType> others{};
  // user_function() of the thread that called; nullptr: the user himself.
  const char* function = nullptr;

  // Calls of the backend's protocol that were begun for this one. Ranks whose
  // parts differ differ in parts_left() of the first of them.
  uint32_t steps = 0;
  uint16_t parts_left() const { return static_cast<uint16_t>(parts - steps); }
  // The dtype of the tensor that the next step exchanges.
  const ElementType& next_dtype() const {
    return steps == 0 || others.empty() ? dtype
           : steps <= others.size()     ? others[steps - 1]
                                        : others.back();
  }
};

// nullptr: the thread is in none, or the backend is used without Lockstep's
// process groups.
CurrentCall* current_call() noexcept;

// Makes `call`, which must live longer, the current one.
class CurrentCallScope {
 public:
  explicit CurrentCallScope(CurrentCall* call) noexcept;
  ~CurrentCallScope();
  CurrentCallScope(const CurrentCallScope&) = delete;
  CurrentCallScope& operator=(const CurrentCallScope&) = delete;

 private:
  CurrentCall* const before_;
};

// Names the function that the user called, which makes collectives of its own:
// "save_snapshot()". A literal. Of nested ones the outermost counts.
class UserFunction {
 public:
  explicit UserFunction(const char* name) noexcept;
  ~UserFunction();
  UserFunction(const UserFunction&) = delete;
  UserFunction& operator=(const UserFunction&) = delete;

 private:
  const bool outermost_;
};
const char* user_function() noexcept;  // nullptr: none

}  // namespace lockstep
