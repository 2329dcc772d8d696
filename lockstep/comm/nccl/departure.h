#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::nccl {

// The word of a rank that leaves a group by an error. NCCL has none between
// GPUs of one host: kernels of the others wait for the one that is gone.
//
// Keys, in the store of the group and its device type:
//   lockstep/left        the rank that left
//   lockstep/heard       how many of the others have read it
//   lockstep/all_heard   that all have
//
// Threads: one of its own looks for the first key ten times a second.
// announce() and stop() are called from one thread at a time.
class Departure {
 public:
  // Of a group of `size` ranks; takes a connection of its own (Store::clone).
  // `on_departure` is called once at most, from the thread, with the number
  // that the other gave announce(); it throws nothing and calls neither
  // announce() nor stop().
  Departure(const c10::intrusive_ptr<c10d::Store>& store, int size,
            std::function<void(int rank)> on_departure);
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;
  ~Departure();

  // Tells the others that `rank` leaves, unless another was first, and stops.
  // Blocks until all have heard, for they must before the host of the store
  // leaves: 1 s at most. Throws nothing: where the store is gone there is
  // nobody to tell.
  void announce(int rank);

  // Ends the watch; blocks for an answer of the store at most, and for
  // on_departure.
  void stop();

  // Whether another rank's word has come.
  bool seen() const { return seen_; }

 private:
  void watch(const std::stop_token& stop);

  c10::intrusive_ptr<c10d::Store> store_;
  int size_;
  std::function<void(int rank)> on_departure_;
  std::atomic<bool> seen_{false};
  std::jthread thread_;  // the last: it uses the others
};

}  // namespace lockstep::nccl
