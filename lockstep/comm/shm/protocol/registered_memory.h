#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
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
class RegisteredMemory {
 public:
  RegisteredMemory(const PeerLinks& links, int rank, int size);

  // A region of its own, reserved; its descriptor goes to every peer at once,
  // or later where the way is full. Also lets go of what the peers have taken
  // back. Throws std::system_error, std::invalid_argument for 0 bytes.
  void* allocate(size_t bytes);
  // What allocate() returned, or null. The peers let go of it when they next
  // look. Throws std::invalid_argument for anything else, and nothing more.
  void free(void* data);

  // Takes in what the peers have lent and taken back, so that their way to
  // this rank is free again.
  void look();

  struct Place {
    uint32_t region;  // never 0
    uint64_t offset;
  };
  // Where [data, data + bytes) lies in this rank's registered memory, if it
  // does and every peer has been sent it.
  std::optional<Place> find(const void* data, size_t bytes);

  // Rank `of`'s memory at `place`, mapped when first asked for. It was found
  // by its owner before this is called, and stays until its owner has freed it
  // and this rank looks again, but as long as the result is held at least.
  // Throws std::system_error if it cannot be mapped, std::runtime_error if it
  // was not sent or is smaller.
  std::shared_ptr<std::byte> reach(int of, Place place, size_t bytes);

 private:
  struct Region {
    uint32_t id;
    SharedMemory memory;
    int unsent;  // peers that do not know of it yet
  };
  // What a peer is still to be told. In order: nothing is taken back before it
  // was lent.
  struct Notice {
    uint32_t id;
    Region* lends;  // null: taken back
  };
  // A peer's region: first its descriptor, then the mapping.
  struct Borrowed {
    uint64_t bytes;
    FileDescriptor descriptor{};
    std::shared_ptr<SharedMemory> memory{};
  };
  using Regions = std::map<const std::byte*, Region>;

  uint32_t new_id();
  void deliver();
  void remove(Regions::iterator region);
  void receive(int from);
  void receive_all();
  Regions::iterator region_of(const void* data);
  std::byte* own(Place place, size_t bytes);

  const PeerLinks& links_;
  const int rank_;
  const int size_;
  std::mutex mutex_;
  Regions regions_{};  // by where they begin
  std::map<std::pair<int, uint32_t>, Borrowed> borrowed_{};  // by owner and id
  std::vector<std::deque<Notice>> notices_;                  // by peer
  size_t undelivered_ = 0;  // notices of all peers
  uint32_t finds_ = 0;
  uint32_t last_id_ = 0;
};

}  // namespace lockstep::shm
