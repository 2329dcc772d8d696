#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::internal::nccl {

// Notices of ranks that leave a group because of an error. NCCL gives none
// between GPUs of one host: kernels of the other ranks wait for the rank that
// is gone.
//
// Key, in the store of the group and its device type: "lockstep/left" is the
// rank that left (last_words.h).
//
// Threads: a thread of this object looks for the first key ten times a second.
// announce() and stop() are called from one thread at a time.
class Departure {
 public:
  // The group has `size` ranks. Takes a connection of its own to the store
  // (Store::clone). `on_departure` is called at most once, from the thread,
  // with the number that the other rank gave to announce(), when all ranks have
  // read it, or after 1 s; it must throw nothing and call neither announce()
  // nor stop().
  Departure(const c10::intrusive_ptr<c10d::Store>& store, int size,
            std::function<void(int rank)> on_departure);
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;
  ~Departure();

  // Stops, and tells the others that `rank` leaves, unless another rank was
  // first. Blocks until all have read that, for 1 s at most: they must read it
  // before the rank that hosts the store leaves. Throws nothing: if the store
  // is gone, the others cannot be told.
  void announce(int rank);

  // Ends the watch. Blocks at most for one answer of the store, or until all
  // ranks have read a notice (1 s) and on_departure has returned.
  void stop();

  // Whether another rank has announced that it leaves.
  bool seen() const { return seen_; }

 private:
  void watch(const std::stop_token& stop);
  void let_all_hear();

  c10::intrusive_ptr<c10d::Store> store_;
  int size_;
  std::function<void(int rank)> on_departure_;
  std::atomic<bool> seen_{false};
  std::jthread thread_;  // the last member, as it uses the others
};

}  // namespace lockstep::internal::nccl
