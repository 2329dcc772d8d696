#pragma once

#include <cstddef>
#include <new>
#include <utility>

namespace lockstep::internal {

// Holds a static object that is never destroyed, because threads, or static
// objects of LibTorch, may use it when main() has ended.
template <typename T>
class NoDestructor {
 public:
  template <typename... Arguments>
  explicit NoDestructor(Arguments&&... arguments) {
    ::new (static_cast<void*>(place_)) T(std::forward<Arguments>(arguments)...);
  }
  NoDestructor(const NoDestructor&) = delete;
  NoDestructor& operator=(const NoDestructor&) = delete;

  T& operator*() { return *std::launder(reinterpret_cast<T*>(place_)); }

 private:
  alignas(T) std::byte place_[sizeof(T)];
};

}  // namespace lockstep::internal
