#include "lockstep/launch/watch/source_finder.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/module.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/worker/native_stack.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {
namespace {

// Questions and answers are not longer: any socket's buffer holds so much.
constexpr size_t kMostSourceBytes = 32 << 10;
constexpr std::chrono::milliseconds kSourceKillTime{1000};
// Where the child has its socket; other descriptors above are closed.
constexpr int kSourceSocket = STDERR_FILENO + 1;

std::unique_ptr<SourceReader> open_reader() {
  return std::unique_ptr<SourceReader>(reinterpret_cast<OpenSourceReader>(
      load_module("sources.so", kOpenSourceReader))());
}

// Answers questions ("<place> <file>") with "<function>\0<line>" until the
// other end of `socket` is closed.
int serve_sources(SourceReader& reader, int socket, pid_t parent) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent ||
      ::dup2(socket, kSourceSocket) < 0) {
    return 1;
  }
  // Nobody may wait for the end of a pipe that only this process still has. (A
  // kernel before 5.9 keeps them open for as long as frames are looked up.)
  ::syscall(SYS_close_range, kSourceSocket + 1, ~0U, 0U);
  std::array<char, kMostSourceBytes> bytes;
  while (true) {
    const ssize_t count = ::recv(kSourceSocket, bytes.data(), bytes.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return 0;
    const std::string question(bytes.data(), static_cast<size_t>(count));
    size_t space = 0;
    const uint64_t place = std::stoull(question, &space);
    Source source = reader.read(question.substr(space + 1), place);
    std::string text = source.function + '\0' + source.line;
    if (text.size() > kMostSourceBytes) text.assign(1, '\0');
    ::send(kSourceSocket, text.data(), text.size(), MSG_NOSIGNAL);
  }
}

// A thread takes some kilobytes, and a rank has some hundred threads at most.
constexpr size_t kMostStacksBytes = 64 << 20;

}  // namespace

// The module, in a process of its own that can be ended: libdw opens files that
// the one it reads names, and would wait for ever at a pipe among them, and a
// file that is cut while it is read kills the reader.
class SourceFinder::Process {
 public:
  // Throws std::runtime_error if the module was not installed, if there is no
  // libdw, or if no process can be started.
  Process() : Process(open_reader(), socket_pair()) {}
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    child_.signal(SIGKILL);
    const Deadline deadline = Deadline::after(kSourceKillTime);
    while (!child_.reap() && !deadline.expired()) ::poll(nullptr, 0, 1);
  }

  // Returns nothing if the process has ended, or if it does not answer before
  // `deadline`; then ask no more.
  std::optional<Source> ask(const std::string& file, uint64_t place,
                            const Deadline& deadline) {
    const std::string question = std::to_string(place) + ' ' + file;
    if (question.size() > kMostSourceBytes) return Source();  // no such path
    if (::send(socket_.get(), question.data(), question.size(), MSG_NOSIGNAL) <
        0) {
      return std::nullopt;
    }
    std::array<char, kMostSourceBytes> bytes;
    do {
      pollfd entry{socket_.get(), POLLIN, 0};
      ::poll(&entry, 1,
             static_cast<int>(bounded_timeout(deadline.remaining()).count()));
      const ssize_t count =
          ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count > 0) {
        const std::string_view text(bytes.data(), static_cast<size_t>(count));
        const size_t end = text.find('\0');
        return Source{.function = std::string(text.substr(0, end)),
                      .line = std::string(text.substr(end + 1))};
      }
      if (count == 0 || (errno != EAGAIN && errno != EINTR)) break;
    } while (!deadline.expired());
    return std::nullopt;
  }

 private:
  using Ends = std::array<FileDescriptor, 2>;

  static Ends socket_pair() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
      throw_errno("a socket for reading sources");
    }
    return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
  }

  // The module is loaded before the fork: this process may have several
  // threads, and one of them may be loading something.
  Process(std::unique_ptr<SourceReader> reader, Ends ends)
      : socket_(std::move(ends[0])),
        child_(ChildProcess::fork(
            "starting a process for reading sources", [&, parent = ::getpid()] {
              return serve_sources(*reader, ends[1].get(), parent);
            })) {}

  FileDescriptor socket_;
  ChildProcess child_;
};

SourceFinder::SourceFinder(std::chrono::milliseconds allowed)
    : deadline_(Deadline::after(allowed)) {}

SourceFinder::~SourceFinder() = default;

const Source& SourceFinder::look_up(const std::string& file, uint64_t place) {
  static const Source none;
  const auto known = known_.find({file, place});
  if (known != known_.end()) return known->second;
  if (deadline_.expired()) return none;
  if (!std::exchange(is_open_, true)) {
    try {
      process_ = std::make_unique<Process>();
    } catch (const std::runtime_error&) {
      // The frames stay as they are.
    }
  }
  if (!process_) return none;
  auto found = process_->ask(file, place, deadline_);
  if (!found) {
    process_.reset();
    return none;
  }
  return known_[{file, place}] = std::move(*found);
}

std::vector<std::string> SourceFinder::texts(
    const std::vector<std::string>& lines) {
  std::vector<std::string> all;
  for (const auto& line : lines) {
    const auto place = module_place(line);
    const Source source =
        place ? look_up(place->module, place->offset) : Source();
    all.push_back(frame_text(line, source.function) +
                  (source.line.empty() ? "" : " at " + source.line));
  }
  return all;
}

bool take_stacks(const std::filesystem::path& attempt, int32_t number,
                 RankStacks& stacks) {
  using nlohmann::json;
  const std::string name = StatusBoard::stacks_file(number, stacks.rank);
  const auto bytes = read_left_file(attempt, name, kMostStacksBytes);
  const json written =
      json::parse(bytes.value_or(""), nullptr, /*allow_exceptions=*/false);
  std::error_code ignored;
  std::filesystem::remove(attempt / name, ignored);
  try {
    std::vector<ThreadStack> threads;
    for (const json& thread : written.at("threads")) {
      threads.push_back(
          {.thread = thread.at("thread"),
           .name = thread.at("name"),
           .frames = thread.at("frames").get<std::vector<std::string>>(),
           .missing = thread.at("missing")});
    }
    stacks.flight_record = written.at("flight_record");
    stacks.threads = std::move(threads);
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

void explain(std::vector<RankStacks>& ranks) {
  SourceFinder sources;
  for (RankStacks& rank : ranks) {
    for (ThreadStack& thread : rank.threads) {
      thread.frames = sources.texts(thread.frames);
    }
  }
}

std::string stacks_text(const std::vector<RankStacks>& ranks) {
  std::string text;
  for (const RankStacks& rank : ranks) {
    text += "rank " + std::to_string(rank.rank) + ", process " +
            std::to_string(rank.pid);
    if (!rank.operation.empty()) text += ", in " + rank.operation;
    text += rank.missing.empty() ? "\n" : ": " + rank.missing + "\n";
    for (const ThreadStack& thread : rank.threads) {
      text += "  thread " + std::to_string(thread.thread) + ", " + thread.name;
      text += thread.missing.empty() ? "\n" : ": " + thread.missing + "\n";
      for (const auto& frame : folded_frames(thread.frames)) {
        text += "    " + frame + "\n";
      }
    }
    text += '\n';
  }
  return shown_text(text);
}

}  // namespace lockstep::internal
