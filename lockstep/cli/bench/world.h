#pragma once

#include <chrono>
#include <deque>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/cli/stop_signal.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/store_port.h"

namespace lockstep::internal::bench {

// Thrown if a world cannot be used any more: a rank has died, has failed while
// others have not, or has not answered in time.
class WorldError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown if all ranks have refused a request, for one reason. The world can
// still be used. `is_users_mistake()`: the user asked for something that does
// not exist there.
class Refusal : public std::runtime_error {
 public:
  Refusal(const std::string& text, bool is_users_mistake)
      : std::runtime_error(text), is_users_mistake_(is_users_mistake) {}
  bool is_users_mistake() const { return is_users_mistake_; }

 private:
  bool is_users_mistake_;
};

// Starts the ranks of a world.
enum class Launch {
  by_world,    // the World: one process for each rank
  by_program,  // the program, of which there is one process
};

// The ranks of one program, ours or a peer's, which wait to be told what to
// time. docs/benchmarks.md, "Your own peer", has the lines that they
// understand. The kernel kills them when this process dies. For one thread.
class World {
 public:
  // Starts the ranks. `name` is for messages: "lockstep", "python". `timeout`
  // is for await_ready() and for each ask(). `stop` must outlive the world.
  // Throws ProgramError, std::system_error.
  World(std::string name, const Program& program, Launch launch, int ranks,
        std::chrono::milliseconds timeout, const StopSignal& stop);
  World(World&&) = delete;
  // Sends SIGKILL to all processes and reaps them. A program that started ranks
  // itself gets SIGTERM before that.
  ~World();

  // Waits until each rank has said that it is ready. Throws what ask() throws.
  void await_ready();

  const std::string& name() const { return name_; }
  // The description of itself that rank 0 gave when it was ready.
  const nlohmann::json& facts() const { return facts_; }

  // Sends `request` to every rank and returns their answers, by rank. Throws
  // Refusal, WorldError and Interrupted.
  std::vector<nlohmann::json> ask(nlohmann::json request);

  // Tells all ranks to end, and waits for at most 10 s. Throws WorldError if a
  // rank has not ended by then (the destructor kills it), or if one has failed
  // at its end.
  void finish();

 private:
  // One process and its pipes. The process is a rank, or answers for all ranks.
  struct Rank {
    ChildProcess process;
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

}  // namespace lockstep::internal::bench
