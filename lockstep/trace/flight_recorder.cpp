#include "lockstep/trace/flight_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

constexpr size_t kDefaultCapacity = 1024;
constexpr size_t kHighestCapacity = size_t{1} << 20;
constexpr std::chrono::milliseconds kRetireTime{1'000};

// The state is in the lowest bits of Entry::word; the id is in the bits above.
constexpr int kStateBits = 2;
// Entry::word while the rest of the entry is written; no id is as high.
constexpr uint64_t kWriting = ~uint64_t{0};

uint64_t word_of(uint64_t id, FlightState state) {
  return id << kStateBits | static_cast<uint64_t>(state);
}
uint64_t id_of(uint64_t word) { return word >> kStateBits; }
FlightState state_of(uint64_t word) {
  return static_cast<FlightState>(word & ((1 << kStateBits) - 1));
}

int64_t nanoseconds(FlightRecorder::Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

// Asks the system only once in each thread.
int own_thread() {
  thread_local const int id = ::gettid();
  return id;
}

// The list of all recorders. The mutex is for threads that change the list. A
// signal handler can take no lock, so a dump that reads the list only adds
// itself to `readers`. This is safe because the addition and the change of the
// list are in one total order (seq_cst): a reader that could still see a
// recorder is counted when RetireFlightRecorder looks at `readers`.
std::mutex list_mutex;
std::atomic<FlightRecorder*> list_head{nullptr};
std::atomic<int> readers{0};

}  // namespace

const char* name_of(FlightState state) {
  switch (state) {
    case FlightState::scheduled:
      return "scheduled";
    case FlightState::started:
      return "started";
    case FlightState::completed:
      return "completed";
    default:
      return "failed";
  }
}

// A sequence lock whose writers never wait. `word` is kWriting while the rest
// is written; afterwards it holds the operation's id and state. The rest is
// written with release and read with acquire, so that a reader that has read a
// field of a newer operation also sees that `word` has changed.
struct alignas(64) FlightRecorder::Entry {
  std::atomic<uint64_t> word{0};
  std::atomic<const char*> operation{nullptr};
  std::atomic<const char*> dtype{nullptr};
  std::atomic<const char*> reduce_op{nullptr};
  std::atomic<uint64_t> number{0};
  std::atomic<uint64_t> in_elements{0};
  std::atomic<uint64_t> out_elements{0};
  std::atomic<int64_t> created_ns{0};
  std::atomic<int64_t> ended_ns{0};
  std::atomic<int> peer{0};
  std::atomic<int> thread{0};
};

size_t FlightRecorder::default_capacity() {
  return static_cast<size_t>(
      get_env_int("LOCKSTEP_FLIGHT_RECORDS", 0, kHighestCapacity)
          .value_or(kDefaultCapacity));
}

FlightRecorderPtr FlightRecorder::make(FlightGroup group, size_t capacity) {
  FlightRecorderPtr made(
      std::make_unique<FlightRecorder>(
          Key(), std::move(group), capacity == 0 ? 0 : std::bit_ceil(capacity))
          .release());
  if (capacity == 0) return made;
  std::lock_guard lock(list_mutex);
  auto* place = &list_head;
  while (auto* there = place->load(std::memory_order_relaxed)) {
    place = &there->next_;
  }
  place->store(made.get(), std::memory_order_seq_cst);
  return made;
}

FlightRecorder::FlightRecorder(Key, FlightGroup group, size_t capacity)
    : group_(std::move(group)),
      capacity_(capacity),
      entries_(std::make_unique<Entry[]>(capacity)),
      told_(~uint64_t{0}) {}

FlightRecorder::~FlightRecorder() = default;

void RetireFlightRecorder::operator()(FlightRecorder* recorder) const noexcept {
  {
    std::lock_guard lock(list_mutex);
    auto* place = &list_head;
    auto* there = place->load(std::memory_order_relaxed);
    while (there != nullptr && there != recorder) {
      place = &there->next_;
      there = place->load(std::memory_order_relaxed);
    }
    if (there != nullptr) {
      place->store(recorder->next_.load(std::memory_order_relaxed),
                   std::memory_order_seq_cst);
    }
  }
  // seq_cst: this load pairs with the increment in Reading's constructor. It is
  // also the acquire that pairs with the release with which the last reader
  // left.
  const auto deadline = Deadline::after(kRetireTime);
  while (readers.load(std::memory_order_seq_cst) != 0) {
    if (deadline.expired()) return;
    std::this_thread::yield();
  }
  std::unique_ptr<FlightRecorder> own(recorder);
}

uint64_t FlightRecorder::begin(const FlightCall& call, FlightState state,
                               Clock::time_point now) noexcept {
  if (capacity_ == 0) return 0;
  constexpr auto release = std::memory_order_release;
  const uint64_t id = last_id_.fetch_add(1, release) + 1;
  Entry& entry = entries_[id & (capacity_ - 1)];
  // Another thread still writes this entry: it was stopped there when the ring
  // was at this entry before. Leave this operation without a record rather than
  // make one record of two operations.
  if (entry.word.exchange(kWriting, std::memory_order_relaxed) == kWriting) {
    return 0;
  }
  entry.operation.store(call.operation, release);
  entry.dtype.store(call.dtype, release);
  entry.reduce_op.store(call.reduce_op, release);
  entry.number.store(call.number, release);
  entry.in_elements.store(call.in_elements, release);
  entry.out_elements.store(call.out_elements, release);
  entry.created_ns.store(nanoseconds(now), release);
  entry.peer.store(call.peer, release);
  entry.thread.store(own_thread(), release);
  entry.word.store(word_of(id, state), release);
  if (call.number > last_number_.load(std::memory_order_relaxed)) {
    last_number_.store(call.number, release);
  }
  return id;
}

void FlightRecorder::start(uint64_t id) noexcept {
  if (id == 0) return;
  uint64_t expected = word_of(id, FlightState::scheduled);
  entries_[id & (capacity_ - 1)].word.compare_exchange_strong(
      expected, word_of(id, FlightState::started), std::memory_order_release,
      std::memory_order_relaxed);
}

void FlightRecorder::end(uint64_t id, bool failed,
                         Clock::time_point now) noexcept {
  if (id == 0) return;
  Entry& entry = entries_[id & (capacity_ - 1)];
  const auto ended = failed ? FlightState::failed : FlightState::completed;
  uint64_t word = entry.word.load(std::memory_order_relaxed);
  do {
    if (id_of(word) != id || state_of(word) >= FlightState::completed) return;
    // If a newer operation takes this entry at this very moment, it keeps this
    // time until it ends itself.
    entry.ended_ns.store(nanoseconds(now), std::memory_order_release);
  } while (!entry.word.compare_exchange_weak(word, word_of(id, ended),
                                             std::memory_order_release,
                                             std::memory_order_relaxed));
  if (failed) failures_.fetch_add(1, std::memory_order_relaxed);
}

uint64_t FlightRecorder::last_number() const noexcept {
  uint64_t highest = last_number_.load(std::memory_order_acquire);
  const uint64_t last = last_id();
  for (uint64_t id = last - std::min<uint64_t>(last, capacity_) + 1; id <= last;
       ++id) {
    FlightRecord record;
    if (read(id, record)) highest = std::max(highest, record.call.number);
  }
  return highest;
}

bool FlightRecorder::read(uint64_t id, FlightRecord& record) const noexcept {
  if (id == 0 || capacity_ == 0) return false;
  constexpr auto acquire = std::memory_order_acquire;
  const Entry& entry = entries_[id & (capacity_ - 1)];
  const uint64_t word = entry.word.load(acquire);
  if (id_of(word) != id) return false;
  record = {.id = id,
            .call = {.operation = entry.operation.load(acquire),
                     .dtype = entry.dtype.load(acquire),
                     .reduce_op = entry.reduce_op.load(acquire),
                     .number = entry.number.load(acquire),
                     .peer = entry.peer.load(acquire),
                     .in_elements = entry.in_elements.load(acquire),
                     .out_elements = entry.out_elements.load(acquire)},
            .state = state_of(word),
            .thread = entry.thread.load(acquire),
            .created_ns = entry.created_ns.load(acquire),
            .ended_ns = entry.ended_ns.load(acquire)};
  return id_of(entry.word.load(std::memory_order_relaxed)) == id;
}

bool FlightRecorder::has_news() noexcept {
  const uint64_t seen = last_id_.load(std::memory_order_relaxed) +
                        failures_.load(std::memory_order_relaxed);
  return told_.exchange(seen, std::memory_order_relaxed) != seen;
}

FlightRecorder::Reading::Reading() noexcept {
  readers.fetch_add(1, std::memory_order_seq_cst);
}

FlightRecorder::Reading::~Reading() {
  readers.fetch_sub(1, std::memory_order_seq_cst);
}

const FlightRecorder* FlightRecorder::Reading::first() const noexcept {
  return list_head.load(std::memory_order_seq_cst);
}

}  // namespace lockstep::internal
