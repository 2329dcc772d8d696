#include "lockstep/base/status_board.h"

#include <sys/stat.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/base/futex.h"
#include "lockstep/base/steady_ns.h"

namespace lockstep::internal {
namespace {

// Changes with the layout of the board.
constexpr uint64_t kVersion = 0x6c6f636b73743033;
constexpr uint32_t kAnyReason = ~uint32_t{0};
constexpr int kReadAttempts = 100;

constexpr size_t kWords = sizeof(RankStatus) / sizeof(uint64_t);
static_assert(std::is_trivially_copyable_v<RankStatus>);
static_assert(sizeof(RankStatus) % sizeof(uint64_t) == 0);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

std::string operation_text(std::string_view name, int64_t number,
                           std::string_view group) {
  std::string text(name);
  if (number > 0) text += " " + std::to_string(number);
  return text + " (" + std::string(group) + ")";
}

}  // namespace

std::string current_operation(const RankStatus& status) {
  if (status.current_since_ns == 0) return {};
  return operation_text(status.current_operation.view(), status.current_number,
                        status.current_group.view());
}

std::string last_operation(const RankStatus& status) {
  if (status.last_operation_ns == 0) return {};
  return operation_text(status.last_operation.view(), status.last_number,
                        status.last_group.view());
}

struct StatusBoard::Header {
  uint64_t version = kVersion;
  std::atomic<int64_t> watched_until_ns{0};
  std::atomic<uint32_t> calls{0};
  // The number of the last profile is changed last.
  std::atomic<int64_t> profile_ms{0};
  std::atomic<int64_t> profile_step{0};
  std::atomic<int64_t> profile{0};
  std::atomic<int32_t> stacks{0};
};

// A sequence lock: `count` is odd while `words` are written. They are written
// with release and read with acquire, so that a reader which has read a newer
// word also sees that `count` has changed.
struct alignas(64) StatusBoard::Place {
  std::atomic<uint64_t> count{0};
  std::array<std::atomic<uint64_t>, kWords> words{};
};

StatusBoard::StatusBoard(SharedMemory memory, int places)
    : memory_(std::move(memory)), places_(places) {}

StatusBoard StatusBoard::create(int places) {
  const size_t bytes =
      sizeof(Place) * (static_cast<size_t>(places) + 1);  // 1: the header
  static_assert(sizeof(Header) <= sizeof(Place));
  StatusBoard board(SharedMemory::create(bytes), places);
  new (board.memory_.data()) Header();
  for (int number = 0; number < places; ++number) {
    new (&board.place(number)) Place();
  }
  return board;
}

StatusBoard StatusBoard::map(FileDescriptor descriptor) {
  struct stat facts {};
  if (::fstat(descriptor.get(), &facts) != 0) throw_errno("fstat of a board");
  const auto bytes = static_cast<size_t>(facts.st_size);
  const size_t places = bytes / sizeof(Place);
  if (bytes % sizeof(Place) != 0 || places < 2 || places > INT_MAX) {
    throw std::invalid_argument("a status board cannot have " +
                                std::to_string(bytes) + " bytes");
  }
  StatusBoard board(SharedMemory::map(std::move(descriptor), bytes),
                    static_cast<int>(places) - 1);
  if (board.header().version != kVersion) {
    throw std::invalid_argument(
        "the status board was made by another version of Lockstep");
  }
  return board;
}

StatusBoard::Header& StatusBoard::header() const {
  return *std::launder(reinterpret_cast<Header*>(memory_.data()));
}

StatusBoard::Place& StatusBoard::place(int number) const {
  return std::launder(reinterpret_cast<Place*>(memory_.data()))[number + 1];
}

void StatusBoard::publish(int number, const RankStatus& status) {
  Place& to = place(number);
  std::array<uint64_t, kWords> words;
  std::memcpy(words.data(), &status, sizeof status);
  // A writer that died while it wrote left an odd number.
  const uint64_t count = to.count.load(std::memory_order_relaxed) | 1;
  to.count.store(count, std::memory_order_relaxed);
  for (size_t i = 0; i < kWords; ++i) {
    to.words[i].store(words[i], std::memory_order_release);
  }
  to.count.store(count + 1, std::memory_order_release);
}

std::optional<RankStatus> StatusBoard::read(int number) const {
  const Place& from = place(number);
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const uint64_t before = from.count.load(std::memory_order_acquire);
    if (before == 0) return std::nullopt;
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) {
      words[i] = from.words[i].load(std::memory_order_acquire);
    }
    if (before % 2 != 0 ||
        from.count.load(std::memory_order_relaxed) != before) {
      continue;
    }
    RankStatus status;
    std::memcpy(static_cast<void*>(&status), words.data(), sizeof status);
    if (status.pid == 0) return std::nullopt;
    return status;
  }
  return std::nullopt;
}

void StatusBoard::clear(int number) { publish(number, {}); }

void StatusBoard::watch(std::chrono::milliseconds how_long) {
  const int64_t until =
      steady_ns() + std::chrono::nanoseconds(how_long).count();
  int64_t before = header().watched_until_ns.load(std::memory_order_relaxed);
  while (before < until && !header().watched_until_ns.compare_exchange_weak(
                               before, until, std::memory_order_relaxed)) {
  }
  wake();
}

bool StatusBoard::is_watched() const {
  return header().watched_until_ns.load(std::memory_order_relaxed) >
         steady_ns();
}

uint32_t StatusBoard::calls() const {
  return header().calls.load(std::memory_order_acquire);
}

void StatusBoard::wait(uint32_t calls,
                       std::chrono::milliseconds allowed) const {
  futex_wait(header().calls, calls, allowed, kAnyReason);
}

void StatusBoard::wake() {
  header().calls.fetch_add(1, std::memory_order_release);
  futex_wake_all(header().calls, kAnyReason);
}

int64_t StatusBoard::ask_profile(std::chrono::milliseconds duration,
                                 int64_t first_step) {
  header().profile_ms.store(duration.count(), std::memory_order_relaxed);
  header().profile_step.store(first_step, std::memory_order_relaxed);
  const int64_t number =
      header().profile.fetch_add(1, std::memory_order_release) + 1;
  wake();
  return number;
}

StatusBoard::ProfileRequest StatusBoard::last_profile() const {
  const int64_t number = header().profile.load(std::memory_order_acquire);
  return {number,
          std::chrono::milliseconds(
              header().profile_ms.load(std::memory_order_relaxed)),
          header().profile_step.load(std::memory_order_relaxed)};
}

int32_t StatusBoard::ask_stacks() {
  const int32_t number =
      header().stacks.fetch_add(1, std::memory_order_release) + 1;
  wake();
  return number;
}

int32_t StatusBoard::last_stacks() const {
  return header().stacks.load(std::memory_order_acquire);
}

std::string StatusBoard::stacks_file(int32_t number, int rank) {
  return "stacks" + std::to_string(number) + "-rank" + std::to_string(rank) +
         ".json";
}

}  // namespace lockstep::internal
