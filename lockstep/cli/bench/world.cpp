#include "lockstep/cli/bench/world.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal::bench {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

// We wait this much longer than the ranks: they have `timeout` too and know
// better what went wrong, so they should report first.
constexpr milliseconds kAnswerAllowance{2000};
// How long the others may take, once one rank has failed, to report a failure
// or to die: the cause is then chosen among all of them.
constexpr milliseconds kAfterFailure{500};
constexpr milliseconds kEndAllowance{10'000};
constexpr milliseconds kKillAllowance{5000};
// mpirun itself waits for some seconds before it kills its ranks, and then
// removes their files.
constexpr milliseconds kTermAllowance{10'000};
constexpr milliseconds kReapInterval{5};

// {read end, write end}, above the standard streams.
std::pair<FileDescriptor, FileDescriptor> make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  FileDescriptor reading(ends[0]);
  FileDescriptor writing(ends[1]);
  return {above_standard_streams(std::move(reading)),
          above_standard_streams(std::move(writing))};
}

bool is_failure(const json& answer) { return answer.contains("error"); }

}  // namespace

World::World(std::string name, const Program& program, Launch launch, int ranks,
             milliseconds timeout, const StopSignal& stop)
    : name_(std::move(name)),
      launch_(launch),
      size_(ranks),
      timeout_(timeout),
      stop_(stop),
      port_(StorePort::hold("127.0.0.1", 0)) {
  const int processes = launch == Launch::by_world ? ranks : 1;
  for (int rank = 0; rank < processes; ++rank) start_rank(program, rank);
}

void World::await_ready() { facts_ = collect(0).at(0); }

World::~World() {
  if (launch_ == Launch::by_program) {
    // The program has files to remove, and its ranks may be in other process
    // groups. When their stdin ends, they end by themselves, unless they are at
    // work.
    for (auto& rank : ranks_) rank.in.reset();
    for (const auto& rank : ranks_) rank.process.signal_group(SIGTERM);
    reap(Deadline::after(kTermAllowance));
  }
  for (const auto& rank : ranks_) rank.process.signal_group(SIGKILL);
  reap(Deadline::after(kKillAllowance));
}

void World::start_rank(const Program& program, int rank) {
  WorkerIdentity identity;
  identity.local_rank = rank;
  identity.local_world_size = size_;
  identity.master_port = port_.port();
  identity.run_id = "bench-" + std::to_string(getpid());
  identity.master_listen_fd = rank == 0 ? port_.fd() : -1;
  const auto environment = worker_environment(identity, current_environment());
  auto [in, in_write] = make_pipe();
  auto [out_read, out] = make_pipe();
  ranks_.push_back(
      {.process = start_program(
           {.what = "starting rank " + std::to_string(rank) + " of " + name_,
            .path = program.path,
            .arguments = program.arguments,
            .environment = environment,
            .stdin_fd = in.get(),
            .stdout_fd = out.get(),
            .stderr_fd = STDERR_FILENO,
            .inherited_fds = {identity.master_listen_fd},
            .surroundings = {.signal_mask = stop_.original_mask()}}),
       .in = std::move(in_write),
       .out = std::move(out_read)});
}

std::vector<json> World::ask(json request) {
  request["id"] = ++last_id_;
  const std::string line = request.dump() + '\n';
  for (auto& rank : ranks_) {
    // A line fits into a pipe. If the rank no longer reads, collect() notices.
    [[maybe_unused]] const auto written =
        write(rank.in.get(), line.data(), line.size());
  }
  return collect(last_id_);
}

std::vector<json> World::collect(int64_t id) {
  for (auto& rank : ranks_) rank.answer = nullptr;
  const Deadline deadline = Deadline::after(timeout_ + kAnswerAllowance);
  while (!all_answered()) {
    if (any_failed()) {
      const Deadline grace = Deadline::after(kAfterFailure);
      while (!all_answered() && !grace.expired()) {
        await_any(grace);
        for (auto& rank : ranks_) read_some(rank, id);
      }
      if (!all_answered()) fail();
      break;
    }
    if (deadline.expired()) fail();
    await_any(deadline);
    for (auto& rank : ranks_) read_some(rank, id);
  }
  std::vector<json> answers = take_answers();
  const auto failed = std::ranges::count_if(answers, is_failure);
  if (failed == 0) return answers;
  const auto& first = *std::ranges::find_if(answers, is_failure);
  const std::string text = first["error"].get<std::string>();
  if (failed == std::ssize(answers))
    throw Refusal(text, first.value("usage", false));
  throw WorldError(name_ + ": rank " + std::to_string(first.value("rank", -1)) +
                   ": " + text);
}

std::vector<json> World::take_answers() {
  std::vector<json> answers;
  for (auto& rank : ranks_) answers.push_back(std::move(rank.answer));
  if (launch_ == Launch::by_program && answers[0].contains("ranks")) {
    answers = answers[0]["ranks"].get<std::vector<json>>();
    if (std::ssize(answers) != size_) {
      throw WorldError(name_ + " answered for " +
                       std::to_string(answers.size()) + " of " +
                       std::to_string(size_) + " ranks");
    }
  }
  return answers;
}

bool World::all_answered() const {
  return std::ranges::none_of(
      ranks_, [](const Rank& rank) { return rank.answer.is_null(); });
}

bool World::any_failed() const {
  return std::ranges::any_of(ranks_, [](const Rank& rank) {
    return rank.answer.is_null() ? !rank.out : is_failure(rank.answer);
  });
}

void World::await_any(const Deadline& deadline) {
  stop_.check();
  std::vector<pollfd> entries{{stop_.fd(), POLLIN, 0}};
  for (const auto& rank : ranks_) {
    if (rank.out) entries.push_back({rank.out.get(), POLLIN, 0});
  }
  const auto left = std::min<int64_t>(deadline.remaining().count(), INT_MAX);
  if (poll(entries.data(), entries.size(), static_cast<int>(left)) < 0 &&
      errno != EINTR) {
    throw_errno("poll");
  }
  stop_.check();
}

void World::read_some(Rank& rank, int64_t id) {
  if (!rank.out) return;
  pollfd entry{rank.out.get(), POLLIN, 0};
  if (poll(&entry, 1, 0) <= 0) return;
  char bytes[65536];
  const ssize_t count = read(rank.out.get(), bytes, sizeof(bytes));
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (count <= 0) {
    rank.out.reset();
    return;
  }
  rank.unread.append(bytes, static_cast<size_t>(count));
  size_t begin = 0;
  for (size_t end; (end = rank.unread.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    // Any other line comes from a library (Gloo greets on stdout).
    const auto line = std::string_view(rank.unread).substr(begin, end - begin);
    auto answer = json::parse(line, nullptr, false);
    if (answer.is_object() && answer.value("id", int64_t{-1}) == id) {
      rank.answer = std::move(answer);
    }
  }
  rank.unread.erase(0, begin);
}

void World::reap(const Deadline& deadline) {
  while (true) {
    bool all = true;
    for (auto& rank : ranks_) {
      if (rank.process.ended()) continue;
      int status = 0;
      const pid_t pid = waitpid(rank.process.pid(), &status, WNOHANG);
      if (pid == rank.process.pid()) {
        rank.process.set_ended(status);
      } else {
        all = false;
      }
    }
    if (all || deadline.expired()) return;
    poll(nullptr, 0, static_cast<int>(kReapInterval.count()));
  }
}

void World::fail() {
  reap(Deadline::after(milliseconds(0)));
  // Blames a killed rank first, then one that ended by itself: the failures of
  // the others are its echo.
  const Rank* cause = nullptr;
  const auto weight = [](const Rank& rank) {
    if (rank.process.ended()) return rank.process.ending_signal() ? 0 : 1;
    if (is_failure(rank.answer)) return 2;
    if (!rank.answer.is_null()) return 5;
    return rank.out ? 4 : 3;
  };
  size_t number = 0;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (cause == nullptr || weight(ranks_[i]) < weight(*cause)) {
      cause = &ranks_[i];
      number = i;
    }
  }
  std::string text = name_ + ": ";
  text += launch_ == Launch::by_world
              ? "rank " + std::to_string(number) + " of " +
                    std::to_string(ranks_.size()) + " "
              : "its program ";
  const auto words = [](const Rank& rank) {
    return "failed: " + rank.answer["error"].get<std::string>();
  };
  const auto signal =
      cause->process.ended() ? cause->process.ending_signal() : std::nullopt;
  if (!signal && is_failure(cause->answer)) {
    // A mistake of the user is the same for all ranks, but another one may
    // still be loading LibTorch and has not found it yet.
    if (cause->answer.value("usage", false)) {
      throw Refusal(cause->answer["error"].get<std::string>(),
                    /*is_users_mistake=*/true);
    }
    throw WorldError(text + words(*cause));
  }
  if (signal) {
    text += "was killed by " + signal_name(*signal);
  } else if (cause->process.ended()) {
    text +=
        "ended with exit code " + std::to_string(cause->process.exit_code());
  } else if (!cause->out) {
    text += "closed its stdout without an answer";
  } else {
    text += "did not answer within " +
            std::to_string((timeout_ + kAnswerAllowance).count()) +
            " ms; see --timeout";
  }
  // A rank that has ended cannot say more, so this adds what another one
  // reports.
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!is_failure(ranks_[i].answer)) continue;
    text += "; rank " + std::to_string(i) + " " + words(ranks_[i]);
    break;
  }
  throw WorldError(text);
}

void World::finish() {
  for (auto& rank : ranks_) rank.in.reset();
  const Deadline deadline = Deadline::after(kEndAllowance);
  const auto any_open = [this] {
    return std::ranges::any_of(ranks_,
                               [](const Rank& rank) { return bool(rank.out); });
  };
  while (any_open() && !deadline.expired()) {
    await_any(deadline);
    for (auto& rank : ranks_) read_some(rank, -1);
  }
  reap(deadline);
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const auto& process = ranks_[i].process;
    const std::string rank = name_ + ": rank " + std::to_string(i);
    if (!process.ended()) {
      throw WorldError(rank + " did not end within " +
                       std::to_string(kEndAllowance.count()) + " ms");
    }
    if (process.exit_code() != 0) {
      throw WorldError(rank + " ended with exit code " +
                       std::to_string(process.exit_code()));
    }
  }
}

}  // namespace lockstep::internal::bench
