#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm {

enum class CollectiveKind : uint8_t;

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
// So calls of about the same size are compared: 16 of them are done in the one
// way or the other, by chance, and the least times decide, as a rank that was
// preempted makes a call long. A way that was not the best before, and is far
// from it, is tried twice only. Then follow 64 calls in the better way, four
// times as many each time the other way is not better again, at most 512; and
// fewer if several calls in a row are slow, as when the cores have moved.
class StagingStores {
 public:
  // Returns how to write in the next such call; `bytes` are those of the call.
  kernels::Stores next(CollectiveKind kind, size_t bytes);
  // Tells how long that call took, from the last announcement to its end.
  void took(CollectiveKind kind, size_t bytes, std::chrono::nanoseconds time);

 private:
  // The calls of a comparison that were done in one way.
  struct Tried {
    int calls = 0;
    double least = std::numeric_limits<double>::infinity();  // ns per byte
  };
  struct Calls {
    kernels::Stores best = kernels::Stores::cached;
    kernels::Stores next = kernels::Stores::cached;
    std::array<Tried, 2> tried{};  // by kernels::Stores
    int left = 0;                  // calls until the next comparison
    int pause = 0;                 // calls between the last one and that
    double usual = 0;              // the least of `best` in the last one
    int slow = 0;                  // calls in a row that took longer
  };
  static std::pair<CollectiveKind, int> key(CollectiveKind kind, size_t bytes);
  kernels::Stores draw();
  static void compare(Calls& calls, double time);

  std::map<std::pair<CollectiveKind, int>, Calls> calls_;
  uint32_t random_ = 1;
};

}  // namespace lockstep::internal::shm
