#include "lockstep/cli/subcommands.h"
#include "lockstep/cli/text.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/job_view.h"
#include "lockstep/cli/jobs/jobs.h"
#include "lockstep/cli/jobs/view_text.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

constexpr const char* kTopName = "lockstep top";
// The time over which ranks are compared to find the one that the others wait
// for: rates over a single picture would change with every hiccup.
constexpr int64_t kCompareNs = 5'000'000'000;
constexpr size_t kMostEvents = 4;  // that are shown

// A terminal that shows frames and gives keys, from construction to
// destruction. What was on it comes back afterwards.
class Screen {
 public:
  Screen() {
    sigset_t ends;
    sigemptyset(&ends);
    for (const int signal :
         {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH}) {
      sigaddset(&ends, signal);
    }
    sigprocmask(SIG_BLOCK, &ends, &mask_before_);
    signals_ = FileDescriptor(signalfd(-1, &ends, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_) throw_errno("signalfd");
    reads_keys_ =
        isatty(STDIN_FILENO) == 1 && tcgetattr(STDIN_FILENO, &before_) == 0;
    enter();
  }
  ~Screen() {
    leave();
    sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  struct Size {
    size_t rows = 24;
    size_t columns = 80;
  };
  Size size() const {
    winsize told{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &told) != 0 || told.ws_row == 0 ||
        told.ws_col == 0) {
      return {};
    }
    return {told.ws_row, told.ws_col};
  }

  // Shows `lines`, cut to the width of the terminal.
  void show(const std::vector<ViewLine>& lines) {
    const Size space = size();
    std::string frame = "\033[H";
    for (size_t row = 0; row < std::min(space.rows, lines.size()); ++row) {
      if (row > 0) frame += "\r\n";
      frame += line_text(
          {cut(shown_line(lines[row].text), space.columns), lines[row].look},
          coloured_);
      frame += "\033[K";
    }
    put(frame + "\033[J");
  }

  // Blocks until `deadline`, a signal or a key, and looks at the keys once at
  // least. Returns the keys as the terminal sends them; nothing if the user
  // wants to end.
  std::optional<std::string> await_keys(const Deadline& deadline) {
    do {
      pollfd entries[]{{signals_.get(), POLLIN, 0},
                       {reads_keys_ ? STDIN_FILENO : -1, POLLIN, 0}};
      poll(entries, 2, static_cast<int>(deadline.remaining().count()));
      signalfd_siginfo signal{};
      if (read(signals_.get(), &signal, sizeof signal) > 0) {
        if (signal.ssi_signo == SIGTSTP) {
          suspend();
        } else if (signal.ssi_signo != SIGWINCH) {
          return std::nullopt;
        }
        return std::string();  // show the next frame, maybe in another size
      }
      if (entries[1].revents != 0) {
        char keys[64];
        const ssize_t count = read(STDIN_FILENO, keys, sizeof keys);
        if (count <= 0) reads_keys_ = false;
        const std::string typed(
            keys, static_cast<size_t>(std::max<ssize_t>(count, 0)));
        if (typed.find_first_of("qQ") != std::string::npos) return std::nullopt;
        if (!typed.empty()) return typed;
      }
    } while (!deadline.expired());
    return std::string();
  }

 private:
  void enter() const {
    if (reads_keys_) {
      termios keys = before_;
      keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      tcsetattr(STDIN_FILENO, TCSANOW, &keys);
    }
    // The alternate screen, without a cursor (xterm, "Control Sequences").
    put("\033[?1049h\033[?25l");
  }
  void leave() const {
    put("\033[?25h\033[?1049l");
    if (reads_keys_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  // Gives the terminal to the shell until the user continues this process.
  void suspend() const {
    leave();
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    raise(SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &stop, nullptr);  // it stops here
    sigprocmask(SIG_BLOCK, &stop, nullptr);
    enter();
  }

  // Returns at most `columns` characters of the text, which is UTF-8.
  static std::string cut(std::string_view text, size_t columns) {
    size_t end = 0;
    for (size_t characters = 0; end < text.size(); ++end) {
      const bool begins =
          (static_cast<unsigned char>(text[end]) & 0xC0) != 0x80;
      if (begins && characters++ == columns) break;
    }
    return std::string(text.substr(0, end));
  }
  static void put(std::string_view text) {
    while (!text.empty()) {
      const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
      if (written <= 0) return;  // the terminal has gone; SIGHUP ends this
      text.remove_prefix(static_cast<size_t>(written));
    }
  }

  FileDescriptor signals_;
  sigset_t mask_before_{};
  termios before_{};
  bool reads_keys_ = false;
  const bool coloured_ = stdout_has_colours();
};

// Collects the events of the job while it is looked at: lines of its launcher,
// and changes of its workers' states.
class Events {
 public:
  // Takes the launcher's news from the board. Returns whether the job has
  // ended.
  bool take(const StatusBoard& board) {
    for (const BoardEvent& event : board.events_after(last_)) {
      last_ = event.number;
      if (event.ends != 0) {
        ending_ = event.text.view();
      } else {
        add(event.time_ns, std::string(event.text.view()));
      }
    }
    return ending_.has_value();
  }
  // Compares two views that follow each other.
  void compare(const JobView& before, const JobView& now) {
    const int64_t time = steady_ns();
    if (now.status.restart != before.status.restart) {
      add(time, "restart " + std::to_string(now.status.restart) + " of " +
                    std::to_string(now.status.max_restarts));
    }
    for (const WorkerView& worker : now.workers) {
      const auto was = std::ranges::find(
          before.workers, worker.worker.pid,
          [](const WorkerView& each) { return each.worker.pid; });
      if (was == before.workers.end()) continue;
      const std::string rank = "rank " + std::to_string(was->worker.rank);
      if (worker.state != was->state) {
        add(time, rank + ": " + worker.state + " (was " + was->state + ")");
      }
      if (worker.snapshot_seconds &&
          (!was->snapshot_seconds ||
           *worker.snapshot_seconds < *was->snapshot_seconds)) {
        add(time, rank + " has written a snapshot");
      }
    }
  }
  // How the job has ended; nothing if it has not, or its agent was killed.
  const std::optional<std::string>& ending() const { return ending_; }
  std::vector<ViewLine> lines() const {
    std::vector<ViewLine> all;
    if (!shown_.empty()) all.push_back({});
    for (const std::string& text : shown_) all.push_back({text});
    return all;
  }

 private:
  // Adds the time of day of a moment of the steady clock.
  void add(int64_t time_ns, const std::string& text) {
    const std::time_t moment =
        std::time(nullptr) - (steady_ns() - time_ns) / 1'000'000'000;
    std::tm local{};
    localtime_r(&moment, &local);
    char time[16];
    std::strftime(time, sizeof time, "%H:%M:%S ", &local);
    shown_.push_back(time + text);
    if (shown_.size() > kMostEvents) shown_.pop_front();
  }

  std::deque<std::string> shown_{};
  std::optional<std::string> ending_{};
  int64_t last_ = 0;
};

// Returns how many bytes the first of the keys has: an escape sequence, or one.
size_t key_bytes(std::string_view keys) {
  if (keys.size() < 3 || keys[0] != '\033' ||
      (keys[1] != '[' && keys[1] != 'O')) {
    return 1;
  }
  const size_t end = keys.find_first_not_of("0123456789;", 2);
  return end == std::string_view::npos ? keys.size() : end + 1;
}

// Holds the part and the order of the table that the user has chosen.
struct Choice {
  size_t first_worker = 0;
  std::string sorted_by = "rank";
  bool is_reversed = false;
  size_t page = 1;  // workers that fit on the screen

  // Obeys a key as xterm sends it.
  void obey(std::string_view key, const std::vector<std::string>& titles) {
    const auto is = [&](std::initializer_list<std::string_view> any) {
      return std::ranges::find(any, key) != any.end();
    };
    if (is({"\033[A", "\033OA", "k"}) && first_worker > 0) --first_worker;
    if (is({"\033[B", "\033OB", "j"})) ++first_worker;
    if (is({"\033[5~"})) first_worker -= std::min(first_worker, page);
    if (is({"\033[6~", " "})) first_worker += page;
    if (is({"\033[H", "\033OH", "g"})) first_worker = 0;
    if (is({"\033[F", "\033OF", "G"})) first_worker = SIZE_MAX / 2;
    if (is({"r"})) is_reversed = !is_reversed;
    if (is({"s", "S"})) {
      const size_t at = static_cast<size_t>(
          std::ranges::find(titles, sorted_by) - titles.begin());
      const size_t step = is({"s"}) ? 1 : titles.size() - 1;
      sorted_by = titles[(at + step) % titles.size()];
    }
  }
};

// Returns a picture of the job that fits on the terminal.
std::vector<ViewLine> top_picture(const JobView& view, const Events& events,
                                  Screen::Size space, Choice& choice,
                                  std::vector<size_t>& widths) {
  std::vector<ViewLine> lines = head_lines(view);
  std::vector<ViewLine> tail = tail_lines(view);
  std::ranges::copy(events.lines(), std::back_inserter(tail));
  // Titles, an empty line, and the two lines at the end.
  const size_t others = lines.size() + tail.size() + 4;
  choice.page = space.rows > others ? space.rows - others : 1;
  const size_t count = view.workers.size();
  choice.first_worker =
      std::min(choice.first_worker, count - std::min(count, choice.page));
  const size_t last = std::min(choice.first_worker + choice.page, count);
  const WorkerTable table = worker_table(view,
                                         {.most_characters = space.columns,
                                          .first_worker = choice.first_worker,
                                          .most_workers = choice.page,
                                          .sorted_by = choice.sorted_by,
                                          .is_reversed = choice.is_reversed},
                                         widths);
  std::ranges::copy(table.lines, std::back_inserter(lines));
  std::ranges::copy(tail, std::back_inserter(lines));
  lines.push_back({});
  std::vector<std::string> hidden;
  if (last - choice.first_worker < count) {
    hidden.push_back("workers " + std::to_string(choice.first_worker + 1) +
                     " to " + std::to_string(last) + " of " +
                     std::to_string(count));
  }
  if (!table.left_out.empty()) {
    hidden.push_back("too narrow for " + joined(table.left_out, ", "));
  }
  lines.push_back({joined(hidden, "; ")});
  lines.push_back({"q or Ctrl-C: end; arrows: scroll; s: sort (now by " +
                   choice.sorted_by + "); r: reverse"});
  return lines;
}

// Returns why the job is not shown any more; nothing if the user ended it.
std::optional<std::string> show_job(JobLink& link,
                                    std::chrono::milliseconds interval) {
  std::deque<JobMoment> moments{look_at(link)};
  JobView view = view_of(moments.back(), moments.back());
  LastingRank awaited;
  Events events;
  Choice choice;
  std::vector<size_t> widths;
  Screen screen;
  while (true) {
    const Deadline next = Deadline::after(interval);
    std::optional<std::string> why;
    try {
      JobMoment now = look_at(link);
      JobView now_view = view_of(moments.back(), now);
      while (moments.size() > 1 &&
             now.time_ns - moments[1].time_ns > kCompareNs) {
        moments.pop_front();
      }
      now_view.slowest_rank = awaited.update(
          view_of(moments.front(), now).slowest_rank, now.time_ns);
      events.take(link.board());
      events.compare(view, now_view);
      view = std::move(now_view);
      moments.push_back(std::move(now));
    } catch (const std::runtime_error& error) {
      why = error.what();
    }
    if (events.take(link.board())) {
      return "the job " + name_of(link.job()) + " (run id " +
             link.job().run_id + ") has ended: " + *events.ending();
    }
    if (why) return why;
    do {
      screen.show(top_picture(view, events, screen.size(), choice, widths));
      const auto keys = screen.await_keys(next);
      if (!keys) return std::nullopt;
      for (std::string_view rest = *keys; !rest.empty();) {
        const size_t bytes = key_bytes(rest);
        choice.obey(rest.substr(0, bytes), column_titles(view));
        rest.remove_prefix(bytes);
      }
    } while (!next.expired());
  }
}

int run_top(const std::string& job, const std::string& interval) {
  try {
    const int64_t every = parse_int("--interval", interval, 100, 3'600'000);
    if (isatty(STDOUT_FILENO) != 1) {
      throw std::invalid_argument(
          "stdout is not a terminal; lockstep status prints the same once");
    }
    JobLink link(find_job(job_argument(job)));
    const auto why = show_job(link, std::chrono::milliseconds(every));
    if (why) write_message(kTopName, *why);
    return 0;
  } catch (const std::invalid_argument& error) {
    write_message(kTopName, error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    write_message(kTopName, error.what());
    return kSystemError;
  }
}

}  // namespace

void add_top_command(CLI::App& app, int& exit_code) {
  CLI::App* top = add_command(
      app, "top", "Show on a terminal how a running job and its ranks do",
      "lockstep top [--interval MS] [JOB]\n"
      "  JOB is a run id, or the process id of a lockstep run on this host; "
      "without it,\n  the only job. The ranks work a few microseconds a second "
      "for this while it runs,\n  and nothing when it does not. Arrow keys "
      "scroll, "
      "s and S sort by another column,\n  r reverses the order, q ends.\n"
      "Examples:\n"
      "  lockstep top\n"
      "  lockstep top 4711 --interval 500\n"
      "Exit code 0: the job or the view has ended; 2: there is no such job, or "
      "no terminal.");
  auto job = std::make_shared<std::string>();
  auto interval = std::make_shared<std::string>("1000");
  add_job_argument(*top, *job);
  top->add_option("--interval", *interval,
                  "Milliseconds from one picture to the next, at least 100")
      ->type_name("MS");
  top->callback(
      [job, interval, &exit_code] { exit_code = run_top(*job, *interval); });
}

}  // namespace lockstep::internal
