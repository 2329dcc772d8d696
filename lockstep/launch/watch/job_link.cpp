#include "lockstep/launch/watch/job_link.h"

#include <grp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/launch/process/descendants.h"
#include "lockstep/launch/watch/agent_socket.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookInterval{10};
constexpr size_t kCommandBytes = 100;
constexpr size_t kMostPacketBytes = 256 << 10;

std::string process_file(pid_t pid, const char* name) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/" + name);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string command_of(pid_t pid) {
  std::string command = process_file(pid, "cmdline");
  while (!command.empty() && command.back() == '\0') command.pop_back();
  std::ranges::replace(command, '\0', ' ');
  command = shown_line(command);
  const size_t folder = command.substr(0, command.find(' ')).rfind('/');
  if (folder != std::string::npos) command.erase(0, folder + 1);
  if (command.size() > kCommandBytes) {
    command.resize(kCommandBytes - 3);
    command += "...";
  }
  return command;
}

pid_t parent_of(pid_t pid) {
  const std::string status = process_file(pid, "status");
  constexpr std::string_view kKey = "\nPPid:\t";
  const size_t at = status.find(kKey);
  pid_t parent = 0;
  if (at != std::string::npos) {
    std::from_chars(status.data() + at + kKey.size(),
                    status.data() + status.size(), parent);
  }
  return parent;
}

// Returns whether this user may see a job whose agent is `owner`'s. The name of
// its socket does not say whose it is: any user can give it.
bool is_visible(uid_t owner) {
  return geteuid() == 0 || owner == geteuid() || owner == 0;
}

// Returns the job of an agent's socket,
// "lockstep-agent/<user>/<pid>/<mark>/<run id>". The process id is that of the
// agent's own PID namespace.
std::optional<RunningJob> job_of(const std::string& socket) {
  if (!socket.starts_with(AgentSocket::kPrefix)) return std::nullopt;
  const char* const end = socket.data() + socket.size();
  uid_t user = 0;
  const auto user_text =
      std::from_chars(socket.data() + AgentSocket::kPrefix.size(), end, user);
  if (user_text.ec != std::errc() || user_text.ptr == end ||
      *user_text.ptr != '/') {
    return std::nullopt;
  }
  const std::string_view rest(user_text.ptr + 1, end);
  const size_t mark = rest.find('/');
  const size_t run_id = rest.find('/', mark + 1);
  if (mark == rest.npos || run_id == rest.npos) return std::nullopt;
  if (geteuid() != 0 && user != geteuid()) return std::nullopt;
  // The process that listens there, as this PID namespace numbers it; 0 if it
  // does not know it.
  pid_t agent = 0;
  if (const FileDescriptor connection = connect_to(socket)) {
    const ucred peer = peer_of(connection);
    if (!is_visible(peer.uid)) return std::nullopt;
    agent = peer.pid;
  } else if (geteuid() != 0) {
    return std::nullopt;  // it has ended, or nobody can ask whose it is
  }
  RunningJob job;
  job.mark = rest.substr(mark + 1, run_id - mark - 1);
  job.run_id = rest.substr(run_id + 1);
  job.socket = socket;
  job.agent_pid = agent;
  if (job.agent_pid == 0) return job;
  job.command = command_of(job.agent_pid);
  const pid_t parent = parent_of(job.agent_pid);
  // An agent whose launcher has died was adopted by another process.
  if (command_of(parent) == job.command) job.launcher_pid = parent;
  return job;
}

std::string describe(const RunningJob& job) {
  return name_of(job) + " (run id " + job.run_id +
         (job.agent_pid == 0 ? ", in a container)" : ": " + job.command + ")");
}

std::string describe(const std::vector<RunningJob>& jobs) {
  std::string text;
  for (const RunningJob& job : jobs) {
    text += (text.empty() ? "" : ", ") + describe(job);
  }
  return text;
}

bool is_needed(const JobOwner& owner) {
  return ::geteuid() == 0 && owner.user != 0;
}

[[noreturn]] void fail_to_take(const JobOwner& owner) {
  throw_errno("taking the rights of user " + std::to_string(owner.user) +
              ", whose job it is");
}

constexpr auto kUnchangedUser = static_cast<uid_t>(-1);
constexpr auto kUnchangedGroup = static_cast<gid_t>(-1);

}  // namespace

void give_up_root(const JobOwner& owner) {
  if (!is_needed(owner)) return;
  const auto [user, group] = owner;
  if (::setgroups(0, nullptr) != 0 || ::setresgid(group, group, group) != 0 ||
      ::setresuid(user, user, user) != 0) {
    fail_to_take(owner);
  }
}

OwnersRights::OwnersRights(const JobOwner& owner) : taken_(is_needed(owner)) {
  if (!taken_) return;
  if (::setgroups(0, nullptr) != 0 ||
      ::setresgid(kUnchangedGroup, owner.group, kUnchangedGroup) != 0 ||
      ::setresuid(kUnchangedUser, owner.user, kUnchangedUser) != 0) {
    fail_to_take(owner);
  }
}

OwnersRights::~OwnersRights() {
  // If the system refuses, this process goes on with fewer rights. The groups
  // do not come back: root needs none.
  if (taken_ && ::setresuid(kUnchangedUser, 0, kUnchangedUser) == 0) {
    [[maybe_unused]] const int ignored =
        ::setresgid(kUnchangedGroup, ::getgid(), kUnchangedGroup);
  }
}

std::string name_of(const RunningJob& job) {
  if (job.agent_pid == 0) return job.mark;
  return std::to_string(job.launcher_pid != 0 ? job.launcher_pid
                                              : job.agent_pid);
}

std::vector<RunningJob> running_jobs() {
  std::ifstream sockets("/proc/net/unix");
  if (!sockets) {
    throw std::runtime_error(
        std::string("the jobs of this host cannot be found: ") +
        (proc_is_mounted() ? "/proc/net/unix cannot be read"
                           : "/proc is not mounted"));
  }
  std::vector<RunningJob> jobs;
  for (std::string line; std::getline(sockets, line);) {
    const size_t name = line.find(" @");
    if (name == std::string::npos) continue;
    const std::string socket = line.substr(name + 2);
    // An agent's connections are listed under the same name.
    const bool listed = std::ranges::any_of(
        jobs, [&](const RunningJob& job) { return job.socket == socket; });
    if (listed) continue;
    if (auto job = job_of(socket)) jobs.push_back(std::move(*job));
  }
  std::ranges::sort(jobs, {}, [](const RunningJob& job) {
    return std::pair(job.agent_pid, job.mark);
  });
  return jobs;
}

RunningJob find_job(const std::optional<std::string>& which) {
  const std::vector<RunningJob> all = running_jobs();
  if (all.empty()) {
    throw std::invalid_argument(
        "no job of this user runs on this host; lockstep run starts one");
  }
  std::vector<RunningJob> named = all;
  if (which) {
    std::erase_if(named, [&](const RunningJob& job) {
      return AgentSocket::name_part(*which) != job.run_id &&
             *which != job.mark && *which != std::to_string(job.agent_pid) &&
             *which != std::to_string(job.launcher_pid);
    });
  }
  if (named.size() == 1) return named.front();
  if (named.empty()) {
    throw std::invalid_argument("no job is named \"" + *which +
                                "\"; running are " + describe(all));
  }
  throw std::invalid_argument((which
                                   ? "several jobs are named \"" + *which + "\""
                                   : std::string("several jobs run")) +
                              "; say the number of one: " + describe(named));
}

void JobLink::fail(const std::string& why) const {
  throw std::runtime_error("the job " + describe(job_) + " " + why);
}

void JobLink::check_owner(const FileDescriptor& socket) {
  const ucred peer = peer_of(socket);
  // Anybody may take the name of an agent that has ended.
  if (owner_ ? peer.uid != owner_->user : !is_visible(peer.uid)) {
    fail("is answered for by another user");
  }
  if (owner_) return;
  owner_ = {peer.uid, peer.gid};
  if (!keeps_root_) give_up_root(*owner_);
}

JobLink::Reply JobLink::ask(const std::string& question) {
  const Deadline deadline = Deadline::after(allowed_);
  FileDescriptor socket = connect_to(job_.socket);
  // Many may ask at once.
  while (!socket && errno == EAGAIN && !deadline.expired()) {
    std::this_thread::sleep_for(kLookInterval);
    socket = connect_to(job_.socket);
  }
  if (!socket) fail("has ended, or too many others ask it");
  check_owner(socket);
  if (send_packet(socket, std::as_bytes(std::span(question))) != Sent::all) {
    fail("has ended");
  }
  Reply reply;
  std::vector<std::byte> bytes(kMostPacketBytes);
  while (true) {
    pollfd entry{socket.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(deadline.remaining().count()));
    Packet answer = receive_packet(socket, bytes);
    if (answer.state != Packet::State::hung_up && deadline.expired()) {
      fail("does not answer; its agent, process " +
           std::to_string(job_.agent_pid) + ", may be stopped");
    }
    if (answer.state == Packet::State::hung_up) break;
    if (answer.state != Packet::State::received) continue;
    if (answer.bytes > bytes.size() ||
        reply.text.size() + answer.bytes > AgentSocket::kAnswerBytes) {
      fail("gave an answer that this lockstep does not read");
    }
    reply.text.append(reinterpret_cast<const char*>(bytes.data()),
                      answer.bytes);
    if (answer.descriptor) reply.descriptor = std::move(answer.descriptor);
  }
  if (reply.text.empty()) fail("has ended");
  return reply;
}

JobStatus JobLink::watch(milliseconds how_long) {
  const nlohmann::json question{{"question", "watch"},
                                {"milliseconds", how_long.count()}};
  watched_ns_ = steady_ns();
  Reply reply = ask(question.dump());
  if (!reply.descriptor) {
    fail("gave an answer that this lockstep does not read");
  }
  if (!nlohmann::json::accept(reply.text)) fail("has ended");
  JobStatus status = job_status_of(reply.text);
  board_.emplace(StatusBoard::map(std::move(reply.descriptor)));
  // Callers index with it, and the agent may be another user's.
  for (size_t at = 0; at < status.workers.size(); ++at) {
    if (status.workers[at].local_rank != static_cast<int>(at) ||
        status.workers[at].local_rank >= board_->places()) {
      fail("gave an answer that this lockstep does not read");
    }
  }
  return status;
}

int64_t JobLink::ask_profile(milliseconds duration, int64_t first_step) {
  const nlohmann::json question{{"question", "profile"},
                                {"milliseconds", duration.count()},
                                {"first_step", first_step}};
  return ask_number(question.dump());
}

void JobLink::stop_profile(int64_t number) {
  const nlohmann::json question{{"question", "stop_profile"},
                                {"number", number}};
  ask_number(question.dump());
}

int32_t JobLink::ask_stacks() {
  const nlohmann::json question{{"question", "stacks"}};
  return static_cast<int32_t>(ask_number(question.dump()));
}

int64_t JobLink::ask_number(const std::string& question) {
  const Reply reply = ask(question);
  const auto number = nlohmann::json::parse(reply.text, nullptr, false);
  if (!number.is_number_integer()) fail("refused: " + reply.text);
  return number.get<int64_t>();
}

void JobLink::await_ranks(const JobStatus& status, milliseconds allowed) const {
  const Deadline deadline = Deadline::after(allowed);
  const auto is_silent = [&](const WorkerStatus& worker) {
    if (!worker.publishes || worker.exit_code) return false;
    const auto rank = board_->read(worker.local_rank);
    return !rank || rank->published_ns < watched_ns_;
  };
  while (std::ranges::any_of(status.workers, is_silent) &&
         !deadline.expired()) {
    std::this_thread::sleep_for(kLookInterval);
  }
}

}  // namespace lockstep::internal
