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

namespace lockstep::internal::shm {

// Memory of this rank that its peers map, and theirs that this rank maps.
// Threads: any.
//
// A loan is a descriptor that is sent over a socket. The rank that receives it
// maps the memory and closes the descriptor at once, so loans that are not used
// cost neither descriptors nor pages. One descriptor is kept in reserve for
// this. If there is none nevertheless, this rank cannot reach the region.
//
// Every call of the group calls look_if_told(). So when a rank has freed
// memory, each peer lets go of it in its next call, whatever that is.
class RegisteredMemory {
 public:
  // `news` is Segment::news().
  RegisteredMemory(const PeerLinks& links, std::atomic<uint32_t>& news,
                   int rank, int size);

  // Makes a region of its own, reserved. Its descriptor goes to every peer at
  // once, or later if the socket is full. Also lets go of memory that the peers
  // have taken back. Throws std::system_error; std::invalid_argument for 0
  // bytes.
  void* allocate(size_t bytes);
  // Frees `data`, which allocate() returned, or does nothing if it is null. The
  // peers let go of it when they next look. Throws only std::invalid_argument,
  // for any other address.
  void free(void* data);

  // Receives what the peers have lent and taken back, so that their sockets to
  // this rank have room again, and sends what they are still to be told. Throws
  // std::system_error.
  void look();
  // Calls look() if there is something to look for; costs two loads if not.
  // Ignores a failure: the call that needs what was missed will fail.
  void look_if_told() {
    if (news_.load(std::memory_order_relaxed) !=
            seen_.load(std::memory_order_relaxed) ||
        undelivered_.load(std::memory_order_relaxed) != 0) {
      try_to_look();
    }
  }

  struct Place {
    uint32_t region;      // 0 if there is none
    bool reached{false};  // settle() was told that every peer reaches it
    uint64_t offset;
  };
  // Returns where [data, data + bytes) lies in this rank's registered memory,
  // if it does, every peer has been sent that region, and no peer is known not
  // to reach it. Sends first what the peers are still to be told; a region that
  // cannot be sent, for whatever reason, is not found.
  std::optional<Place> find(const void* data, size_t bytes);
  // Called after the peers have tried to reach() this rank's region. If some of
  // them do not reach it, find() does not find it any more.
  void settle(Place place, bool reached_by_all);

  // Returns rank `of`'s memory at `place`, which that rank's find() must have
  // returned before. It stays mapped until its owner has freed it and this rank
  // has looked again, and at least as long as the result is held. Throws
  // std::system_error if it could not be mapped, std::runtime_error if it was
  // not sent or is smaller; neither names the rank.
  std::shared_ptr<std::byte> reach(int of, Place place, size_t bytes);

 private:
  struct Region {
    uint32_t id;
    SharedMemory memory;
    int unsent;  // how many peers were not sent it yet
    enum class Reached { unknown, by_all, not_by_all };
    Reached reached = Reached::unknown;
  };
  // The notices that a peer has not had yet. Notices stay in order, so that
  // nothing is taken back before it was lent.
  struct Notice {
    uint32_t id;
    Region* lends;  // null if the region is taken back
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

}  // namespace lockstep::internal::shm
