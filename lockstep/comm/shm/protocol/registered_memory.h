#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/comm/shm/protocol/peer_links.h"

namespace lockstep::shm {

// Memory of this rank that its peers map, and theirs that this rank maps.
// Threads: any.
//
// A loan is a descriptor that a socket carries. Who receives it maps the memory
// and closes the descriptor at once, so that loans that nobody uses cost
// neither descriptors nor pages. One descriptor is kept in reserve for that; if
// there is none nevertheless, the region cannot be reached by this rank.
//
// Every call of the group calls look_if_told(): what a rank has freed is let go
// of by each peer in its next call, whatever that is.
class RegisteredMemory {
 public:
  // `news`: Segment::news().
  RegisteredMemory(const PeerLinks& links, std::atomic<uint32_t>& news,
                   int rank, int size);

  // A region of its own, reserved; its descriptor goes to every peer at once,
  // or later where the way is full. Also lets go of what the peers have taken
  // back. Throws std::system_error, std::invalid_argument for 0 bytes.
  void* allocate(size_t bytes);
  // What allocate() returned, or null. The peers let go of it when they next
  // look. Throws std::invalid_argument for anything else, and nothing more.
  void free(void* data);

  // Takes in what the peers have lent and taken back, so that their way to
  // this rank is free again, and sends what they are still to be told. Throws
  // std::system_error.
  void look();
  // The same if there is something to look for: two loads if not. A failure is
  // left to whoever needs what was missed.
  void look_if_told() {
    if (news_.load(std::memory_order_relaxed) !=
            seen_.load(std::memory_order_relaxed) ||
        undelivered_.load(std::memory_order_relaxed) != 0) {
      try_to_look();
    }
  }

  struct Place {
    uint32_t region;      // never 0
    bool reached{false};  // by every peer: settle() was told so
    uint64_t offset;
  };
  // Where [data, data + bytes) lies in this rank's registered memory, if it
  // does, every peer has been sent it, and none is known not to reach it.
  std::optional<Place> find(const void* data, size_t bytes);
  // The peers have tried to reach() this rank's region. One that some of them
  // do not reach is not found any more.
  void settle(Place place, bool reached_by_all);

  // Rank `of`'s memory at `place`. It was found by its owner before this is
  // called, and stays until its owner has freed it and this rank looks again,
  // but as long as the result is held at least. Throws std::system_error if it
  // could not be mapped, std::runtime_error if it was not sent or is smaller.
  std::shared_ptr<std::byte> reach(int of, Place place, size_t bytes);

 private:
  struct Region {
    uint32_t id;
    SharedMemory memory;
    int unsent;  // peers that do not know of it yet
    enum class Reached { unknown, by_all, not_by_all };
    Reached reached = Reached::unknown;
  };
  // What a peer is still to be told. In order: nothing is taken back before it
  // was lent.
  struct Notice {
    uint32_t id;
    Region* lends;  // null: taken back
  };
  // A peer's region, mapped, or why it is not.
  struct Borrowed {
    uint64_t bytes;
    std::shared_ptr<SharedMemory> memory{};
    std::exception_ptr failure{};
    bool touched = false;
  };
  using Regions = std::map<const std::byte*, Region>;

  void try_to_look();
  static Borrowed borrowed(PeerLinks::Loan loan);
  uint32_t new_id();
  void deliver();
  void remove(Regions::iterator region);
  void receive(int from);
  void receive_all();
  Regions::iterator region_of(const void* data);
  std::byte* own(Place place, size_t bytes);

  const PeerLinks& links_;
  std::atomic<uint32_t>& news_;
  const int rank_;
  const int size_;
  std::mutex mutex_;
  FileDescriptor reserve_;  // makes room for the descriptor of a loan
  Regions regions_{};       // by where they begin
  std::map<std::pair<int, uint32_t>, Borrowed> borrowed_{};  // by owner and id
  std::vector<std::deque<Notice>> notices_;                  // by peer
  std::atomic<size_t> undelivered_{0};  // notices of all peers
  std::atomic<uint32_t> seen_{0};       // what news_ was at the last look
  uint32_t last_id_ = 0;
};

}  // namespace lockstep::shm
