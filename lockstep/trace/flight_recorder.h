#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Records what the ranks of a job were doing when it stopped: each group keeps
// its last operations, and flight_dump.h writes them to a file. This follows
// PyTorch's flight recorder (PyTorch tutorials, "Flight Recorder for Debugging
// Stuck Jobs") and uses its words.
namespace lockstep::internal {

enum class FlightState : uint8_t {
  scheduled,  // called on this rank; whether it runs is not known
  started,    // the backend runs it
  completed,
  failed,
};
const char* name_of(FlightState state);  // "scheduled", ...

// One operation as this rank called it. The texts must live forever: they are
// literals, or LibTorch's names of dtypes.
struct FlightCall {
  const char* operation;            // "all_reduce"
  const char* dtype = nullptr;      // "Float"; null for a barrier
  const char* reduce_op = nullptr;  // "SUM"; null if nothing is reduced
  uint64_t number = 0;              // of the collective; 0 for a message
  // Root or peer, as a rank of the default group; -1 for none, or for any rank.
  int peer = -1;
  // How many elements this rank gives, and how many it gets.
  uint64_t in_elements = 0;
  uint64_t out_elements = 0;
};

// A recorded operation and what became of it. Times are nanoseconds of the
// steady clock.
struct FlightRecord {
  uint64_t id;
  FlightCall call;
  FlightState state;
  int thread;  // gettid() of the thread that called it
  int64_t created_ns;
  int64_t ended_ns;  // valid only if it completed or failed
};

// The group whose operations are recorded.
struct FlightGroup {
  std::string name;
  int rank;                // in this group
  std::vector<int> ranks;  // this group's ranks, as ranks of the default group
  std::string backend;     // "cpu:gloo"
};

class FlightRecorder;

// Destroys a recorder: takes it out of the list of all recorders, then waits
// until no dump reads that list, for a second at most. If a dump takes longer
// (to a file system that hangs), the recorder stays in memory for ever.
struct RetireFlightRecorder {
  void operator()(FlightRecorder* recorder) const noexcept;
};
using FlightRecorderPtr = std::unique_ptr<FlightRecorder, RetireFlightRecorder>;

// A ring of the last operations of one group, allocated once.
//
// Threads: any thread may call begin(), start() and end(), also at the same
// time as others. They take no lock, allocate nothing and cost about 10 ns
// besides reading the clock (docs/internals/flight-recorder.md). A read() at
// the same time sees a whole record or none. If an operation's entry was
// overwritten before the operation ended, its end is not recorded.
class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns the value of LOCKSTEP_FLIGHT_RECORDS, or 1024 if it is unset; 0
  // turns recording off. Throws std::invalid_argument if the value is not a
  // number from 0 to 1048576.
  static size_t default_capacity();

  // Rounds `capacity` up to a power of two. A recorder with capacity 0 records
  // nothing and is in no dump.
  static FlightRecorderPtr make(FlightGroup group,
                                size_t capacity = default_capacity());

  // Lets only make() construct a recorder.
  class Key {
    friend class FlightRecorder;
    Key() = default;
  };
  FlightRecorder(Key, FlightGroup group, size_t capacity);
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;
  ~FlightRecorder();

  // Records an operation and returns its id for start() and end(), or 0 if it
  // is not recorded; start() and end() accept 0. Pass `now` if the caller has
  // just read the clock.
  uint64_t begin(const FlightCall& call, FlightState state) noexcept {
    return capacity_ == 0 ? 0 : begin(call, state, Clock::now());
  }
  uint64_t begin(const FlightCall& call, FlightState state,
                 Clock::time_point now) noexcept;
  // Changes the state from scheduled to started.
  void start(uint64_t id) noexcept;
  // Records the end of the operation. Only its first end counts.
  void end(uint64_t id, bool failed) noexcept {
    if (id != 0) end(id, failed, Clock::now());
  }
  void end(uint64_t id, bool failed, Clock::time_point now) noexcept;

  const FlightGroup& group() const noexcept { return group_; }
  size_t capacity() const noexcept { return capacity_; }
  // Returns how many operations were begun. Their ids are 1 to this number.
  uint64_t last_id() const noexcept {
    return last_id_.load(std::memory_order_acquire);
  }
  // Returns the highest number of a collective that was begun; 0 if none was.
  // Reads the whole ring. May be called in a signal handler.
  uint64_t last_number() const noexcept;
  // Returns false if the record was overwritten or is being written. May be
  // called in a signal handler.
  bool read(uint64_t id, FlightRecord& record) const noexcept;

  // Returns whether an operation was begun or has failed since the last call.
  // So one failure that is met again and again is dumped once.
  bool has_news() noexcept;

  // Reads all recorders of the process, in the order in which they were made:
  // from first() by next(). They stay alive while this object does. May be used
  // in a signal handler.
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
  // The number of one of the last collectives: threads that begin collectives
  // at once may leave the lower one here. For when the ring has only messages.
  std::atomic<uint64_t> last_number_{0};
  std::atomic<uint64_t> failures_{0};
  std::atomic<uint64_t> told_;
  std::atomic<FlightRecorder*> next_{nullptr};
};

}  // namespace lockstep::internal
