#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/process/event_loop.h"

namespace lockstep::internal {

// Carries the output of many workers to the console by whole lines, each with
// its worker's prefix, and the same bytes, without a prefix, to the worker's
// log file. A line is never mixed with another one of this mux. If a worker's
// last line has no newline, it gets one at the end of the stream. A line longer
// than 1 MiB is broken there.
//
// A carriage return ends a line as a newline does, so that each state of a
// progress bar is a line. What waits 300 ms for the end of its line, such as a
// prompt, is shown without it, and the rest follows there; unless another line
// comes before, to the same console or the other one. Then the line that is not
// complete ends, and its rest is a line of its own.
//
// It reads and writes only what poll() reports as ready, and so never waits for
// a pipe or for a terminal, unless this process may not open that terminal
// (open_terminal_of()). If the console reads slowly, the workers wait, through
// their pipes, once 256 KiB are pending. When the reader of the console is
// gone, the pipes of the streams without a file are closed, so that the workers
// get SIGPIPE as if they wrote to the console. If a console or a log file
// cannot take output for another reason, such as a full disk, that output is
// dropped and the workers go on; a notice says so once for each.
//
// For one thread. Requires SIGPIPE blocked or ignored.
class OutputMux : public Pollable {
 public:
  // Called with a line for the user.
  using Notice = std::function<void(const std::string& text)>;

  // `stdout_fd` and `stderr_fd` are the console's descriptors, which are not
  // owned; only tests pass others than 1 and 2. If both are the same file, as
  // after 2>&1, everything is written to `stdout_fd`: a long line takes several
  // writes, between which nothing else may come.
  explicit OutputMux(Notice notice, int stdout_fd = 1, int stderr_fd = 2);

  // `fd` is empty if there is no log file.
  struct LogFile {
    FileDescriptor fd{};
    std::string path{};  // for messages
  };

  enum class Console { none, out, err };

  // Adds a stream. Returns the descriptor that the worker writes to; the caller
  // closes it once the worker has it. `last_line`, if it is given, always holds
  // the last line that is not empty, or its beginning. Throws
  // std::system_error.
  FileDescriptor add_stream(Console console, std::string prefix,
                            LogFile log_file,
                            std::shared_ptr<std::string> last_line = nullptr);

  // Writes the lines of the streams of `console` that hold one of `filters`,
  // with their prefixes, into `log_file`, too, from now on, instead of the file
  // that was given before.
  void duplicate_lines(Console console, std::vector<std::string> filters,
                       LogFile log_file);

  void add_poll_entries(std::vector<pollfd>& entries) const override;
  // Returns when a part of a line is to be shown.
  std::optional<Deadline> due() const override;
  void handle_poll_entries(std::span<const pollfd> entries) override;
  // Ends the line that is shown without its end, if there is one, because
  // something else is about to be written to the console.
  void end_open_line();

  size_t streams() const { return streams_.size(); }

  // Serves streams until each of the `first` streams has ended and everything
  // is written, or nothing has moved for `idle`, or `interrupt_fd` (-1 for
  // none) is hung up. Once `interrupt_fd` is readable, `idle` is at most
  // `interrupted_idle`. Then forgets these streams. If some output was left,
  // returns for how long nothing had moved.
  std::optional<std::chrono::milliseconds> drain(
      std::chrono::milliseconds idle, int interrupt_fd = -1,
      std::chrono::milliseconds interrupted_idle = {},
      size_t first = static_cast<size_t>(-1));

 private:
  // A log file that says once if it cannot take output.
  struct Log {
    LogFile file{};
    bool is_cut = false;
  };
  struct Stream {
    FileDescriptor pipe;
    Log log;
    Console console = Console::none;
    std::string prefix;
    std::string partial_line;
    std::shared_ptr<std::string> last_line;
    // How much of partial_line the console has.
    size_t shown = 0;
    std::optional<Deadline> due{};  // while there is more
    bool after_return = false;      // a newline that follows ends no line
    size_t id = 0;
  };
  struct Sink {
    Sink(const char* sink_name, int console_fd);
    const char* name;
    FileDescriptor terminal;  // if it is one
    int fd;                   // that of `terminal`, or the console's own
    std::string pending{};    // `written` bytes are out
    size_t written = 0;
    bool closed = false;
    bool has_dropped = false;
    size_t size() const { return pending.size() - written; }
    std::string_view rest() const {
      return std::string_view(pending).substr(written);
    }
  };

  // The lines of a console that go into a file, too.
  struct Duplicates {
    std::vector<std::string> filters{};
    Log log{};
  };

  Duplicates& duplicates_of(Console console) {
    return console == Console::out ? out_duplicates_ : err_duplicates_;
  }
  // Returns null for Console::none.
  Sink* sink_of(Console console);
  const Sink* sink_of(Console console) const;
  bool wants_input(const Stream& stream) const;
  void read_stream(Stream& stream);
  void take(Stream& stream, std::string_view bytes);
  void take_line(Stream& stream, Sink& sink);
  void show(Stream& stream, Sink& sink);
  void show_due_parts();
  void write_log(Log& log, std::string_view bytes);
  void end_stream(Stream& stream);
  void close_open_line();
  void write_sink(Sink& sink);
  bool write_once(Sink& sink, size_t count);
  void finish_line(Sink& sink);
  void drop_pending(Sink& sink, int error);
  void close_sink(Sink& sink);

  Notice notice_;
  std::vector<Stream> streams_;
  size_t next_id_ = 1;
  // The stream of which a line is shown without its end; 0 if there is none.
  size_t open_id_ = 0;
  Sink* open_sink_ = nullptr;  // where
  Sink out_;
  Sink err_;
  bool is_one_file_;  // then err_ has no lines
  Duplicates out_duplicates_{};
  Duplicates err_duplicates_{};
};

}  // namespace lockstep::internal
