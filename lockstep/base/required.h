#pragma once

#include <initializer_list>
#include <utility>

namespace lockstep {

// An option that has no default: a program that leaves it out does not compile.
//
//   struct StepLROptions {
//     Required<int64_t> step_size;
//     double gamma{0.1};
//   };
//
//   StepLR scheduler(optimizer, {.step_size = 30});
template <class T>
class Required {
 public:
  Required() = delete;
  Required(T value) : value_(std::move(value)) {}
  template <class List = T>
  Required(std::initializer_list<typename List::value_type> values)
      : value_(values) {}

  operator const T&() const { return value_; }

 private:
  T value_;
};

}  // namespace lockstep
