#include "lockstep/worker/status_board.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/futex.h"

namespace lockstep::internal {
namespace {

// Changes with the layout of the board.
constexpr uint64_t kVersion = 0x6c6f636b73743034;
constexpr uint32_t kAnyReason = ~uint32_t{0};
constexpr int kReadAttempts = 100;

constexpr size_t kWords = sizeof(RankStatus) / sizeof(uint64_t);
static_assert(sizeof(BoardEvent) <= sizeof(RankStatus));
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
  std::atomic<int64_t> stopped_profile{0};
  std::atomic<int32_t> stacks{0};
  std::atomic<int64_t> events{0};  // the number of the last one
};

// A sequence lock: `count` is odd while `words` are written. They are written
// with release and read with acquire, so that a reader which has read a newer
// word also sees that `count` has changed.
struct alignas(64) StatusBoard::Place {
  std::atomic<uint64_t> count{0};
  std::array<std::atomic<uint64_t>, kWords> words{};

  template <class Record>
  void store(const Record& record);
  // Returns nothing if nothing was stored, or if the writer died meanwhile.
  template <class Record>
  std::optional<Record> load() const;
};

StatusBoard::StatusBoard(SharedMemory memory, int places)
    : memory_(std::move(memory)), places_(places) {}

StatusBoard StatusBoard::create(int places) {
  const size_t bytes =
      sizeof(Place) * (static_cast<size_t>(places) + kFirstPlace);
  static_assert(sizeof(Header) <= sizeof(Place));
  StatusBoard board(SharedMemory::create(bytes), places);
  new (board.memory_.data()) Header();
  for (int number = -kEvents; number < places; ++number) {
    new (&board.place(number)) Place();
  }
  return board;
}

StatusBoard StatusBoard::map(FileDescriptor descriptor) {
  struct stat facts {};
  if (::fstat(descriptor.get(), &facts) != 0) throw_errno("fstat of a board");
  const auto bytes = static_cast<size_t>(facts.st_size);
  const size_t places = bytes / sizeof(Place);
  if (bytes % sizeof(Place) != 0 || places <= kFirstPlace || places > INT_MAX) {
    throw std::invalid_argument("a status board cannot have " +
                                std::to_string(bytes) + " bytes");
  }
  StatusBoard board(SharedMemory::map(std::move(descriptor), bytes),
                    static_cast<int>(places) - kFirstPlace);
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
  return std::launder(
      reinterpret_cast<Place*>(memory_.data()))[number + kFirstPlace];
}

StatusBoard::Place& StatusBoard::event_place(int64_t number) const {
  return place(-1 - static_cast<int>(number % kEvents));
}

template <class Record>
void StatusBoard::Place::store(const Record& record) {
  static_assert(std::is_trivially_copyable_v<Record>);
  constexpr size_t kRecordWords = sizeof(Record) / sizeof(uint64_t);
  static_assert(sizeof(Record) % sizeof(uint64_t) == 0);
  std::array<uint64_t, kRecordWords> from;
  std::memcpy(from.data(), &record, sizeof record);
  // A writer that died while it wrote left an odd number.
  const uint64_t before = count.load(std::memory_order_relaxed) | 1;
  count.store(before, std::memory_order_relaxed);
  for (size_t i = 0; i < kRecordWords; ++i) {
    words[i].store(from[i], std::memory_order_release);
  }
  count.store(before + 1, std::memory_order_release);
}

template <class Record>
std::optional<Record> StatusBoard::Place::load() const {
  constexpr size_t kRecordWords = sizeof(Record) / sizeof(uint64_t);
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const uint64_t before = count.load(std::memory_order_acquire);
    if (before == 0) return std::nullopt;
    std::array<uint64_t, kRecordWords> to;
    for (size_t i = 0; i < kRecordWords; ++i) {
      to[i] = words[i].load(std::memory_order_acquire);
    }
    if (before % 2 != 0 || count.load(std::memory_order_relaxed) != before) {
      continue;
    }
    Record record;
    std::memcpy(static_cast<void*>(&record), to.data(), sizeof record);
    return record;
  }
  return std::nullopt;
}

void StatusBoard::publish(int number, const RankStatus& status) {
  place(number).store(status);
}

std::optional<RankStatus> StatusBoard::read(int number) const {
  auto status = place(number).load<RankStatus>();
  if (status && status->pid == 0) status.reset();
  return status;
}

void StatusBoard::clear(int number) { publish(number, {}); }

void StatusBoard::add_event(std::string_view text, bool ends) {
  BoardEvent event;
  event.number = header().events.load(std::memory_order_relaxed) + 1;
  event.time_ns = steady_ns();
  event.ends = ends ? 1 : 0;
  event.text.set(text);
  event_place(event.number).store(event);
  header().events.store(event.number, std::memory_order_release);
}

std::vector<BoardEvent> StatusBoard::events_after(int64_t number) const {
  const int64_t last = header().events.load(std::memory_order_acquire);
  std::vector<BoardEvent> events;
  // The board may be of an agent that lies: `last` can be any number.
  for (auto back = std::clamp<int64_t>(last, 0, kEvents) - 1; back >= 0;
       --back) {
    const int64_t i = last - back;
    if (i <= number) continue;
    const auto event = event_place(i).load<BoardEvent>();
    // A newer one may have taken the place meanwhile.
    if (event && event->number == i) events.push_back(*event);
  }
  return events;
}

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

void StatusBoard::stop_profile(int64_t number) {
  if (number != last_profile().number) return;
  header().stopped_profile.store(number, std::memory_order_release);
  wake();
}

int64_t StatusBoard::stopped_profile() const {
  return header().stopped_profile.load(std::memory_order_acquire);
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
