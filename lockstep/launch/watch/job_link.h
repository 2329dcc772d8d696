#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/watch/job_status.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

// An agent of this user on this host that can be asked (agent_socket.h).
struct RunningJob {
  pid_t agent_pid = 0;     // as this process sees it; 0 if it does not see it
  std::string mark{};      // AgentSocket::mark(), which no other job has
  pid_t launcher_pid = 0;  // of `lockstep run`; 0 if it has died
  std::string run_id{};    // as far as the socket's name has it
  std::string socket{};
  std::string command{};  // "lockstep run -n 2 train", cut
};

// Returns the shortest text by which find_job() finds just this job.
std::string name_of(const RunningJob& job);

// Returns the agents of this user (root: of all users) in this network
// namespace, the oldest process first. Leaves out what cannot be seen to be
// this user's: an agent that is stopped and that 512 others wait to ask, too.
// Throws std::runtime_error if the system does not list its sockets.
std::vector<RunningJob> running_jobs();

// Returns the job that `which` names: a run id, the process id of the launcher
// or of its agent, or the mark of a job in a container whose processes are not
// to be seen from here. If `which` is nothing, returns the only job. Throws
// std::invalid_argument, with the jobs that there are, if this names none or
// several.
RunningJob find_job(const std::optional<std::string>& which);

// The user whose job a command looks at, with the rights that go with it. Root
// may look at the jobs of all users, but what a job names, a file or a program,
// must not become root's to read, move or run. (Groups that the user has beside
// its first one are not among these rights.)
struct JobOwner {
  uid_t user = 0;
  gid_t group = 0;
};

// If this process is root's, gives it the rights of `owner` for good, also for
// the programs that it starts. Throws std::system_error.
void give_up_root(const JobOwner& owner);

// While it lives, a process of root's has the rights of `owner` for files.
// Other processes' rights, and the rights to signal this one, stay as they are.
class OwnersRights {
 public:
  // Throws std::system_error.
  explicit OwnersRights(const JobOwner& owner);
  ~OwnersRights();
  OwnersRights(const OwnersRights&) = delete;
  OwnersRights& operator=(const OwnersRights&) = delete;

 private:
  bool taken_;
};

// Asks an agent, and blocks for its answer. Throws std::runtime_error with one
// line if the agent has ended, refuses, or does not answer in time.
//
// Once an agent has been reached, this process, if it is root's, gives up root
// for the rights of the job's owner, for good; unless `keeps_root`: then the
// caller uses what the job names with OwnersRights only.
class JobLink {
 public:
  static constexpr std::chrono::milliseconds kAnswerTime{3'000};

  // An answer takes `allowed` at most.
  explicit JobLink(RunningJob job, bool keeps_root = false,
                   std::chrono::milliseconds allowed = kAnswerTime)
      : job_(std::move(job)), keeps_root_(keeps_root), allowed_(allowed) {}

  const RunningJob& job() const { return job_; }
  // Requires that a question was answered.
  const JobOwner& owner() const { return *owner_; }
  // Asks for the job's status, and has its ranks publish for `how_long` what
  // they do; if it is 0, they need not. Each local_rank of the result is the
  // worker's place in it, and on the board.
  JobStatus watch(
      std::chrono::milliseconds how_long = std::chrono::milliseconds(5000));
  // Has all ranks profile themselves: StatusBoard::ask_profile().
  int64_t ask_profile(std::chrono::milliseconds duration, int64_t first_step);
  // Has all ranks end that profile: StatusBoard::stop_profile().
  void stop_profile(int64_t number);
  // Has all ranks write their stacks: StatusBoard::ask_stacks().
  int32_t ask_stacks();
  // The ranks' board. Requires watch().
  const StatusBoard& board() const { return *board_; }
  // Waits until each worker of `status` that publishes has done so since
  // watch() was called, for `allowed` at most.
  void await_ranks(const JobStatus& status,
                   std::chrono::milliseconds allowed) const;

 private:
  struct Reply {
    std::string text;
    FileDescriptor descriptor;
  };
  [[noreturn]] void fail(const std::string& why) const;
  // `socket` is connected to an agent.
  void check_owner(const FileDescriptor& socket);
  Reply ask(const std::string& question);
  int64_t ask_number(const std::string& question);

  RunningJob job_;
  bool keeps_root_;
  std::chrono::milliseconds allowed_;
  std::optional<JobOwner> owner_{};
  std::optional<StatusBoard> board_{};
  int64_t watched_ns_ = 0;  // when watch() was called
};

}  // namespace lockstep::internal
