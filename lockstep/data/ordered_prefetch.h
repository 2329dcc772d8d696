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

namespace lockstep::internal {

// Makes items 0, 1, ..., count - 1 on background threads, a bounded number
// ahead, and returns them in that order whatever the threads' timing. Uses
// nothing but the standard library, so that ThreadSanitizer can run it.
//
// Threads: next() is called by one thread; `produce` by several workers at
// once.
template <class Item>
class OrderedPrefetch {
 public:
  // At most `ahead` items (>= 1) exist or are being made beyond those that
  // next() has returned. More workers than `ahead` or `count` are not started.
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

  // Blocks until the items that are being made have been finished.
  ~OrderedPrefetch() { join(); }

  // Returns the next item. Blocks until the item exists, but not longer than
  // `timeout` (returns none then); none means no limit. Throws what `produce`
  // threw for this item, also if called again. Requires that fewer than `count`
  // items were taken.
  std::optional<Item> next(
      std::optional<std::chrono::milliseconds> timeout = {}) {
    std::unique_lock lock(mutex_);
    Slot& slot = slots_[static_cast<size_t>(taken_) % slots_.size()];
    auto ready = [&] { return slot.item || slot.error; };
    if (!timeout) {
      item_ready_.wait(lock, ready);
    } else if (!item_ready_.wait_for(lock, bounded_timeout(*timeout), ready)) {
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
      // The slot is free: item `index - size`, which was in it, has been taken.
      const int64_t index = started_++;
      lock.unlock();
      Slot made;
      try {
        made.item.emplace(produce_(index));
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      // next() never gets past a failed item, so no later one is needed.
      if (made.error) stop_ = true;
      slots_[static_cast<size_t>(index % size)] = std::move(made);
      item_ready_.notify_one();
      // Workers that sleep must see that all items were started, or the stop.
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

  std::mutex mutex_;  // guards all members below except threads_
  std::condition_variable item_ready_;
  std::condition_variable slot_free_;
  std::vector<Slot> slots_;  // item i lies in slot i % size
  int64_t started_ = 0;
  int64_t taken_ = 0;
  bool stop_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace lockstep::internal
