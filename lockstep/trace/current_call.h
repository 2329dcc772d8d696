#pragma once

#include <cstdint>
#include <vector>

// Describes what the calling thread is doing for the user: the collective of a
// process group that it is in, and the library function that made this
// collective. The layers below see neither the process group nor the user's
// tensors; they compare this description between ranks and name it in their
// errors. It belongs to one thread. WorkQueue copies it to the thread that runs
// an asynchronous operation.
namespace lockstep::internal {

// A dtype of the user's tensors. A backend may get the elements as another
// dtype: a complex number as two reals, an element of a dtype that it lacks as
// bytes.
struct ElementType {
  uint8_t code = 0;            // equal on two ranks if the dtypes are equal
  const char* name = nullptr;  // "ComplexFloat", a literal, or null
  uint8_t units = 1;  // the backend's elements per element of the user's
};

struct CurrentCall {
  const char* operation = nullptr;  // "all_reduce", a literal
  uint64_t number = 0;  // of the collective, as in the group's flight record
  // Counts as `number` does, but leaves out calls that need no order with other
  // collectives, such as reductions of buckets, which another thread may run at
  // the same time. Equal on all ranks that have made the same calls. 0 means no
  // number.
  uint64_t entry = 0;
  // A call with a list of tensors becomes `parts` calls of the backend's
  // protocol. `dtype` is the dtype of the tensor that is exchanged first;
  // `others` are those of the rest, in the order in which they are exchanged.
  uint16_t parts = 1;
  ElementType dtype{};
  std::vector<ElementType> others{};
  // user_function() of the calling thread; nullptr if the user called the
  // collective directly.
  const char* function = nullptr;

  // How many calls of the backend's protocol were begun for this call. If
  // `parts` differs between ranks, parts_left() differs in the first of these
  // calls.
  uint32_t steps = 0;
  uint16_t parts_left() const { return static_cast<uint16_t>(parts - steps); }
  // The dtype of the tensor that the next step exchanges.
  const ElementType& next_dtype() const {
    return steps == 0 || others.empty() ? dtype
           : steps <= others.size()     ? others[steps - 1]
                                        : others.back();
  }
};

// Returns nullptr if the thread is in no collective, or if the backend is used
// without Lockstep's process groups.
CurrentCall* current_call() noexcept;

// Makes `call` the current call of this thread until the scope ends. `call`
// must outlive the scope.
class CurrentCallScope {
 public:
  explicit CurrentCallScope(CurrentCall* call) noexcept;
  ~CurrentCallScope();
  CurrentCallScope(const CurrentCallScope&) = delete;
  CurrentCallScope& operator=(const CurrentCallScope&) = delete;

 private:
  CurrentCall* const before_;
};

// Names the library function that the user called and that makes collectives of
// its own, such as "save_snapshot()". `name` must be a literal. If such objects
// are nested, the outermost name counts.
class UserFunction {
 public:
  explicit UserFunction(const char* name) noexcept;
  ~UserFunction();
  UserFunction(const UserFunction&) = delete;
  UserFunction& operator=(const UserFunction&) = delete;

 private:
  const bool outermost_;
};
const char* user_function() noexcept;  // nullptr if there is none

}  // namespace lockstep::internal
