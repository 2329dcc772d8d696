#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep::internal {

// How many bytes of something exist now, and the most there have been. Threads:
// any; no thread waits. A peak is never lower than what was in use at some
// moment, and never higher than what all threads had added by then.
class ByteCount {
 public:
  void add(int64_t bytes) noexcept {
    const int64_t now =
        used_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t peak = peak_.load(std::memory_order_relaxed);
    while (peak < now &&
           !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  void remove(int64_t bytes) noexcept {
    used_.fetch_sub(bytes, std::memory_order_relaxed);
  }

  int64_t used() const noexcept {
    return used_.load(std::memory_order_relaxed);
  }
  // The most since reset_peak().
  int64_t peak() const noexcept {
    return peak_.load(std::memory_order_relaxed);
  }
  void reset_peak() noexcept { peak_.store(used(), std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> used_{0};
  std::atomic<int64_t> peak_{0};
};

}  // namespace lockstep::internal
