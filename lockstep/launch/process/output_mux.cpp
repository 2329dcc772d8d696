#include "lockstep/launch/process/output_mux.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace lockstep::internal {
namespace {

constexpr size_t kReadSize = 64 * 1024;
constexpr size_t kLongestLine = 1024 * 1024;
constexpr size_t kConsoleBacklog = 256 * 1024;
constexpr size_t kLastLine = 2000;
// How long a part of a line waits for the rest.
constexpr std::chrono::milliseconds kPartWaits{300};
// How long a terminal may take for the rest of a line before a message of the
// launcher.
constexpr std::chrono::milliseconds kLineAllowance{100};

// Returns false, with errno set, if not all was written.
bool write_file(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(fd, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

bool writable_now(int fd) {
  pollfd entry{fd, POLLOUT, 0};
  return poll(&entry, 1, 0) == 1;
}

bool is_one_file(int first_fd, int second_fd) {
  struct stat first {};
  struct stat second {};
  return ::fstat(first_fd, &first) == 0 && ::fstat(second_fd, &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

// Returns how much of `bytes` to write at once. A pipe that poll() reports as
// writable takes PIPE_BUF bytes without blocking and without mixing them with
// another process's. So this is at most PIPE_BUF, and ends after a whole line
// if one fits.
size_t chunk_size(std::string_view bytes) {
  if (bytes.size() <= PIPE_BUF) return bytes.size();
  const size_t newline = bytes.rfind('\n', PIPE_BUF - 1);
  return newline == std::string_view::npos ? PIPE_BUF : newline + 1;
}

}  // namespace

OutputMux::Sink::Sink(const char* sink_name, int console_fd)
    : name(sink_name),
      terminal(open_terminal_of(console_fd)),
      fd(terminal ? terminal.get() : console_fd) {}

OutputMux::OutputMux(Notice notice, int stdout_fd, int stderr_fd)
    : notice_(std::move(notice)),
      out_("stdout", stdout_fd),
      err_("stderr", stderr_fd),
      is_one_file_(is_one_file(stdout_fd, stderr_fd)) {}

FileDescriptor OutputMux::add_stream(Console console, std::string prefix,
                                     LogFile log_file,
                                     std::shared_ptr<std::string> last_line) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("a worker's output pipe");
  FileDescriptor reading(ends[0]);
  FileDescriptor writing(ends[1]);
  // Only our end is non-blocking: the worker's stays blocking, as programs
  // expect.
  if (fcntl(reading.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw_errno("a worker's output pipe");
  }
  streams_.push_back({.pipe = std::move(reading),
                      .log = {std::move(log_file)},
                      .console = console,
                      .prefix = std::move(prefix),
                      .partial_line = {},
                      .last_line = std::move(last_line),
                      .id = next_id_++});
  return writing;
}

void OutputMux::duplicate_lines(Console console,
                                std::vector<std::string> filters,
                                LogFile log_file) {
  duplicates_of(console) = {std::move(filters), {std::move(log_file)}};
}

OutputMux::Sink* OutputMux::sink_of(Console console) {
  return const_cast<Sink*>(std::as_const(*this).sink_of(console));
}

const OutputMux::Sink* OutputMux::sink_of(Console console) const {
  if (console == Console::none) return nullptr;
  return console == Console::out || is_one_file_ ? &out_ : &err_;
}

bool OutputMux::wants_input(const Stream& stream) const {
  if (!stream.pipe) return false;
  const Sink* sink = sink_of(stream.console);
  return sink == nullptr || sink->size() < kConsoleBacklog;
}

void OutputMux::add_poll_entries(std::vector<pollfd>& entries) const {
  for (const Stream& stream : streams_) {
    if (wants_input(stream)) entries.push_back({stream.pipe.get(), POLLIN, 0});
  }
  for (const Sink* sink : {&out_, &err_}) {
    if (sink->size() > 0) entries.push_back({sink->fd, POLLOUT, 0});
  }
}

void OutputMux::handle_poll_entries(std::span<const pollfd> entries) {
  for (Stream& stream : streams_) {
    if (stream.pipe && has_come(entries, stream.pipe.get())) {
      read_stream(stream);
    }
  }
  show_due_parts();
  for (Sink* sink : {&out_, &err_}) {
    if (sink->size() > 0) write_sink(*sink);
  }
}

std::optional<Deadline> OutputMux::due() const {
  std::optional<Deadline> first;
  for (const Stream& stream : streams_) {
    first = earliest({first, stream.due});
  }
  return first;
}

void OutputMux::show_due_parts() {
  for (Stream& stream : streams_) {
    if (stream.due && stream.due->expired()) {
      show(stream, *sink_of(stream.console));
    }
  }
}

void OutputMux::end_open_line() {
  for (Sink* sink : {&out_, &err_}) finish_line(*sink);
  close_open_line();
}

void OutputMux::close_open_line() {
  if (open_id_ == 0) return;
  open_id_ = 0;
  if (open_sink_->closed) return;
  open_sink_->pending += '\n';
  write_sink(*open_sink_);
}

void OutputMux::read_stream(Stream& stream) {
  char bytes[kReadSize];
  const ssize_t count = read(stream.pipe.get(), bytes, sizeof(bytes));
  if (count > 0) {
    take(stream, {bytes, static_cast<size_t>(count)});
  } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
    end_stream(stream);
  }
}

void OutputMux::take(Stream& stream, std::string_view bytes) {
  write_log(stream.log, bytes);
  Sink* sink = sink_of(stream.console);
  if (sink == nullptr ||
      (sink->closed && duplicates_of(stream.console).filters.empty())) {
    return;
  }
  while (!bytes.empty()) {
    const size_t end = bytes.find_first_of("\n\r");
    const std::string_view part = bytes.substr(0, end);
    stream.partial_line += part;
    const bool follows =
        std::exchange(stream.after_return, false) && part.empty();
    if (end == std::string_view::npos) {
      if (stream.partial_line.size() >= kLongestLine) {
        take_line(stream, *sink);
      } else if (!stream.due) {
        stream.due = Deadline::after(kPartWaits);
      }
      return;
    }
    const bool returns = bytes[end] == '\r';
    // A bar begins with the return to the start of its line, and "\r\n" is one
    // end of a line.
    if (returns ? !stream.partial_line.empty() : !follows) {
      take_line(stream, *sink);
      stream.after_return = returns;
    } else if (returns) {
      stream.after_return = follows;
    }
    bytes.remove_prefix(end + 1);
  }
}

// Delivers the line that the stream has collected, and begins the next one.
void OutputMux::take_line(Stream& stream, Sink& sink) {
  Duplicates& duplicates = duplicates_of(stream.console);
  if (std::ranges::any_of(duplicates.filters, [&](const std::string& text) {
        return stream.partial_line.find(text) != std::string::npos;
      })) {
    write_log(duplicates.log, stream.prefix + stream.partial_line + '\n');
  }
  const bool is_open = open_id_ == stream.id;
  if (is_open || stream.shown == 0 ||
      stream.shown < stream.partial_line.size()) {
    show(stream, sink);
    open_id_ = 0;
    if (!sink.closed) sink.pending += '\n';
  }
  if (stream.last_line && !stream.partial_line.empty()) {
    *stream.last_line = stream.partial_line.substr(0, kLastLine);
  }
  stream.partial_line.clear();
  stream.shown = 0;
  stream.due.reset();
}

// Puts on the console what it lacks of the line that the stream collects, and
// leaves the line open.
void OutputMux::show(Stream& stream, Sink& sink) {
  stream.due.reset();
  if (open_id_ != stream.id) {
    close_open_line();
    if (!sink.closed) sink.pending += stream.prefix;
    open_id_ = stream.id;
    open_sink_ = &sink;
  }
  if (!sink.closed) {
    sink.pending += std::string_view(stream.partial_line).substr(stream.shown);
  }
  stream.shown = stream.partial_line.size();
}

void OutputMux::write_log(Log& log, std::string_view bytes) {
  if (log.file.fd && !write_file(log.file.fd.get(), bytes) &&
      !std::exchange(log.is_cut, true)) {
    notice_("log file " + log.file.path +
            " is incomplete: " + std::strerror(errno));
  }
}

void OutputMux::end_stream(Stream& stream) {
  Sink* sink = sink_of(stream.console);
  if (sink != nullptr && !stream.partial_line.empty()) {
    take_line(stream, *sink);
  }
  stream.pipe.reset();
  stream.log.file.fd.reset();
}

void OutputMux::write_sink(Sink& sink) {
  while (sink.size() > 0 && writable_now(sink.fd)) {
    if (!write_once(sink, chunk_size(sink.rest()))) break;
  }
  if (sink.size() == 0) {
    sink.pending.clear();
    sink.written = 0;
  } else if (sink.written > kConsoleBacklog) {
    sink.pending.erase(0, sink.written);
    sink.written = 0;
  }
}

// Writes `count` bytes or fewer. Returns whether the sink takes bytes now.
bool OutputMux::write_once(Sink& sink, size_t count) {
  const ssize_t written = write(sink.fd, sink.rest().data(), count);
  if (written > 0) {
    sink.written += static_cast<size_t>(written);
  } else if (errno == EAGAIN) {
    return false;
  } else if (errno == EPIPE) {
    close_sink(sink);
  } else if (errno != EINTR) {
    drop_pending(sink, errno);
  }
  return true;
}

// Writes the rest of a line of which a part is written: a terminal takes as
// much as fits.
void OutputMux::finish_line(Sink& sink) {
  const auto deadline = Deadline::after(kLineAllowance);
  while (sink.written > 0 && sink.size() > 0 &&
         sink.pending[sink.written - 1] != '\n') {
    pollfd entry{sink.fd, POLLOUT, 0};
    const auto left = static_cast<int>(deadline.remaining().count());
    if (poll(&entry, 1, left) != 1) return;
    const size_t line = std::min(sink.rest().find('\n'), sink.size() - 1) + 1;
    write_once(sink, std::min<size_t>(line, PIPE_BUF));
  }
}

// Drops what is pending; output that comes later is tried again.
void OutputMux::drop_pending(Sink& sink, int error) {
  sink.pending.clear();
  sink.written = 0;
  if (open_sink_ == &sink) open_id_ = 0;
  if (std::exchange(sink.has_dropped, true)) return;
  notice_(std::string(sink.name) + " of the launcher cannot be written (" +
          std::strerror(error) +
          "): what the workers write there is dropped while that lasts");
}

void OutputMux::close_sink(Sink& sink) {
  sink.closed = true;
  sink.pending.clear();
  sink.written = 0;
  for (Stream& stream : streams_) {
    if (sink_of(stream.console) == &sink && !stream.log.file.fd) {
      end_stream(stream);
    }
  }
}

std::optional<std::chrono::milliseconds> OutputMux::drain(
    std::chrono::milliseconds idle, int interrupt_fd,
    std::chrono::milliseconds interrupted_idle, size_t first) {
  const auto end = streams_.begin() + static_cast<std::ptrdiff_t>(
                                          std::min(first, streams_.size()));
  std::optional<std::chrono::milliseconds> unmoved;
  Deadline quiet = Deadline::after(idle);
  short interrupts = POLLIN;  // POLLHUP comes in any case
  while (out_.size() > 0 || err_.size() > 0 ||
         std::any_of(streams_.begin(), end, [](const Stream& stream) {
           return static_cast<bool>(stream.pipe);
         })) {
    std::vector<pollfd> entries;
    add_poll_entries(entries);
    const size_t own = entries.size();
    entries.push_back({interrupt_fd, interrupts, 0});  // poll() ignores -1
    const auto part = due();
    const auto wait = part ? std::min(part->remaining(), quiet.remaining())
                           : quiet.remaining();
    const int ready =
        poll(entries.data(), entries.size(), static_cast<int>(wait.count()));
    if (ready < 0 && errno == EINTR) continue;
    const short interrupt = ready > 0 ? entries[own].revents : 0;
    if (ready < 0 || (interrupt & ~POLLIN) != 0 ||
        (ready == 0 && quiet.expired())) {
      unmoved = idle;
      break;
    }
    if (interrupt != 0) {
      interrupts = 0;
      idle = std::min(idle, interrupted_idle);
    }
    if (ready > 0) quiet = Deadline::after(idle);
    handle_poll_entries(entries);
  }
  streams_.erase(streams_.begin(), end);
  return unmoved;
}

}  // namespace lockstep::internal
