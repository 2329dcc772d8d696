#include "tests/comm/shm/protocol_world.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal::shm::testing {
namespace {

using std::chrono::seconds;

constexpr milliseconds kMeetingTime{20'000};

const char* name_of(End::Kind kind) {
  switch (kind) {
    case End::Kind::well:
      return "well";
    case End::Kind::broken:
      return "GroupBroken";
    case End::Kind::mismatch:
      return "CallMismatch";
    case End::Kind::other:
      return "exception";
    case End::Kind::killed:
      return "killed";
    case End::Kind::hung:
      return "hung";
  }
  return "?";
}

}  // namespace

Tuning small_tuning() {
  return {.one_shot_bytes = 256, .chunk_bytes = 4096, .streaming_bytes = 8192};
}

std::ostream& operator<<(std::ostream& out, const End& end) {
  return out << name_of(end.kind) << ": " << end.words;
}

std::string faults(const std::vector<End>& ends) {
  std::string all;
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    if (ends[rank].kind == End::Kind::well) continue;
    all += "rank " + std::to_string(rank) + ": " + name_of(ends[rank].kind) +
           ": " + ends[rank].words + "\n";
  }
  return all;
}

End end_of(const std::function<void()>& body) {
  try {
    body();
    return {.kind = End::Kind::well, .words = ""};
  } catch (const GroupBroken& error) {
    return {.kind = End::Kind::broken, .words = error.what()};
  } catch (const CallMismatch& error) {
    return {.kind = End::Kind::mismatch, .words = error.what()};
  } catch (const std::exception& error) {
    return {.kind = End::Kind::other, .words = error.what()};
  }
}

void sleep_for(std::chrono::microseconds time) {
  std::this_thread::sleep_for(time);
}

ThreadWorld::ThreadWorld(int size, const Tuning& tuning,
                         const std::vector<int>& global_ranks)
    : groups_(size) {
  auto memory = std::make_shared<SharedMemory>(
      SharedMemory::create(Segment::bytes(size, tuning)));
  const Segment segment(memory, size, tuning);
  for (int rank = 0; rank < size; ++rank) {
    auto& cores = segment.state(rank).cores;
    ::sched_getaffinity(0, sizeof(cores),
                        reinterpret_cast<cpu_set_t*>(cores.data()));
  }
  std::vector<std::vector<FileDescriptor>> sockets(size);
  for (auto& row : sockets) row.resize(size);
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      int pair[2];
      if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC,
                       0, pair) != 0) {
        throw_errno("socketpair");
      }
      sockets[a][b] = FileDescriptor(pair[0]);
      sockets[b][a] = FileDescriptor(pair[1]);
    }
  }
  std::vector<End> ends(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ends[rank] = end_of([&] {
        groups_[rank] = std::make_unique<Group>(Membership{
            .meeting = {.rank = rank,
                        .size = size,
                        .global_ranks = global_ranks,
                        .timeout = kMeetingTime,
                        .tuning = tuning},
            .segment = memory,
            .links = std::make_shared<PeerLinks>(std::move(sockets[rank]))});
      });
    });
  }
  for (auto& thread : threads) thread.join();
  if (const auto wrong = faults(ends); !wrong.empty()) {
    throw std::runtime_error(wrong);
  }
}

std::vector<End> ThreadWorld::run(const std::function<void(Group&)>& body) {
  std::vector<End> ends(groups_.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < groups_.size(); ++rank) {
    if (!groups_[rank]) continue;
    threads.emplace_back(
        [&, rank] { ends[rank] = end_of([&] { body(*groups_[rank]); }); });
  }
  for (auto& thread : threads) thread.join();
  return ends;
}

// Memory that all processes of a world inherit; zeros at first.
struct ForkedWorld::Board {
  static constexpr int kEntries = 1024;
  struct Entry {
    std::atomic<bool> ready;
    char key[128];
    uint32_t bytes;
    char value[384];
  };
  struct Report {
    std::atomic<bool> ready;
    End::Kind kind;
    char words[4000];
  };

  Signs signs;
  std::atomic<uint32_t> entries;
  Entry entry[kEntries];
  Report report[kMaxRanks];

  void set(const std::string& key, const std::string& value) {
    const auto i = entries.fetch_add(1);
    if (i >= kEntries || key.size() >= sizeof(Entry::key) ||
        value.size() > sizeof(Entry::value)) {
      throw std::runtime_error("the board of this test is too small for " +
                               key);
    }
    std::memcpy(entry[i].key, key.c_str(), key.size() + 1);
    std::memcpy(entry[i].value, value.data(), value.size());
    entry[i].bytes = static_cast<uint32_t>(value.size());
    entry[i].ready.store(true);
  }

  std::optional<std::string> get(const std::string& key, milliseconds allowed) {
    const auto deadline = Deadline::after(allowed);
    for (;;) {
      for (auto& one : entry) {
        if (one.ready.load() && key == one.key) {
          return std::string(one.value, one.bytes);
        }
      }
      if (deadline.expired()) return std::nullopt;
      sleep_for(std::chrono::microseconds(200));
    }
  }
};

ForkedWorld::ForkedWorld(int size, const Tuning& tuning, const Body& body,
                         const std::vector<int>& global_ranks)
    : size_(size) {
  void* memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap");
  board_ = new (memory) Board();
  const pid_t parent = ::getpid();
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = ::fork();
    if (process < 0) throw_errno("fork");
    if (process == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      run_rank(rank, tuning, body, global_ranks);
      ::_exit(0);
    }
    processes_.push_back(process);
  }
}

void ForkedWorld::run_rank(int rank, const Tuning& tuning, const Body& body,
                           const std::vector<int>& global_ranks) {
  const End end = end_of([&] {
    const Exchange exchange{
        .set = [this](const std::string& key,
                      const std::string& value) { board_->set(key, value); },
        .get = [this](
                   const std::string& key,
                   milliseconds allowed) { return board_->get(key, allowed); }};
    Group group(meet(exchange, {.rank = rank,
                                .size = size_,
                                .global_ranks = global_ranks,
                                .timeout = kMeetingTime,
                                .tuning = tuning}));
    body(group, board_->signs);
  });
  auto& report = board_->report[rank];
  report.kind = end.kind;
  const auto bytes = std::min(end.words.size(), sizeof(report.words) - 1);
  std::memcpy(report.words, end.words.data(), bytes);
  report.ready.store(true);
}

ForkedWorld::~ForkedWorld() {
  for (pid_t process : processes_) {
    if (process > 0) {
      ::kill(process, SIGKILL);
      ::waitpid(process, nullptr, 0);
    }
  }
  ::munmap(board_, sizeof(Board));
}

Signs& ForkedWorld::signs() { return board_->signs; }

void ForkedWorld::signal(int rank, int signal) {
  if (processes_.at(rank) > 0) ::kill(processes_[rank], signal);
}

bool ForkedWorld::await(const std::function<bool()>& condition) {
  const auto deadline = Deadline::after(seconds(20));
  while (!condition()) {
    if (deadline.expired()) return false;
    sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

bool ForkedWorld::await_steps(uint64_t steps) {
  return await([&] {
    return std::all_of(board_->signs.steps, board_->signs.steps + size_,
                       [&](const auto& done) { return done.load() >= steps; });
  });
}

std::vector<End> ForkedWorld::finish(seconds allowed) {
  const auto deadline = Deadline::after(allowed);
  std::vector<End> ends(size_);
  size_t running = processes_.size();
  while (running > 0) {
    const bool over = deadline.expired();
    for (int rank = 0; rank < size_; ++rank) {
      if (processes_[rank] <= 0) continue;
      if (over) ::kill(processes_[rank], SIGKILL);
      int status = 0;
      if (::waitpid(processes_[rank], &status, over ? 0 : WNOHANG) <= 0) {
        continue;
      }
      processes_[rank] = -1;
      --running;
      const auto& report = board_->report[rank];
      if (report.ready.load()) {
        ends[rank] = {.kind = report.kind, .words = report.words};
      } else {
        ends[rank] = {
            .kind = over ? End::Kind::hung : End::Kind::killed,
            .words = WIFSIGNALED(status)
                         ? "signal " + std::to_string(WTERMSIG(status))
                         : "exit code " + std::to_string(WEXITSTATUS(status))};
      }
    }
    if (running > 0) sleep_for(std::chrono::microseconds(500));
  }
  return ends;
}

}  // namespace lockstep::internal::shm::testing
