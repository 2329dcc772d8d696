#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep {

// Makes items 0, 1, ..., count - 1 on background threads, a bounded number
// ahead, and hands them out in that order whatever the threads' timing.
// Needs nothing but the standard library (ThreadSanitizer runs it).
//
// Threads: next() is called by one thread; `produce` by all workers, at once.
template <class Item>
class OrderedPrefetch {
 public:
  // At most `ahead` items (>= 1) exist or are being made beyond those that
  // next() has returned. Workers beyond `ahead` or `count` are not started.
  OrderedPrefetch(int64_t count, int64_t workers, int64_t ahead,
                  std::function<Item(int64_t)> produce)
      : produce_(std::move(produce)),
        count_(count),
        slots_(
            static_cast<size_t>(std::max<int64_t>(std::min(ahead, count), 1))) {
    workers = std::min({workers, count, static_cast<int64_t>(slots_.size())});
    try {
      for (int64_t i = 0; i < workers; ++i) {
        threads_.emplace_back([this] { work(); });
      }
    } catch (...) {
      join();
      throw;
    }
  }

  OrderedPrefetch(const OrderedPrefetch&) = delete;
  OrderedPrefetch& operator=(const OrderedPrefetch&) = delete;

  // Blocks until the items that are being made just now are done.
  ~OrderedPrefetch() { join(); }

  // The next item. Blocks until it is there, for `timeout` at most (nothing is
  // returned then); zero waits as long as it takes. Throws what `produce` threw
  // for this item, and again if asked again. Requires that fewer than `count`
  // were taken.
  std::optional<Item> next(std::chrono::milliseconds timeout = {}) {
    std::unique_lock lock(mutex_);
    Slot& slot = slots_[static_cast<size_t>(taken_) % slots_.size()];
    auto ready = [&] { return slot.item || slot.error; };
    if (timeout.count() == 0) {
      item_ready_.wait(lock, ready);
    } else if (!item_ready_.wait_for(lock, bounded_timeout(timeout), ready)) {
      return std::nullopt;
    }
    if (slot.error) std::rethrow_exception(slot.error);
    std::optional<Item> item = std::exchange(slot.item, std::nullopt);
    ++taken_;
    lock.unlock();
    slot_free_.notify_one();
    return item;
  }

 private:
  struct Slot {
    std::optional<Item> item;
    std::exception_ptr error;
  };

  void work() {
    const auto size = static_cast<int64_t>(slots_.size());
    std::unique_lock lock(mutex_);
    while (true) {
      slot_free_.wait(lock, [&] {
        return stop_ || started_ == count_ || started_ < taken_ + size;
      });
      if (stop_ || started_ == count_) return;
      // The slot is free: the item that had it, `size` before, was taken.
      const int64_t index = started_++;
      lock.unlock();
      Slot made;
      try {
        made.item.emplace(produce_(index));
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      // Items after a failed one will never be asked for.
      if (made.error) stop_ = true;
      slots_[static_cast<size_t>(index % size)] = std::move(made);
      item_ready_.notify_one();
      // Whoever sleeps must see that all are started, or the stop.
      if (stop_ || started_ == count_) slot_free_.notify_all();
    }
  }

  void join() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    slot_free_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  const std::function<Item(int64_t)> produce_;
  const int64_t count_;

  std::mutex mutex_;  // guards all below but threads_
  std::condition_variable item_ready_;
  std::condition_variable slot_free_;
  std::vector<Slot> slots_;  // item i lies in slot i % size
  int64_t started_ = 0;
  int64_t taken_ = 0;
  bool stop_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace lockstep
