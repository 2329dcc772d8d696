#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm {

enum class CollectiveKind : uint8_t;

// Calls that are alike, so that their times can be compared.
struct StagedCalls {
  CollectiveKind kind{};
  kernels::DType dtype{};
  size_t bytes = 0;  // the next power of two counts
};

// How a rank writes what its peers will read from staging memory: by what
// earlier calls took. One object per group and rank, for one thread at a time.
//
// Through the caches is best if the ranks' cores share one. If they do not (two
// sockets, or two parts of a processor with a last level each), each line that
// the peer has read must be taken back from its cache before it is written
// again, and writing past the caches took half the time. Nothing tells which it
// is: a virtual machine does not know its host's caches, and its cores move
// between them while a program runs.
//
// So calls that are alike are compared: 16 of them are done in the one way or
// the other, by chance, and the least times decide, as a rank that was
// preempted makes a call long. A way that was not the best before, and is far
// from it, is tried twice only. Then follow 64 calls in the better way, four
// times as many each time the other way is not better again, at most 512; and
// fewer if several calls in a row are slow, as when the cores have moved.
class StagingStores {
 public:
  // Returns how to write in the next such call.
  kernels::Stores next(const StagedCalls& calls);
  // Tells how long that call took, from the last announcement to its end.
  void took(const StagedCalls& calls, std::chrono::nanoseconds time);

 private:
  // The calls of a comparison that were done in one way.
  struct Tried {
    int calls = 0;
    double least = std::numeric_limits<double>::infinity();  // ns per byte
  };
  struct Choice {
    kernels::Stores best = kernels::Stores::cached;
    kernels::Stores next = kernels::Stores::cached;
    std::array<Tried, 2> tried{};  // by kernels::Stores
    int left = 0;                  // calls until the next comparison
    int pause = 0;                 // calls between the last one and that
    double usual = 0;              // the least of `best` in the last one
    int slow = 0;                  // calls in a row that took longer
  };
  using Key = std::tuple<CollectiveKind, kernels::DType, int>;
  static Key key(const StagedCalls& calls);
  kernels::Stores draw();
  static void compare(Choice& choice, double time);

  std::map<Key, Choice> choices_;
  uint32_t random_ = 1;
};

}  // namespace lockstep::internal::shm
