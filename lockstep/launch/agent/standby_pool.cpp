#include "lockstep/launch/agent/standby_pool.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor_mark.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/worker/standby_place.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{1000};
constexpr milliseconds kLongestPause{60'000};

milliseconds pause_after(int early_ends) {
  return std::min(kLongestPause, kFirstPause * (1 << std::min(early_ends, 10)));
}

// Returns the last line of what a process wrote into its early_output_file();
// empty if there is none.
std::string last_line(const FileDescriptor& file) {
  constexpr off_t kMost = 2048;
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return {};
  std::array<char, static_cast<size_t>(kMost)> bytes;
  const ssize_t count = ::pread(file.get(), bytes.data(), bytes.size(),
                                std::max<off_t>(0, status.st_size - kMost));
  std::string_view text(bytes.data(),
                        static_cast<size_t>(std::max<ssize_t>(0, count)));
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  const size_t newline = text.rfind('\n');
  if (newline != text.npos) text.remove_prefix(newline + 1);
  return std::string(text);
}

// Binds every thread of a process, which may have made some.
void bind_threads(pid_t pid, const std::set<int>& cpus) {
  const std::vector<unsigned long> mask = affinity_mask(cpus);
  std::error_code ignored;
  const std::filesystem::directory_iterator threads(
      "/proc/" + std::to_string(pid) + "/task", ignored);
  for (const auto& thread : threads) {
    ::syscall(SYS_sched_setaffinity,
              std::stoi(thread.path().filename().string()),
              mask.size() * sizeof(unsigned long), mask.data());
  }
}

// Returns whether `path` is an executable that holds the code of
// worker/standby_place.h, or needs a library that does.
bool is_linked_with_lockstep(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0 || status.st_size == 0) {
    return false;
  }
  const auto size = static_cast<size_t>(status.st_size);
  void* const bytes =
      ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (bytes == MAP_FAILED) return false;
  const auto holds = [&](std::string_view text) {
    return ::memmem(bytes, size, text.data(), text.size()) != nullptr;
  };
  const bool linked = std::string_view(static_cast<const char*>(bytes), size)
                          .starts_with(
                              "\x7f"
                              "ELF") &&
                      (holds(kStandbyVariable) || holds("liblockstep"));
  ::munmap(bytes, size);
  return linked;
}

// Returns the variables of a worker's environment that say which place it has
// in the job, apart from the attempt.
std::vector<std::string> place_of(const std::vector<std::string>& environment) {
  std::vector<std::string> place;
  for (const std::string_view name :
       {"RANK=", "LOCAL_RANK=", "GROUP_RANK=", "WORLD_SIZE=",
        "LOCAL_WORLD_SIZE=", "OMP_NUM_THREADS="}) {
    for (const std::string& entry : environment) {
      if (entry.starts_with(name)) place.push_back(entry);
    }
  }
  return place;
}

std::string words_of_end(int wait_status) {
  const int exit_code = exit_code_of(wait_status);
  return WIFSIGNALED(wait_status)
             ? "killed by " + signal_name(WTERMSIG(wait_status))
             : "exit code " + std::to_string(exit_code);
}

}  // namespace

StandbyPool::StandbyPool(StandbyPoolOptions options, Report report)
    : options_(std::move(options)), report_(std::move(report)) {}

bool StandbyPool::lacks_one() const {
  const bool one_comes = std::ranges::any_of(
      members_, [](const Member& member) { return !member.waits; });
  return !given_up_ && !one_comes && waiting() < options_.processes;
}

void StandbyPool::refill() {
  if (!lacks_one() || (not_before_ && !not_before_->expired())) return;
  not_before_.reset();
  try {
    start();
  } catch (const std::exception& error) {
    note_early_end(error.what());
  }
}

void StandbyPool::start() {
  constexpr const char* kWhat = "starting a standby process";
  auto [own, theirs] = standby_sockets(kWhat);
  const FileDescriptor no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!no_input) throw_errno(kWhat);
  FileDescriptor out = early_output_file();
  FileDescriptor err = early_output_file();
  std::vector<std::string> environment = options_.environment;
  environment.push_back(std::string(kStandbyVariable) + "=" +
                        descriptor_mark(theirs.get()));
  members_.push_back({start_program({.what = kWhat,
                                     .path = options_.path,
                                     .arguments = options_.arguments,
                                     .environment = environment,
                                     .stdin_fd = no_input.get(),
                                     .stdout_fd = out.get(),
                                     .stderr_fd = err.get(),
                                     .inherited_fds = {theirs.get()},
                                     .cpus = {},
                                     .surroundings = options_.surroundings}),
                      std::move(own), std::move(out), std::move(err)});
}

std::optional<StandbyPool::Taken> StandbyPool::take(const ChildStart& worker) {
  if (worker.path != options_.path || worker.arguments != options_.arguments) {
    return std::nullopt;
  }
  StandbyPlace place;
  for (const std::string& entry : worker.environment) {
    if (std::ranges::find(options_.environment, entry) ==
        options_.environment.end()) {
      place.environment.push_back(entry);
    }
  }
  place.standard_fds = {worker.stdin_fd, worker.stdout_fd, worker.stderr_fd};
  place.master_listen_fd = worker.inherited_fds.at(0);
  place.memory_fd = worker.inherited_fds.at(1);
  const std::vector<std::string> wanted = place_of(worker.environment);
  for (const bool kept : {true, false}) {
    for (auto member = members_.begin(); member != members_.end(); ++member) {
      if (!member->waits || !member->socket) continue;
      if (kept ? member->place != wanted : !member->place.empty()) continue;
      if (!worker.cpus.empty()) {
        bind_threads(member->process.pid(), worker.cpus);
      }
      // If it has just died, that is noticed when it is reaped.
      if (!send_place(member->socket, place)) continue;
      // Somebody may have stopped it while it had nothing to do.
      member->process.signal(SIGCONT);
      member->process.begin_lifetime();
      std::optional<Taken> taken(std::in_place, std::move(member->process),
                                 std::move(member->socket));
      members_.erase(member);
      early_ends_ = 0;
      return taken;
    }
  }
  return std::nullopt;
}

void StandbyPool::keep(ChildProcess process, FileDescriptor socket,
                       const std::vector<std::string>& environment) {
  members_.push_back({.process = std::move(process),
                      .socket = std::move(socket),
                      .out = {},
                      .err = {},
                      .waits = true,
                      .place = place_of(environment)});
}

void StandbyPool::end_kept() {
  std::erase_if(members_,
                [](const Member& member) { return !member.place.empty(); });
}

bool StandbyPool::set_ended(pid_t pid, int wait_status) {
  const auto member = std::ranges::find_if(
      members_, [&](const Member& one) { return one.process.pid() == pid; });
  if (member == members_.end()) return false;
  member->process.set_ended(wait_status);
  // It may have said before its end why it cannot stand by.
  hear(*member);
  if (given_up_) return true;
  if (!member->place.empty()) {
    members_.erase(member);  // a new worker takes its place
    return true;
  }
  std::string said = last_line(member->err);
  if (said.empty()) said = last_line(member->out);
  members_.erase(member);
  if (wait_status == 0) {
    give_up(
        "the program came to its end without init_process_group(), so it "
        "cannot be kept waiting there");
  } else {
    note_early_end(words_of_end(wait_status) +
                   (said.empty() ? "" : "; its last line: " + said));
  }
  return true;
}

void StandbyPool::note_early_end(const std::string& words) {
  const milliseconds pause = pause_after(early_ends_++);
  not_before_ = Deadline::after(pause);
  if (std::exchange(has_reported_, true)) return;
  report_("a standby process ended before it had a place: " + words +
          "; another is started in " + seconds_text(pause) +
          ", and later ends are not reported");
}

void StandbyPool::give_up(const std::string& reason) {
  given_up_ = true;
  report_("--standby has no effect from here on: " + reason);
  members_.clear();
}

void StandbyPool::hear(Member& member) {
  // give_up() destroys the member.
  while (!given_up_ && member.socket) {
    std::array<char, 256> words;
    const ssize_t count =
        ::recv(member.socket.get(), words.data(), words.size(), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      member.socket.reset();
      return;
    }
    const std::string_view text(words.data(), static_cast<size_t>(count));
    if (text == kStandbyWaits) {
      member.waits = true;
    } else if (text.starts_with(kStandbyRead)) {
      give_up("the program asks for " +
              std::string(text.substr(std::string_view(kStandbyRead).size())) +
              " before init_process_group(), when a standby process has no "
              "rank yet; call init_process_group() first");
    }
  }
}

void StandbyPool::add_poll_entries(std::vector<pollfd>& entries) const {
  for (const Member& member : members_) {
    if (member.socket) entries.push_back({member.socket.get(), POLLIN, 0});
  }
}

void StandbyPool::handle_poll_entries(std::span<const pollfd> entries) {
  for (auto member = members_.begin();
       !given_up_ && member != members_.end();) {
    // hear() may remove all members.
    Member& one = *member++;
    if (one.socket && has_come(entries, one.socket.get())) hear(one);
  }
}

int StandbyPool::waiting() const {
  return static_cast<int>(
      std::ranges::count_if(members_, [](const Member& member) {
        return member.waits && member.place.empty();
      }));
}

int StandbyPool::kept() const {
  return static_cast<int>(std::ranges::count_if(
      members_, [](const Member& member) { return !member.place.empty(); }));
}

std::set<pid_t> StandbyPool::pids() const {
  std::set<pid_t> all;
  for (const Member& member : members_) all.insert(member.process.pid());
  return all;
}

StandbySockets standby_sockets(const std::string& what) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_errno(what);
  }
  FileDescriptor own(ends[0]);
  return {std::move(own), above_standard_streams(FileDescriptor(ends[1]))};
}

void require_standby_program(const std::string& path,
                             const std::vector<std::string>& arguments) {
  Program expanded{.path = path, .arguments = arguments};
  expanded.expand_local_rank(0);
  if (expanded.arguments != arguments) {
    throw std::invalid_argument(
        "--standby starts processes that have no local rank yet, and the "
        "program's arguments hold $local_rank; leave out one of them");
  }
  if (!is_linked_with_lockstep(path)) {
    throw std::invalid_argument(
        "--standby is for C++ programs that call Lockstep's "
        "init_process_group(), where a standby process waits, and " +
        path +
        " is not linked with it; leave out --standby, or give the program "
        "itself instead of a script that starts it");
  }
}

}  // namespace lockstep::internal
