// stdin, stdout, stderr and log files of the workers.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/process/output_mux.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Output : public LauncherTest {
 protected:
  // Returns a directory of the only run below `log_dir`, by the number of its
  // attempt.
  fs::path attempt(const fs::path& log_dir, int number) {
    for (const auto& run : fs::directory_iterator(log_dir)) {
      return run.path() / ("attempt_" + std::to_string(number));
    }
    return {};
  }

  // Serves `mux` until the other end of its console, which does not block, has
  // given `text` in all. `shown`: what it has given so far.
  static void await_shown(OutputMux& mux, const FileDescriptor& console,
                          std::string& shown, const std::string& text) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    while (shown != text && !deadline.expired()) {
      std::vector<pollfd> entries;
      mux.add_poll_entries(entries);
      const auto due = mux.due();
      poll(entries.data(), entries.size(),
           due ? static_cast<int>(due->remaining().count()) : 10);
      mux.handle_poll_entries(entries);
      char bytes[4096];
      const ssize_t count = read(console.get(), bytes, sizeof bytes);
      if (count > 0) shown.append(bytes, static_cast<size_t>(count));
    }
    EXPECT_EQ(shown, text);
  }
};

TEST_F(Output, PrefixedLinesAreNeverTorn) {
  const int lines_each = 2000;
  const std::string body(300, 'x');
  const auto result = run_script(
      {"--nproc-per-node=2", "--prefix-lines", "--role=net"},
      // Writes lines in pieces on purpose.
      "i=0; while [ $i -lt " + std::to_string(lines_each) + " ]; do printf '" +
          body + " '; printf \"$i\\n\"; i=$((i+1)); done");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  int next[2] = {0, 0};
  std::string part[2];
  for (const auto& line : lines(result.out)) {
    ASSERT_TRUE(line.starts_with("[net0]:") || line.starts_with("[net1]:"))
        << line;
    const int rank = line[4] - '0';
    const std::string whole = part[rank] + line.substr(7);
    part[rank].clear();
    if (whole == body + " ") {  // the machine was so busy that it was due
      part[rank] = whole;
      continue;
    }
    ASSERT_EQ(whole, body + " " + std::to_string(next[rank]++));
  }
  EXPECT_EQ(next[0], lines_each);
  EXPECT_EQ(next[1], lines_each);
}

TEST_F(Output, LastLineWithoutNewlineAndBothStreamsArePrefixed) {
  const auto result = run_script({"--tee=3"}, "printf out; printf err >&2");
  EXPECT_EQ(result.out, "[default0]:out\n");
  EXPECT_EQ(result.err, "[default0]:err\n");
}

TEST_F(Output, PrefixTemplateOfTorchrunIsTaken) {
  const auto result =
      run_script({"--tee=1"}, "echo hello",
                 {.environment = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="
                                  "${role_name} rank ${rank}> "}});
  EXPECT_EQ(result.out, "default rank 0> hello\n");
}

TEST_F(Output, WithoutPrefixTheWorkerHasTheLaunchersOwnStream) {
  const auto result = run_script(
      {},
      "[ $(readlink /proc/$$/fd/1) = $(readlink /proc/$PPID/fd/1) ] && "
      "echo same");
  EXPECT_EQ(result.out, "same\n");
}

TEST_F(Output, LogDirectoryKeepsEveryAttemptAndRank) {
  const fs::path logs = scratch() / "logs";
  const auto result =
      run_script({"--nproc-per-node=2", "--max-restarts=1",
                  "--log-dir=" + logs.string(), "--redirects=2", "--tee=1:1"},
                 "echo out $RANK; echo err $RANK >&2; sleep 0.3; exit 5");
  EXPECT_EQ(result.exit_code, 5);
  for (const int number : {0, 1}) {
    const fs::path directory = attempt(logs, number);
    EXPECT_EQ(read_file(directory / "1" / "stdout.log"), "out 1\n");
    EXPECT_EQ(read_file(directory / "0" / "stderr.log"), "err 0\n");
    EXPECT_EQ(read_file(directory / "1" / "stderr.log"), "err 1\n");
    EXPECT_FALSE(fs::exists(directory / "0" / "stdout.log"));
  }
  EXPECT_EQ(count(result.out, "[default1]:out 1\n"), 2);
  EXPECT_EQ(count(result.out, "out 0\n"), 2);
  // The report of each attempt has the last line of the rank that failed first.
  const auto said = lines(result.err);
  EXPECT_EQ(
      std::ranges::count(said, "err 0") + std::ranges::count(said, "err 1"), 0)
      << result.err;
  EXPECT_GE(count(result.err, "\n  its last line: err "), 2) << result.err;
}

TEST_F(Output, RedirectsWithoutLogDirectoryIsSaidAndPassedOver) {
  const auto result = run_script({"--redirects=3"}, "echo out");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("--log-dir"));
}

TEST_F(Output, LinesWithATextAreAlsoInAFileOfAllRanks) {
  const fs::path logs = scratch() / "logs";
  const auto result = run_script(
      {"--nproc-per-node=2", "--max-restarts=1", "--tee=3",
       "--log-dir=" + logs.string(), "--duplicate-stdout-filters=loss,a,,b",
       "--duplicate_stderr_filters=warn"},
      "echo \"loss $RANK\"; echo other; echo 'a,b'; echo a; echo b; "
      "printf 'last loss'; echo 'warn loss' >&2; echo loss >&2; "
      "sleep 0.3; exit 5");
  EXPECT_EQ(result.exit_code, 5);
  for (const int number : {0, 1}) {
    const auto out = read_file(attempt(logs, number) / "filtered_stdout.log");
    EXPECT_EQ(lines(out).size(), 6u) << out;
    for (const char* rank : {"0", "1"}) {
      const std::string prefix = "[default" + std::string(rank) + "]:";
      EXPECT_EQ(count(out, prefix + "loss " + rank + "\n"), 1) << out;
      EXPECT_EQ(count(out, prefix + "a,b\n"), 1) << out;
      EXPECT_EQ(count(out, prefix + "last loss\n"), 1) << out;
    }
    const auto err = read_file(attempt(logs, number) / "filtered_stderr.log");
    EXPECT_EQ(lines(err).size(), 2u) << err;
    EXPECT_EQ(count(err, "]:warn loss\n"), 2) << err;
  }
}

TEST_F(Output, FiltersWithoutAFileOrLinesAreSaidAndPassedOver) {
  auto result =
      run_script({"--duplicate-stdout-filters=a", "--tee=1"}, "echo a");
  EXPECT_EQ(result.out, "[default0]:a\n");
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("no effect without --log-dir"));
  result = run_script({"--duplicate-stdout-filters=a",
                       "--log-dir=" + (scratch() / "logs").string()},
                      "echo a");
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("no effect without --tee or --prefix-lines"));
}

TEST_F(Output, RanksThatTheNodeLacksAreSaid) {
  const auto result = run_script(
      {"--nproc-per-node=2", "--tee=0:1,7:1", "--local-ranks-filter=0,2"},
      "echo rank $RANK");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("--tee names local rank 7, but the highest "
                                    "local rank of this node is 1"));
  EXPECT_THAT(result.err, HasSubstr("--local-ranks-filter names local rank 2"));
}

TEST_F(Output, FilteredRanksAreSilentOnTheConsole) {
  const auto result = run_script(
      {"--nproc-per-node=3", "--local-ranks-filter=0,2"}, "echo rank $RANK");
  EXPECT_EQ(count(result.out, "rank 0\n") + count(result.out, "rank 2\n"), 2);
  EXPECT_EQ(count(result.out, "rank 1"), 0);
}

TEST_F(Output, StdinGoesToLocalRankZero) {
  const auto result =
      run_script({"--nproc-per-node=2"}, "read line; echo \"$RANK:$line\"",
                 {.input = "question\n"});
  EXPECT_EQ(count(result.out, "0:question\n"), 1) << result.out;
  EXPECT_EQ(count(result.out, "1:\n"), 1) << result.out;
}

TEST_F(Output, MessageOfTheErrorFileIsShown) {
  auto result = run_script(
      {},
      "printf %s '{\"message\": {\"message\": \"ValueError: bad\\nday\", "
      "\"extraInfo\": {}}}' > $TORCHELASTIC_ERROR_FILE; exit 1");
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 0 failed: ValueError: bad\n"),
                                HasSubstr("\n  exit code 1\n  day\n")));
}

// Also half a file, from a worker that died while it wrote.
TEST_F(Output, AnErrorFileThatCannotBeReadIsSaid) {
  const auto said = [&](const std::string& write) {
    const auto result = run_script({}, write + "; exit 4");
    EXPECT_EQ(result.exit_code, 4);
    const auto all = lines(result.err);
    EXPECT_EQ(all.size(), 3u) << result.err;
    return all.empty() ? "" : all.back();
  };
  EXPECT_EQ(said("echo '{\"message\": {\"mess' > $TORCHELASTIC_ERROR_FILE"),
            "  its error file is not complete JSON");
  EXPECT_EQ(said(": > $TORCHELASTIC_ERROR_FILE"),
            "  its error file is empty; is the disk full?");
  EXPECT_EQ(said("echo '[]' > $TORCHELASTIC_ERROR_FILE"),
            "  its error file has no \"message\"");
  EXPECT_EQ(said("mkfifo $TORCHELASTIC_ERROR_FILE"),
            "  its error file is not a regular file");
}

// A bug: what had no newline yet, a prompt or a progress bar, was shown when
// the worker had ended.
TEST_F(Output, APromptIsShownAndItsRestFollowsThere) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const FileDescriptor console(ends[0]), shown_at(ends[1]);
  OutputMux mux([](const std::string& text) { ADD_FAILURE() << text; },
                shown_at.get(), shown_at.get());
  const auto asks = mux.add_stream(OutputMux::Console::out, "[0]:", {});
  const auto other = mux.add_stream(OutputMux::Console::err, "[1]:", {});
  std::string shown;
  const auto await_shown = [&](const std::string& text) {
    Output::await_shown(mux, console, shown, text);
  };
  const auto say = [](const FileDescriptor& worker, std::string_view text) {
    ASSERT_EQ(write(worker.get(), text.data(), text.size()),
              static_cast<ssize_t>(text.size()));
  };
  say(asks, "go on? ");
  await_shown("[0]:go on? ");
  say(asks, "yes\n");
  await_shown("[0]:go on? yes\n");
  // Another line ends the one that is open.
  say(asks, "sure? ");
  await_shown("[0]:go on? yes\n[0]:sure? ");
  say(other, "news\n");
  await_shown("[0]:go on? yes\n[0]:sure? \n[1]:news\n");
  say(asks, "no\n");
  await_shown("[0]:go on? yes\n[0]:sure? \n[1]:news\n[0]:no\n");
  say(asks, "last ");
  await_shown("[0]:go on? yes\n[0]:sure? \n[1]:news\n[0]:no\n[0]:last ");
  mux.end_open_line();
  await_shown("[0]:go on? yes\n[0]:sure? \n[1]:news\n[0]:no\n[0]:last \n");
  say(asks, "\n");
  say(asks, "end\n");
  await_shown(
      "[0]:go on? yes\n[0]:sure? \n[1]:news\n[0]:no\n[0]:last \n[0]:end\n");
}

// A bug: with 2>&1, a line of stdout was written between two parts of a longer
// one of stderr.
TEST_F(Output, LongLinesOfBothStreamsToOnePipeAreNotMixed) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const FileDescriptor console(ends[0]), out(ends[1]);
  // So that the first part of the long line fills it.
  ASSERT_NE(fcntl(out.get(), F_SETPIPE_SZ, 4096), -1);
  const FileDescriptor err(fcntl(out.get(), F_DUPFD_CLOEXEC, 3));
  OutputMux mux([](const std::string& text) { ADD_FAILURE() << text; },
                out.get(), err.get());
  const auto first = mux.add_stream(OutputMux::Console::err, "[0]:", {});
  const auto second = mux.add_stream(OutputMux::Console::out, "[1]:", {});
  const std::string line = std::string(20'000, 'e') + '\n';
  ASSERT_EQ(write(first.get(), line.data(), line.size()),
            static_cast<ssize_t>(line.size()));
  std::vector<pollfd> entries;
  mux.add_poll_entries(entries);
  poll(entries.data(), entries.size(), 0);
  mux.handle_poll_entries(entries);
  ASSERT_EQ(write(second.get(), "o\n", 2), 2);
  std::string shown;
  await_shown(mux, console, shown, "[0]:" + line + "[1]:o\n");
}

// A bug: poll() reports a terminal as writable if one byte fits. The write that
// followed waited for its reader, and no signal was forwarded meanwhile.
TEST_F(Output, ATerminalThatTakesNothingDoesNotHoldTheMux) {
  int master = -1, slave = -1;
  ASSERT_EQ(openpty(&master, &slave, nullptr, nullptr, nullptr), 0);
  FileDescriptor reader(master);
  const FileDescriptor terminal(slave);
  std::string notices;
  OutputMux mux([&](const std::string& text) { notices += text; },
                terminal.get(), terminal.get());
  FileDescriptor worker = mux.add_stream(OutputMux::Console::out, "[0]:", {});
  ASSERT_EQ(fcntl(worker.get(), F_SETFL, O_NONBLOCK), 0);
  const std::string text(60, 'x');
  std::string expected;
  // Writes until neither the mux nor the pipe to it takes more.
  auto filling = std::async(std::launch::async, [&] {
    const std::string line = text + '\n';
    for (bool takes = true; takes && notices.empty();) {
      takes = false;
      while (write(worker.get(), line.data(), line.size()) > 0) {
        expected += "[0]:" + text + "\r\n";
        takes = true;
      }
      std::vector<pollfd> entries;
      mux.add_poll_entries(entries);
      poll(entries.data(), entries.size(), 0);
      mux.handle_poll_entries(entries);
    }
  });
  const bool is_full =
      filling.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
  if (!is_full) reader.reset();  // This ends a write that blocks.
  filling.get();
  ASSERT_TRUE(is_full) << "a write to the terminal blocked";
  // Nothing is lost once the terminal takes more.
  worker.reset();
  std::string shown;
  auto reading = std::async(std::launch::async, [&] {
    pollfd entry{reader.get(), POLLIN, 0};
    while (shown.size() < expected.size() && poll(&entry, 1, 60'000) > 0) {
      char bytes[4096];
      const ssize_t count = read(reader.get(), bytes, sizeof bytes);
      if (count <= 0) return;
      shown.append(bytes, static_cast<size_t>(count));
    }
  });
  EXPECT_FALSE(mux.drain(std::chrono::seconds(60)));
  reading.get();
  EXPECT_EQ(shown.size(), expected.size());
  EXPECT_TRUE(shown == expected);
  EXPECT_EQ(notices, "");
}

TEST_F(Output, EachStateOfAProgressBarIsALine) {
  const fs::path logs = scratch() / "logs";
  const std::string bar =
      "printf '\\r10%%|# |'; printf '\\r20%%|##|'; printf '\\r30%%|##|\\n'; "
      "printf 'from Windows\\r\\n\\r\\nend\\n'";
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--prefix-lines"},
        {"--tee=1", "--log-dir=" + logs.string()}}) {
    const auto result = run_script(options, bar);
    EXPECT_EQ(result.out,
              "[default0]:10%|# |\n[default0]:20%|##|\n[default0]:30%|##|\n"
              "[default0]:from Windows\n[default0]:\n[default0]:end\n");
  }
  EXPECT_EQ(read_file(attempt(logs, 0) / "0" / "stdout.log"),
            "\r10%|# |\r20%|##|\r30%|##|\nfrom Windows\r\n\r\nend\n");
}

// Training must not end because a disk is full.
TEST_F(Output, FullDiskBehindStdoutCostsTheOutputOnly) {
  const auto result = run_program(
      {"/bin/sh", "-c",
       "exec " LOCKSTEP_BIN_DIR "/lockstep run --prefix-lines sh -c '"
       "i=0; while [ $i -lt 2000 ]; do echo line; i=$((i+1)); done; "
       "echo trained >&2' > /dev/full"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "stdout of the launcher cannot be written"), 1)
      << result.err;
  EXPECT_EQ(count(result.err, "[default0]:trained\n"), 1) << result.err;
}

TEST_F(Output, LogFileCutByAFullDiskSaysSo) {
  std::string lines_of_output;
  OutputMux mux(
      [&](const std::string& text) { lines_of_output += text + "\n"; });
  FileDescriptor worker = mux.add_stream(
      OutputMux::Console::none, "",
      {FileDescriptor(open("/dev/full", O_WRONLY)), "/logs/stdout.log"});
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(write(worker.get(), "line\n", 5), 5);
    std::vector<pollfd> entries;
    mux.add_poll_entries(entries);
    poll(entries.data(), entries.size(), -1);
    mux.handle_poll_entries(entries);
  }
  worker.reset();
  EXPECT_FALSE(mux.drain(std::chrono::seconds(10)));
  EXPECT_EQ(lines_of_output,
            "log file /logs/stdout.log is incomplete: No space left on "
            "device\n");
}

// A bug: a signal that came when the workers had ended dropped their last
// output, also from log files.
TEST_F(Output, ASignalDoesNotDropWhatIsTakenAtOnce) {
  OutputMux mux([](const std::string& text) { ADD_FAILURE() << text; });
  const std::string path = (scratch() / "stdout.log").string();
  FileDescriptor worker = mux.add_stream(
      OutputMux::Console::none, "",
      {FileDescriptor(open(path.c_str(), O_WRONLY | O_CREAT, 0600)), path});
  ASSERT_EQ(write(worker.get(), "last\n", 5), 5);
  worker.reset();
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const FileDescriptor commands(ends[0]), guardian(ends[1]);
  ASSERT_EQ(write(guardian.get(), "s", 1), 1);
  EXPECT_FALSE(mux.drain(std::chrono::seconds(10), commands.get(),
                         std::chrono::seconds(2)));
  EXPECT_EQ(read_file(path), "last\n");
}

TEST_F(Output, StalledReaderDoesNotHoldASignalledLauncher) {
  auto launcher = start_script(
      {"--prefix-lines"},
      "echo ready; trap 'exit 0' TERM; dd if=/dev/zero bs=1M count=1 "
      "2>/dev/null | tr '\\0' '\\n' & wait $!; exit 0");
  launcher->await_output("ready");
  launcher->signal(SIGTERM);
  // The pipe of 64 KiB is full and nobody reads it. The launcher must not wait
  // the allowed minute.
  const Deadline watch = Deadline::after(std::chrono::seconds(30));
  int status = 0;
  while (waitpid(launcher->pid(), &status, WNOHANG) == 0) {
    ASSERT_FALSE(watch.expired());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGTERM);
}

TEST_F(Output, ReaderThatGoesAwayEndsTheWorkers) {
  auto launcher = start({"--prefix-lines", "yes"});
  launcher->await_output("[default0]:y");
  launcher->close_output();
  const auto result = launcher->finish();
  EXPECT_EQ(result.exit_code, 128 + 13);
}

}  // namespace
}  // namespace lockstep::internal::testing
