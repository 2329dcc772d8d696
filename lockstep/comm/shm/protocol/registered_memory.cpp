#include "lockstep/comm/shm/protocol/registered_memory.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>

namespace lockstep::internal::shm {
namespace {

FileDescriptor spare_descriptor() {
  return FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

// Does not name the owner: only the caller knows the name that it has in error
// texts.
std::string place_name(RegisteredMemory::Place place, size_t bytes) {
  return std::to_string(bytes) + " bytes at " + std::to_string(place.offset) +
         " of region " + std::to_string(place.region);
}

bool lies_within(RegisteredMemory::Place place, size_t bytes, uint64_t size) {
  return place.offset <= size && bytes <= size - place.offset;
}

}  // namespace

RegisteredMemory::RegisteredMemory(const PeerLinks& links,
                                   std::atomic<uint32_t>& news, int rank,
                                   int size)
    : links_(links),
      news_(news),
      rank_(rank),
      size_(size),
      reserve_(spare_descriptor()),
      notices_(size) {}

void* RegisteredMemory::allocate(size_t bytes) {
  if (bytes == 0) {
    throw std::invalid_argument(
        "0 bytes of registered memory were asked for; ask for 1 or more");
  }
  {
    // Look first: what the peers have freed may be the memory that is missing.
    std::lock_guard lock(mutex_);
    receive_all();
  }
  // This is not done under the lock: it takes a while, and reductions need the
  // lock.
  auto memory = SharedMemory::create(bytes);
  auto* data = memory.data();
  std::lock_guard lock(mutex_);
  const auto region = regions_
                          .try_emplace(data, Region{.id = new_id(),
                                                    .memory = std::move(memory),
                                                    .unsent = size_ - 1})
                          .first;
  if (size_ == 1) region->second.memory.close_descriptor();  // for nobody
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    notices_[peer].push_back(
        {.id = region->second.id, .lends = &region->second});
    ++undelivered_;
  }
  try {
    deliver();
  } catch (...) {
    remove(region);
    throw;
  }
  return data;
}

void RegisteredMemory::free(void* data) {
  if (data == nullptr) return;
  std::lock_guard lock(mutex_);
  const auto region = regions_.find(static_cast<const std::byte*>(data));
  if (region == regions_.end()) {
    throw std::invalid_argument(
        "the address to free is not the beginning of registered memory of "
        "this group");
  }
  remove(region);
  try {
    deliver();
    receive_all();
  } catch (const std::system_error&) {
    // The peers are told at the next occasion. Nothing is thrown, because the
    // caller is often a destructor.
  }
}

void RegisteredMemory::look() {
  std::lock_guard lock(mutex_);
  deliver();
  receive_all();
}

void RegisteredMemory::try_to_look() {
  try {
    look();
  } catch (const std::exception&) {
    // reach() finds out what was missed.
  }
}

std::optional<RegisteredMemory::Place> RegisteredMemory::find(const void* data,
                                                              size_t bytes) {
  std::lock_guard lock(mutex_);
  if (undelivered_ != 0) {
    try {
      deliver();
    } catch (const std::system_error&) {
      // A region that cannot be lent is not found, so it is staged.
    }
  }
  const auto found = region_of(data);
  if (found == regions_.end()) return std::nullopt;
  const auto& [begin, region] = *found;
  const Place place{.region = region.id,
                    .reached = region.reached == Region::Reached::by_all,
                    .offset = static_cast<uint64_t>(
                        static_cast<const std::byte*>(data) - begin)};
  if (region.unsent != 0 || region.reached == Region::Reached::not_by_all ||
      !lies_within(place, bytes, region.memory.size())) {
    return std::nullopt;
  }
  return place;
}

void RegisteredMemory::settle(Place place, bool reached_by_all) {
  std::lock_guard lock(mutex_);
  for (auto& [begin, region] : regions_) {
    if (region.id != place.region) continue;
    region.reached =
        reached_by_all ? Region::Reached::by_all : Region::Reached::not_by_all;
  }
}

std::shared_ptr<std::byte> RegisteredMemory::reach(int of, Place place,
                                                   size_t bytes) {
  std::lock_guard lock(mutex_);
  if (of == rank_) return {std::shared_ptr<void>(), own(place, bytes)};
  const auto key = std::pair(of, place.region);
  auto found = borrowed_.find(key);
  if (found == borrowed_.end()) {
    receive(of);
    found = borrowed_.find(key);
  }
  if (found == borrowed_.end()) {
    throw std::runtime_error(place_name(place, bytes) +
                             " were not lent to this rank");
  }
  auto& borrowed = found->second;
  if (!lies_within(place, bytes, borrowed.bytes)) {
    throw std::runtime_error(place_name(place, bytes) + " lie outside of the " +
                             std::to_string(borrowed.bytes) +
                             " bytes that were lent");
  }
  if (borrowed.failure) std::rethrow_exception(borrowed.failure);
  if (!std::exchange(borrowed.touched, true)) borrowed.memory->touch();
  return {borrowed.memory, borrowed.memory->data() + place.offset};
}

std::byte* RegisteredMemory::own(Place place, size_t bytes) {
  for (const auto& [begin, region] : regions_) {
    if (region.id == place.region &&
        lies_within(place, bytes, region.memory.size())) {
      return region.memory.data() + place.offset;
    }
  }
  throw std::runtime_error(place_name(place, bytes) + " are not registered");
}

// The region that begins at or before `data`.
RegisteredMemory::Regions::iterator RegisteredMemory::region_of(
    const void* data) {
  const auto after = regions_.upper_bound(static_cast<const std::byte*>(data));
  return after == regions_.begin() ? regions_.end() : std::prev(after);
}

// Returns an id that no region of this rank has: ids come again after 2^32 of
// them.
uint32_t RegisteredMemory::new_id() {
  const auto taken = [&](uint32_t id) {
    return std::ranges::any_of(
        regions_, [&](const auto& entry) { return entry.second.id == id; });
  };
  do {
    ++last_id_;
  } while (last_id_ == 0 || taken(last_id_));
  return last_id_;
}

// Sends as many notices as the sockets take.
void RegisteredMemory::deliver() {
  for (int peer = 0; peer < size_ && undelivered_ != 0; ++peer) {
    auto& notices = notices_[peer];
    while (!notices.empty()) {
      const auto [id, lends] = notices.front();
      const bool sent = lends != nullptr ? links_.lend(peer, id, lends->memory)
                                         : links_.take_back(peer, id);
      if (!sent) break;
      // Counted after the socket has the notice. Pairs with the acquire in
      // receive_all().
      news_.fetch_add(1, std::memory_order_release);
      notices.pop_front();
      --undelivered_;
      if (lends != nullptr && --lends->unsent == 0) {
        lends->memory.close_descriptor();
      }
    }
  }
}

void RegisteredMemory::remove(Regions::iterator region) {
  const auto id = region->second.id;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    // If a peer has not heard of the region, it never will.
    auto& notices = notices_[peer];
    const auto unheard =
        std::ranges::find(notices, &region->second, &Notice::lends);
    if (unheard != notices.end()) {
      notices.erase(unheard);
      --undelivered_;
    } else {
      notices.push_back({.id = id, .lends = nullptr});
      ++undelivered_;
    }
  }
  regions_.erase(region);
}

RegisteredMemory::Borrowed RegisteredMemory::borrowed(PeerLinks::Loan loan) {
  Borrowed result{.bytes = loan.bytes};
  try {
    if (!loan.memory) {
      errno = EMFILE;
      throw_errno("the descriptor of " + std::to_string(loan.bytes) +
                  " bytes of a peer's registered memory could not be received");
    }
    result.memory = std::make_shared<SharedMemory>(SharedMemory::map(
        std::move(loan.memory), loan.bytes, SharedMemory::Pages::none));
    result.memory->close_descriptor();
  } catch (const std::exception&) {
    result.failure = std::current_exception();
  }
  return result;
}

void RegisteredMemory::receive(int from) {
  reserve_.reset();
  while (auto loan = links_.receive(from)) {
    const auto key = std::pair(from, static_cast<uint32_t>(loan->id));
    if (loan->bytes == 0) {
      borrowed_.erase(key);
    } else {
      borrowed_.insert_or_assign(key, borrowed(std::move(*loan)));
    }
  }
  reserve_ = spare_descriptor();
}

void RegisteredMemory::receive_all() {
  // Read the count before looking, so that what is sent meanwhile is looked for
  // again. Pairs with the release in deliver().
  seen_.store(news_.load(std::memory_order_acquire), std::memory_order_relaxed);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) receive(peer);
  }
}

}  // namespace lockstep::internal::shm
