#include "benchmarks/plain_peers/board.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal::bench {
namespace {

constexpr size_t kEntries = 16'384;
constexpr std::chrono::microseconds kPause{100};

template <size_t size>
void copy_in(std::array<char, size>& to, const std::string& text) {
  if (text.size() >= size) {
    throw std::length_error("\"" + text + "\" is too long for the board");
  }
  std::memcpy(to.data(), text.data(), text.size() + 1);
}

}  // namespace

struct Board::Page {
  struct Entry {
    std::atomic<bool> is_there;
    std::array<char, 127> key;
    std::array<char, 896> value;
  };
  std::atomic<size_t> used;
  std::array<Entry, kEntries> entries;
};

Board::Board() {
  // The mapping begins with zeros; pages that are not written take no memory.
  void* const memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap");
  page_ = static_cast<Page*>(memory);
}

Board::~Board() { munmap(page_, sizeof(Page)); }

shm::Exchange Board::exchange() {
  return {
      .set = [this](const std::string& key,
                    const std::string& value) { set(key, value); },
      .get =
          [this](const std::string& key, std::chrono::milliseconds allowed) {
            return get(key, allowed);
          }};
}

void Board::set(const std::string& key, const std::string& value) {
  const size_t index = page_->used.fetch_add(1);
  if (index >= kEntries) throw std::length_error("the board is full");
  auto& entry = page_->entries[index];
  copy_in(entry.key, key);
  copy_in(entry.value, value);
  // Releases key and value; pairs with the acquire in get().
  entry.is_there.store(true, std::memory_order_release);
}

std::optional<std::string> Board::get(const std::string& key,
                                      std::chrono::milliseconds allowed) {
  const Deadline deadline = Deadline::after(allowed);
  while (true) {
    const size_t used = std::min(page_->used.load(), kEntries);
    for (size_t i = 0; i < used; ++i) {
      const auto& entry = page_->entries[i];
      if (entry.is_there.load(std::memory_order_acquire) &&
          key == entry.key.data()) {
        return entry.value.data();
      }
    }
    if (deadline.expired()) return std::nullopt;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace lockstep::internal::bench
