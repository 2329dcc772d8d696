#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/worker/profile_on_demand.h"

namespace lockstep::internal {

// A text of at most `N - 1` bytes in a struct that can be copied byte by byte.
template <size_t N>
struct ShortText {
  std::array<char, N> bytes{};

  // Cuts what does not fit.
  void set(std::string_view text) {
    bytes.fill('\0');
    text.substr(0, N - 1).copy(bytes.data(), N - 1);
  }
  std::string_view view() const {
    const std::string_view all(bytes.data(), N);
    return all.substr(0, all.find('\0'));
  }
};

// The status that one rank publishes (status_publisher.h). Times are
// nanoseconds of the steady clock, which all processes of a host share; 0 means
// never.
struct RankStatus {
  int32_t pid = 0;
  int32_t rank = 0;  // in the default group
  int64_t published_ns = 0;
  // These four are those of training_counters.h.
  int64_t steps = 0;
  int64_t last_step_ns = 0;
  int64_t samples = 0;
  int64_t last_snapshot_ns = 0;
  // Operations of all process groups that this rank has begun, and when one
  // last began or ended.
  int64_t operations = 0;
  int64_t last_operation_ns = 0;
  // For how long at least one operation was under way, of `observed_ns`. Both
  // grow only while somebody looks: a reader takes differences.
  int64_t comm_ns = 0;
  int64_t observed_ns = 0;
  // The oldest operation that is under way, and since when; 0 if there is none.
  int64_t current_since_ns = 0;
  int64_t current_number = 0;  // of the collective; 0 for a message
  ShortText<24> current_operation{};
  ShortText<24> current_group{};
  // The operation that last_operation_ns is about.
  int64_t last_number = 0;
  ShortText<24> last_operation{};
  ShortText<24> last_group{};
  ShortText<112> progress{};  // the rank's progress bar
  // The last profile that this rank was asked for (StatusBoard::ask_profile()),
  // what became of it, and ProfileOnDemand::Progress::words.
  int64_t profile = 0;
  ProfileState profile_state = ProfileState::none;
  // The last request of stacks (StatusBoard::ask_stacks()) that this rank has
  // answered.
  int32_t stacks = 0;
  // The rank's GpuUsage (worker/nvml.h), about once a second. gpus is 0 if
  // nothing is known, and each other figure -1.
  int32_t gpus = 0;
  int32_t gpu_celsius = -1;
  int64_t gpu_memory_bytes = -1;
  double gpu_busy_percent = -1;
  double gpu_watts = -1;
  // 1: the process group is destroyed, so nothing more is told; else 0.
  int32_t has_left = 0;
  ShortText<160> profile_words{};
};

// One thing that the launcher said of the job.
struct BoardEvent {
  int64_t number = 0;   // 1 is the first of the job
  int64_t time_ns = 0;  // of the steady clock
  int64_t ends = 0;     // 1: it says how the job has ended; else 0
  ShortText<400> text{};
};

// Return "all_reduce 12 (default_pg)": the oldest operation that is under way,
// and the one that began or ended last. Empty if there is none.
std::string current_operation(const RankStatus& status);
std::string last_operation(const RankStatus& status);

// Memory that an agent and its workers share, with a place for what each worker
// says about itself. A worker writes only while somebody looks: watch() says
// so, for a while. At all other times a board costs nothing.
//
// Threads: each place has one writer at a time; everything else may be called
// by any thread of any process.
class StatusBoard {
 public:
  // How often a worker publishes while somebody looks.
  static constexpr std::chrono::milliseconds kInterval{200};

  // `places` is at least 1. Throws std::system_error if there is no memory.
  static StatusBoard create(int places);
  // Maps the board that another process made. Throws std::system_error, and
  // std::invalid_argument if `descriptor` is not a board of this version.
  static StatusBoard map(FileDescriptor descriptor);

  int places() const { return places_; }
  int descriptor() const { return memory_.descriptor(); }

  void publish(int place, const RankStatus& status);
  // Returns nothing if no worker has published since the board was made or the
  // place was cleared, or if the writer died while it wrote.
  std::optional<RankStatus> read(int place) const;
  void clear(int place);

  // Keeps what the launcher has said, the last kEvents texts of the job. Only
  // the agent adds. The board of an agent that has ended still has them, for
  // those who have mapped it.
  static constexpr int kEvents = 8;
  void add_event(std::string_view text, bool ends = false);
  // Returns those after the event `number`, the oldest first.
  std::vector<BoardEvent> events_after(int64_t number) const;

  // From now on, for `how_long` at least, the workers publish every kInterval,
  // beginning at once.
  void watch(std::chrono::milliseconds how_long);
  bool is_watched() const;
  // Counts the calls of watch() and wake(). A thread that reads the count,
  // looks at what it waits for, and then calls wait() with it, misses none.
  uint32_t calls() const;
  // Blocks while calls() is `calls`, for `allowed` (more than 0) at most. May
  // return early.
  void wait(uint32_t calls, std::chrono::milliseconds allowed) const;
  // Ends all waits, also those of other processes.
  void wake();

  // Asks all workers for a profile (ProfileOnDemand::Request); they must be
  // watched meanwhile. Returns its number, which is higher than those before.
  struct ProfileRequest {
    int64_t number = 0;  // 0 if none was asked for
    std::chrono::milliseconds duration{};
    int64_t first_step = 0;
  };
  int64_t ask_profile(std::chrono::milliseconds duration, int64_t first_step);
  ProfileRequest last_profile() const;
  // Asks all workers to end this profile (ProfileOnDemand::stop()).
  void stop_profile(int64_t number);
  int64_t stopped_profile() const;  // the last such number; 0 if there is none

  // Asks all workers for the stacks of their threads and their flight records;
  // they must be watched meanwhile. Returns the request's number. A worker
  // writes to stacks_file() in the folder of its attempt.
  int32_t ask_stacks();
  int32_t last_stacks() const;
  static std::string stacks_file(int32_t number, int rank);

 private:
  struct Header;
  struct Place;
  // The places before those of the workers: the header, and the events.
  static constexpr int kFirstPlace = 1 + kEvents;

  explicit StatusBoard(SharedMemory memory, int places);
  Header& header() const;
  Place& place(int number) const;  // of a worker; or below 0, of an event
  Place& event_place(int64_t number) const;

  SharedMemory memory_;
  int places_;
};

// One rank, and which share of its time it was in operations: 0 to 1.
struct RankShare {
  double comm_share;
  int rank;
};

// Returns the rank for which the others wait: in operations it is for a share
// of its time that is at least a tenth smaller than that of each other rank.
// Returns nothing if there is no such rank.
inline std::optional<int> slowest_rank(std::vector<RankShare> ranks) {
  constexpr double kSmaller = 0.1;
  if (ranks.size() < 2) return std::nullopt;
  std::ranges::partial_sort(ranks, ranks.begin() + 2, {},
                            &RankShare::comm_share);
  if (ranks[1].comm_share - ranks[0].comm_share < kSmaller) return std::nullopt;
  return ranks[0].rank;
}

}  // namespace lockstep::internal
