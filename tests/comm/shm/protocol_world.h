#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/group.h"
#include "lockstep/comm/shm/protocol/layout.h"

// Worlds of ranks for tests of the shared-memory protocol, without torch.
namespace lockstep::internal::shm::testing {

// Returns limits so small that a few kilobytes reach every algorithm.
Tuning small_tuning();

// How a rank's part of a test ended.
struct End {
  enum class Kind {
    well,
    broken,    // GroupBroken
    mismatch,  // CallMismatch
    other,     // any other exception
    killed,    // by a signal; processes only
    hung,      // had not ended in time; processes only
  };
  Kind kind;
  std::string words;  // the exception's words
};
std::ostream& operator<<(std::ostream& out, const End& end);
// Describes the ranks that did not end well; for EXPECT_EQ(faults(ends), "").
std::string faults(const std::vector<End>& ends);

// Runs `body` and returns how it ended.
End end_of(const std::function<void()>& body);

// Ranks as threads of this process, over one mapping and socket pairs. Shared
// memory has the same address in all of them, so ThreadSanitizer sees every
// access of every rank.
class ThreadWorld {
 public:
  // `global_ranks` is as in Meeting.
  ThreadWorld(int size, const Tuning& tuning,
              const std::vector<int>& global_ranks = {});

  int size() const { return static_cast<int>(groups_.size()); }
  Group& group(int rank) { return *groups_.at(rank); }
  // Makes the rank leave. Call it from the rank's own thread or between two
  // runs.
  void leave(int rank) { groups_.at(rank).reset(); }

  // Runs `body` on every rank that has not left, each in its own thread.
  std::vector<End> run(const std::function<void(Group&)>& body);

 private:
  std::vector<std::unique_ptr<Group>> groups_;
};

// State that the processes of a test share besides the group: counters that a
// test may use for any meaning.
struct Signs {
  std::atomic<uint64_t> steps[kMaxRanks];
  std::atomic<uint32_t> go;
};

// Ranks as processes, forked from this one, which must have only one thread.
// They meet() over memory that they inherit. The destructor kills and reaps
// them.
class ForkedWorld {
 public:
  using Body = std::function<void(Group&, Signs&)>;

  // Starts the processes and returns. `global_ranks` is as in Meeting.
  ForkedWorld(int size, const Tuning& tuning, const Body& body,
              const std::vector<int>& global_ranks = {});
  ForkedWorld(const ForkedWorld&) = delete;
  ForkedWorld& operator=(const ForkedWorld&) = delete;
  ~ForkedWorld();

  Signs& signs();
  void signal(int rank, int signal);
  // Waits until `condition`, which may read signs(), is true; returns false
  // after 20 s.
  bool await(const std::function<bool()>& condition);
  // Waits until every rank's steps[] is at least `steps`; returns false after
  // 20 s.
  bool await_steps(uint64_t steps);
  // Waits for all processes, at most `allowed`, and then kills those that still
  // run.
  std::vector<End> finish(std::chrono::seconds allowed);

 private:
  struct Board;

  void run_rank(int rank, const Tuning& tuning, const Body& body,
                const std::vector<int>& global_ranks);

  int size_;
  Board* board_;
  std::vector<pid_t> processes_;
};

// Sleeps, to make a rank late.
void sleep_for(std::chrono::microseconds time);

}  // namespace lockstep::internal::shm::testing
