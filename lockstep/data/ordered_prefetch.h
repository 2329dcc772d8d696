#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"

namespace lockstep::internal {

// Makes items 0, 1, ..., count - 1 on background threads, a bounded number
// ahead, and returns them in that order whatever the threads' timing; pass
// after pass with the same threads. Does not use LibTorch, so that
// ThreadSanitizer can run it.
//
// Threads: begin(), next(), end() and abandon() are called by one thread;
// `produce` by several workers at once.
template <class Item>
class OrderedPrefetch {
 public:
  // At most `ahead` items (>= 1) exist or are being made beyond those that
  // next() has returned, so more workers (>= 1) than that are not started. The
  // workers start with the first pass that has items.
  OrderedPrefetch(int64_t workers, int64_t ahead)
      : workers_(std::min(workers, ahead)), ahead_(ahead) {}

  OrderedPrefetch(const OrderedPrefetch&) = delete;
  OrderedPrefetch& operator=(const OrderedPrefetch&) = delete;

  // Blocks until the items that are being made have been finished.
  ~OrderedPrefetch() {
    if (is_foreign()) {
      // The workers, and what they hold or wait for, are the parent's. Waiting
      // for them here would never end.
      static_cast<void>(shared_.release());
      return;
    }
    abandon();
    {
      std::lock_guard lock(shared_->mutex);
      shared_->quit = true;
    }
    shared_->work_there.notify_all();
    for (auto& thread : shared_->threads) thread.join();
  }

  // Begins a pass. Requires that there is none, or that it was ended or
  // abandoned. Throws std::system_error if the system has no thread left, and
  // std::runtime_error in a child process that was forked after the workers had
  // started.
  void begin(int64_t count, std::function<Item(int64_t)> produce) {
    require_own_process();
    auto pass = std::make_shared<Pass>();
    pass->produce = std::move(produce);
    pass->count = count;
    pass->slots.resize(
        static_cast<size_t>(std::max<int64_t>(std::min(ahead_, count), 1)));
    if (count > 0) start_workers();
    {
      std::lock_guard lock(shared_->mutex);
      shared_->pass = std::move(pass);
    }
    shared_->work_there.notify_all();
  }

  // Returns the next item of the pass. Blocks until the item exists, but not
  // longer than `timeout` (returns none then); none means no limit. Throws what
  // `produce` threw for this item, also if called again, and as begin().
  // Requires that fewer than `count` items of the pass were taken.
  std::optional<Item> next(
      std::optional<std::chrono::milliseconds> timeout = {}) {
    require_own_process();
    std::unique_lock lock(shared_->mutex);
    Pass& pass = *shared_->pass;
    Slot& slot = pass.slot(pass.taken);
    auto ready = [&] { return slot.item || slot.error; };
    if (!timeout) {
      shared_->item_ready.wait(lock, ready);
    } else if (!shared_->item_ready.wait_for(lock, bounded_timeout(*timeout),
                                             ready)) {
      return std::nullopt;
    }
    if (slot.error) std::rethrow_exception(slot.error);
    std::optional<Item> item = std::exchange(slot.item, std::nullopt);
    ++pass.taken;
    const bool has_more = pass.started < pass.count;
    lock.unlock();
    if (has_more) shared_->work_there.notify_one();
    return item;
  }

  // Ends the pass. Blocks until the items that are being made have been
  // finished; afterwards no worker uses `produce`, and no item is left. Does
  // nothing if there is no pass.
  void end() {
    if (is_foreign()) return;
    std::shared_ptr<Pass> pass;
    {
      std::unique_lock lock(shared_->mutex);
      if (!shared_->pass) return;
      pass = std::exchange(shared_->pass, nullptr);
      pass->stopped = true;
      shared_->pass_left.wait(lock, [&] { return pass->running == 0; });
    }
    // The items end here, without the lock.
  }

  // Ends the pass without waiting. What is being made is thrown away when it is
  // finished; until then workers use `produce`, which must stay valid.
  void abandon() {
    if (is_foreign()) return;
    std::shared_ptr<Pass> pass;
    std::lock_guard lock(shared_->mutex);
    if (shared_->pass) shared_->pass->stopped = true;
    pass = std::exchange(shared_->pass, nullptr);
  }

  // Returns how many threads were started.
  int64_t threads() const {
    return static_cast<int64_t>(shared_->threads.size());
  }

 private:
  struct Slot {
    std::optional<Item> item;
    std::exception_ptr error;
  };

  // A worker that makes an item keeps its pass alive, so that a pass can be
  // abandoned. All but `produce` and `count` is guarded by
  // Shared::mutex.
  struct Pass {
    Slot& slot(int64_t index) {
      return slots[static_cast<size_t>(index) % slots.size()];
    }
    // Whether there is an item to make, and a free slot for it: the slot is
    // free if item `started - slots.size()`, which was in it, has been taken.
    bool has_work() const {
      return !stopped && started < count &&
             started < taken + static_cast<int64_t>(slots.size());
    }

    std::function<Item(int64_t)> produce;
    int64_t count = 0;
    std::vector<Slot> slots;  // item i lies in slot i % size
    int64_t started = 0;
    int64_t taken = 0;
    int64_t running = 0;  // workers that make an item
    bool stopped = false;
  };

  // The state that the workers share with the thread that calls begin().
  struct Shared {
    std::mutex mutex;  // guards all but `threads`
    std::condition_variable item_ready;
    std::condition_variable work_there;
    std::condition_variable pass_left;
    std::shared_ptr<Pass> pass;
    bool quit = false;
    std::vector<std::thread> threads;
  };

  bool is_foreign() const { return started_in_ && started_in_->is_foreign(); }
  void require_own_process() const {
    if (!is_foreign()) return;
    throw std::runtime_error(
        "DataLoader: the workers of this loader belong to the process from "
        "which this one was forked; make a loader in this process");
  }

  void start_workers() {
    if (!started_in_) started_in_.emplace();
    while (threads() < workers_) {
      shared_->threads.emplace_back([this] { work(); });
    }
  }

  void work() {
    std::unique_lock lock(shared_->mutex);
    while (true) {
      shared_->work_there.wait(lock, [&] {
        return shared_->quit || (shared_->pass && shared_->pass->has_work());
      });
      if (shared_->quit) return;
      std::shared_ptr<Pass> pass = shared_->pass;
      const int64_t index = pass->started++;
      ++pass->running;
      lock.unlock();
      Slot made;
      try {
        made.item.emplace(pass->produce(index));
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      // next() never gets past a failed item, so no later one is needed.
      if (made.error) pass->stopped = true;
      if (pass == shared_->pass) {
        --pass->running;
        pass->slot(index) = std::move(made);
        shared_->item_ready.notify_one();
      } else {
        // The pass was ended or abandoned. The item is destroyed without the
        // lock, and before end() returns.
        lock.unlock();
        made = {};
        lock.lock();
        if (--pass->running == 0) shared_->pass_left.notify_all();
        // The last worker in an abandoned pass destroys it, without the lock.
        // While end() waits, it has the pass, too, and this is not the last
        // reference: it is given back before the lock is.
        const bool is_last = pass.use_count() == 1;
        if (is_last) lock.unlock();
        pass.reset();
        if (is_last) lock.lock();
      }
    }
  }

  const int64_t workers_;
  const int64_t ahead_;
  std::optional<ProcessMark> started_in_;
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
};

}  // namespace lockstep::internal
