#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// What the ranks of a job were doing when it stopped: each group keeps its last
// operations, and flight_dump.h writes them to a file. After PyTorch's flight
// recorder (PyTorch tutorials, "Flight Recorder for Debugging Stuck Jobs"), of
// which it takes the words.
namespace lockstep {

enum class FlightState : uint8_t {
  scheduled,  // called on this rank; whether it runs is not known
  started,    // the backend runs it
  completed,
  failed,
};
const char* name_of(FlightState state);  // "scheduled", ...

// One operation as this rank called it. The texts must live for ever: they are
// literals, or LibTorch's names of dtypes.
struct FlightCall {
  const char* operation;            // "all_reduce"
  const char* dtype = nullptr;      // "Float"; none: a barrier
  const char* reduce_op = nullptr;  // "SUM"; none: nothing is reduced
  uint64_t number = 0;              // of the group's collectives; 0: a message
  // Root or peer, of the default group; -1: there is none, or any.
  int peer = -1;
  // Elements that this rank gives, and gets.
  uint64_t in_elements = 0;
  uint64_t out_elements = 0;
};

// The same with what became of it. Times are nanoseconds of the steady clock.
struct FlightRecord {
  uint64_t id;
  FlightCall call;
  FlightState state;
  int thread;  // that called it: gettid()
  int64_t created_ns;
  int64_t ended_ns;  // means something where it completed or failed
};

// The group whose operations are recorded.
struct FlightGroup {
  std::string name;
  int rank;                // in this group
  std::vector<int> ranks;  // of the default group, in the order of this one
  std::string backend;     // "cpu:gloo"
};

class FlightRecorder;

// Ends a recorder's life: out of the list of all first, then waits until no
// dump reads it, a second at most; one that is read for longer (by a dump to a
// file system that hangs) is left in memory.
struct RetireFlightRecorder {
  void operator()(FlightRecorder* recorder) const noexcept;
};
using FlightRecorderPtr = std::unique_ptr<FlightRecorder, RetireFlightRecorder>;

// A ring of the last operations of one group, allocated once.
//
// Threads: begin(), start() and end() from any, and concurrently; they take no
// lock, allocate nothing and cost some 10 ns beside the clock (docs/
// flight-recorder.md). read() at the same time sees each record as a whole or
// not at all. An operation that ends after the ring went round is forgotten.
class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  // 1024, or what LOCKSTEP_FLIGHT_RECORDS says; 0 is off. Throws
  // std::invalid_argument where that is no number from 0 to 1048576.
  static size_t default_capacity();

  // `capacity` is rounded up to a power of two; 0: records nothing, and is in
  // no dump.
  static FlightRecorderPtr make(FlightGroup group,
                                size_t capacity = default_capacity());

  // By make() only.
  class Key {
    friend class FlightRecorder;
    Key() = default;
  };
  FlightRecorder(Key, FlightGroup group, size_t capacity);
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;
  ~FlightRecorder();

  // Names the operation for start() and end(); 0 where nothing is recorded,
  // which those take too. `now` is for a caller that has read the clock.
  uint64_t begin(const FlightCall& call, FlightState state) noexcept {
    return capacity_ == 0 ? 0 : begin(call, state, Clock::now());
  }
  uint64_t begin(const FlightCall& call, FlightState state,
                 Clock::time_point now) noexcept;
  // From scheduled to started.
  void start(uint64_t id) noexcept;
  // The first end counts.
  void end(uint64_t id, bool failed) noexcept {
    if (id != 0) end(id, failed, Clock::now());
  }
  void end(uint64_t id, bool failed, Clock::time_point now) noexcept;

  const FlightGroup& group() const noexcept { return group_; }
  size_t capacity() const noexcept { return capacity_; }
  // How many operations were begun: their ids are 1 to this.
  uint64_t last_id() const noexcept {
    return last_id_.load(std::memory_order_acquire);
  }
  // The highest number of a collective that was begun; 0: none.
  uint64_t last_number() const noexcept {
    return last_number_.load(std::memory_order_acquire);
  }
  // False where the record is overwritten, or being written. May be called in
  // a signal handler.
  bool read(uint64_t id, FlightRecord& record) const noexcept;

  // True where something was begun or failed since it was last asked: so one
  // failure that is met again and again is dumped once.
  bool has_news() noexcept;

  // Keeps all recorders of the process alive while it lives, in the order in
  // which they were made. May be used in a signal handler.
  class Reading {
   public:
    Reading() noexcept;
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    const FlightRecorder* first() const noexcept;
  };
  const FlightRecorder* next() const noexcept {
    return next_.load(std::memory_order_acquire);
  }

 private:
  friend struct RetireFlightRecorder;
  struct Entry;

  const FlightGroup group_;
  const size_t capacity_;
  const std::unique_ptr<Entry[]> entries_;
  std::atomic<uint64_t> last_id_{0};
  std::atomic<uint64_t> last_number_{0};
  std::atomic<uint64_t> failures_{0};
  std::atomic<uint64_t> told_;
  std::atomic<FlightRecorder*> next_{nullptr};
};

}  // namespace lockstep
