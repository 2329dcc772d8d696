#include "lockstep/cli/doctor/captured_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/child_process.h"

namespace lockstep::internal {
namespace {

constexpr size_t kMostText = size_t{1} << 20;
constexpr std::chrono::milliseconds kReapInterval{2};
// A process that got SIGKILL ends within this time, unless the kernel itself
// holds it.
constexpr std::chrono::milliseconds kKillAllowance{5'000};

struct Stream {
  FileDescriptor read_end;
  std::string& text;
};

std::pair<FileDescriptor, FileDescriptor> pipe_ends() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  return {FileDescriptor(ends[0]),
          above_standard_streams(FileDescriptor(ends[1]))};
}

void read_some(Stream& stream) {
  std::array<char, 65536> bytes;
  const ssize_t count = read(stream.read_end.get(), bytes.data(), bytes.size());
  if (count < 0 && errno == EINTR) return;
  if (count <= 0) {
    stream.read_end.reset();
    return;
  }
  const size_t room = kMostText - stream.text.size();
  stream.text.append(bytes.data(), std::min(static_cast<size_t>(count), room));
}

void await_end(ChildProcess& child, const Deadline& deadline) {
  while (!child.reap() && !deadline.expired()) {
    poll(nullptr, 0, static_cast<int>(kReapInterval.count()));
  }
}

}  // namespace

std::string CapturedProgram::last_line() const {
  const size_t last = err.find_last_not_of("\n ");
  if (last == std::string::npos) return {};
  const size_t before = err.rfind('\n', last);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return err.substr(begin, last + 1 - begin);
}

CapturedProgram run_captured(const std::filesystem::path& path,
                             const std::vector<std::string>& arguments,
                             std::chrono::milliseconds allowed) {
  const Deadline deadline = Deadline::after(allowed);
  CapturedProgram result;
  auto [out, out_end] = pipe_ends();
  auto [err, err_end] = pipe_ends();
  const FileDescriptor nothing = above_standard_streams(
      FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)));
  std::vector<std::string> all{path.filename()};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const auto environment = current_environment();
  Surroundings surroundings;
  sigprocmask(SIG_SETMASK, nullptr, &surroundings.signal_mask);
  auto child = ChildProcess::start({.what = "starting " + path.string(),
                                    .path = path,
                                    .arguments = all,
                                    .environment = environment,
                                    .stdin_fd = nothing.get(),
                                    .stdout_fd = out_end.get(),
                                    .stderr_fd = err_end.get(),
                                    .surroundings = surroundings});
  out_end.reset();
  err_end.reset();
  std::array<Stream, 2> streams{Stream{std::move(out), result.out},
                                Stream{std::move(err), result.err}};
  while ((streams[0].read_end || streams[1].read_end) && !deadline.expired()) {
    std::array<pollfd, 2> entries{pollfd{streams[0].read_end.get(), POLLIN, 0},
                                  pollfd{streams[1].read_end.get(), POLLIN, 0}};
    const auto left = std::min<int64_t>(deadline.remaining().count(), INT_MAX);
    if (poll(entries.data(), entries.size(), static_cast<int>(left)) <= 0) {
      continue;
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      if (entries[i].revents != 0) read_some(streams[i]);
    }
  }
  await_end(child, deadline);
  if (!child.ended()) {
    result.in_time = false;
    child.signal_group(SIGKILL);
    await_end(child, Deadline::after(kKillAllowance));
  }
  if (child.ended() && child.wait_status()) {
    result.exit_code = child.exit_code();
  }
  return result;
}

}  // namespace lockstep::internal
