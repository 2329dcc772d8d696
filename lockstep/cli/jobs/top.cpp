#include "lockstep/cli/jobs/top.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/jobs/job_argument.h"
#include "lockstep/cli/jobs/job_view.h"
#include "lockstep/launch/exit_code.h"

namespace lockstep::internal {
namespace {

constexpr const char* kTopName = "lockstep top";
// Lines of a view that are not workers, or may follow them.
constexpr size_t kOtherLines = 9;

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

  // Shows `text`, of which lines are cut to the width of the terminal.
  void show(std::string_view text) {
    const Size space = size();
    std::string frame = "\033[H";
    for (size_t row = 0; row < space.rows && !text.empty(); ++row) {
      const size_t end = text.find('\n');
      if (row > 0) frame += "\r\n";
      frame += text.substr(0, std::min(end, space.columns));
      frame += "\033[K";
      text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
    put(frame + "\033[J");
  }

  // Blocks until `deadline` or a signal, and looks at the keys once at least.
  // Returns whether the user wants
  // to end.
  bool asks_to_end(const Deadline& deadline) {
    do {
      pollfd entries[]{{signals_.get(), POLLIN, 0},
                       {reads_keys_ ? STDIN_FILENO : -1, POLLIN, 0}};
      poll(entries, 2, static_cast<int>(deadline.remaining().count()));
      signalfd_siginfo signal{};
      if (read(signals_.get(), &signal, sizeof signal) > 0) {
        if (signal.ssi_signo == SIGTSTP) {
          suspend();
        } else if (signal.ssi_signo != SIGWINCH) {
          return true;
        }
        return false;  // show the next frame, maybe in another size
      }
      char key = 0;
      if (entries[1].revents != 0) {
        if (read(STDIN_FILENO, &key, 1) <= 0) reads_keys_ = false;
        if (key == 'q' || key == 'Q') return true;
      }
    } while (!deadline.expired());
    return false;
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
};

// Returns why the job is not shown any more; nothing if the user ended it.
std::optional<std::string> show_job(JobLink& link,
                                    std::chrono::milliseconds interval) {
  JobMoment before = look_at(link);
  Screen screen;
  while (true) {
    const Deadline next = Deadline::after(interval);
    JobMoment now;
    try {
      now = look_at(link);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    const size_t rows = screen.size().rows;
    const size_t workers = rows > kOtherLines ? rows - kOtherLines : 1;
    screen.show(view_text(view_of(before, now), workers) +
                "\nq or Ctrl-C: end\n");
    before = std::move(now);
    if (screen.asks_to_end(next)) return std::nullopt;
  }
}

int run_top(const std::string& job, const std::string& interval) {
  try {
    const int64_t every = parse_int("--interval", interval, 100, 3'600'000);
    if (isatty(STDOUT_FILENO) != 1) {
      throw std::invalid_argument(
          "stdout is no terminal; lockstep status prints the same once");
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
  CLI::App* top = app.add_subcommand(
      "top", "Show on a terminal how a running job and its ranks do");
  top->formatter(make_help_formatter(
      "lockstep top [--interval MS] [JOB]\n"
      "  JOB is a run id, or the process id of a lockstep run on this host; "
      "without it,\n  the only job. The ranks work a few microseconds a second "
      "for this while it runs,\n  and nothing when it does not.\n"
      "Examples:\n"
      "  lockstep top\n"
      "  lockstep top 4711 --interval 500\n"
      "Exit code 0: the job or the view has ended; 2: there is no such job, or "
      "no terminal."));
  top->get_help_ptr()->description("Print this help and exit");
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
