#pragma once

#include <chrono>
#include <deque>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/cli/bench/stop_signal.h"
#include "lockstep/launch/program.h"
#include "lockstep/launch/store_port.h"
#include "lockstep/launch/worker_process.h"

namespace lockstep::bench {

// A world that can be of no more use: a rank has died, failed by itself or
// not answered in time.
class WorldError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// All ranks have answered that they will not, for one reason. The world goes
// on. `is_users_mistake()`: what was asked for does not exist there.
class Refusal : public std::runtime_error {
 public:
  Refusal(const std::string& text, bool is_users_mistake)
      : std::runtime_error(text), is_users_mistake_(is_users_mistake) {}
  bool is_users_mistake() const { return is_users_mistake_; }

 private:
  bool is_users_mistake_;
};

// Who starts the ranks of a world.
enum class Launch {
  by_world,    // the world: one process a rank
  by_program,  // the program, of which there is one process
};

// Ranks of one program, which wait to be told what to time: ours, or a peer's.
// docs/benchmarks.md, "Adding a peer", is what they understand. Killed by the
// kernel when this process dies. One thread.
class World {
 public:
  // Starts them. `name` is for messages: "lockstep", "python". `timeout` is for
  // await_ready() and for each ask(). `stop` outlives the world. Throws
  // ProgramError, std::system_error.
  World(std::string name, const Program& program, Launch launch, int ranks,
        std::chrono::milliseconds timeout, const StopSignal& stop);
  World(World&&) = delete;
  // SIGKILL to all, and reaps. To a program that started ranks SIGTERM before.
  ~World();

  // Until each has said that it is ready; throws as ask().
  void await_ready();

  const std::string& name() const { return name_; }
  // What rank 0 said of itself when it was ready.
  const nlohmann::json& facts() const { return facts_; }

  // Sends `request` to every rank; their answers, by rank. Throws Refusal,
  // WorldError and Interrupted.
  std::vector<nlohmann::json> ask(nlohmann::json request);

  // Tells all to end, and waits: 10 s at most, then kills. Throws WorldError
  // where one has failed at its end.
  void finish();

 private:
  // One process and its pipes. It is a rank, or answers for all.
  struct Rank {
    WorkerProcess process;
    FileDescriptor in;
    FileDescriptor out;
    std::string unread{};
    nlohmann::json answer{};
  };

  void start_rank(const Program& program, int rank);
  std::vector<nlohmann::json> collect(int64_t id);
  void await_any(const Deadline& deadline);
  void read_some(Rank& rank, int64_t id);
  void reap(const Deadline& deadline);
  bool all_answered() const;
  bool any_failed() const;
  std::vector<nlohmann::json> take_answers();
  [[noreturn]] void fail();

  std::string name_;
  Launch launch_;
  int size_;
  std::chrono::milliseconds timeout_;
  const StopSignal& stop_;
  StorePort port_;
  std::deque<Rank> ranks_;
  int64_t last_id_ = 0;
  nlohmann::json facts_;
};

}  // namespace lockstep::bench
