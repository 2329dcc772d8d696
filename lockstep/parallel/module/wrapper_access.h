#pragma once

#include <utility>

namespace lockstep::internal {

// The ways into a wrapper for other parts of Lockstep; its user has none.
struct WrapperAccess {
  // The DdpState of a DistributedDataParallel.
  template <typename Wrapper>
  static auto& state(Wrapper& wrapper) {
    return *wrapper.state_;
  }
  // The ShardedUnit of a FullyShard, as a std::shared_ptr.
  template <typename Wrapper>
  static const auto& unit(const Wrapper& wrapper) {
    return wrapper.unit_;
  }
  // Runs `forward(module, args...)` with what the wrapper does before and after
  // it, and returns its result.
  template <typename Wrapper, typename Forward, typename... Args>
  static decltype(auto) run(Wrapper& wrapper, const Forward& forward,
                            Args&&... args) {
    return wrapper.run(forward, std::forward<Args>(args)...);
  }
};

}  // namespace lockstep::internal
