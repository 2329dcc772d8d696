#include "lockstep/observe/progress_bar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/observe/progress_line.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using internal::testing::message_of;

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

// A file that is not a terminal.
class PlainFile {
 public:
  ~PlainFile() { std::fclose(file_); }
  std::FILE* get() const { return file_; }
  std::string text() const {
    std::fflush(file_);
    std::rewind(file_);
    std::string text(100'000, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file_));
    return text;
  }

 private:
  std::FILE* file_ = std::tmpfile();
};

// A terminal of 60 columns.
class Terminal {
 public:
  Terminal() {
    winsize size{};
    size.ws_row = 25;
    size.ws_col = 60;
    int slave = -1;
    if (::openpty(&master_, &slave, nullptr, nullptr, &size) != 0) {
      throw std::runtime_error("no pseudo-terminal");
    }
    file_ = ::fdopen(slave, "w");
  }
  ~Terminal() {
    std::fclose(file_);
    ::close(master_);
  }
  std::FILE* get() const { return file_; }
  // Returns what was written, as soon as it ends with `end`. The kernel hands
  // it on a moment after it was written.
  std::string text_until(const std::string& end) const {
    std::fflush(file_);
    std::string text;
    pollfd readable{.fd = master_, .events = POLLIN, .revents = 0};
    while (!text.ends_with(end) && ::poll(&readable, 1, 10'000) == 1) {
      char part[1024];
      const auto got = ::read(master_, part, sizeof part);
      if (got <= 0) break;
      text.append(part, static_cast<size_t>(got));
    }
    return text;
  }

 private:
  int master_ = -1;
  std::FILE* file_ = nullptr;
};

constexpr std::chrono::milliseconds kAlways{0};
constexpr std::chrono::milliseconds kNever{3'600'000};

TEST(ProgressLine, HasTheFormOfTqdm) {
  const ProgressState state{.description = "Epoch 3",
                            .unit = "it",
                            .count = 900,
                            .total = 2000,
                            .elapsed_seconds = 3.2,
                            .rate = 275,
                            .postfix = "loss=0.3"};
  EXPECT_EQ(progress_line(state, 0),
            "Epoch 3:  45% 900/2000 [00:03<00:04, 275it/s, loss=0.3]");
  EXPECT_EQ(
      progress_line(state, 67),
      "Epoch 3:  45%|####......| 900/2000 [00:03<00:04, 275it/s, loss=0.3]");
}

TEST(ProgressLine, NeverExceedsTheTerminal) {
  ProgressState state{.description = "Größe",
                      .count = 1,
                      .total = 3,
                      .elapsed_seconds = 1,
                      .rate = 1};
  EXPECT_EQ(progress_line(state, 44),
            "Größe:  33%|##....| 1/3 [00:01<00:02, 1it/s]");
  EXPECT_EQ(progress_line(state, 38), "Größe:  33% 1/3 [00:01<00:02, 1it/s]");
  EXPECT_EQ(progress_line(state, 4), "Größ");
  state.total.reset();
  EXPECT_EQ(progress_line(state, 3), "Grö");
}

// A bug: a line with Chinese characters took more columns than the terminal
// has, and so two lines.
TEST(ProgressLine, WideCharactersTakeTwoColumns) {
  ProgressState state{.description = "训练",
                      .count = 1,
                      .total = 3,
                      .elapsed_seconds = 1,
                      .rate = 1};
  EXPECT_EQ(progress_line(state, 43),
            "训练:  33%|##....| 1/3 [00:01<00:02, 1it/s]");
  EXPECT_EQ(progress_line(state, 3), "训");
  state.description =
      "Gro\u0308\u00dfe";  // an accent by itself takes no column
  EXPECT_EQ(progress_line(state, 4), "Gro\u0308\u00df");
  state.description =
      "\xff\xe8\xae";  // not UTF-8, and the begin of a character
  EXPECT_EQ(progress_line(state, 4), "   :");
}

TEST(ProgressLine, TimesAndRatesThatAreUnknownOrStrange) {
  EXPECT_EQ(progress_line({.count = 5, .elapsed_seconds = 1, .rate = 0.25}, 0),
            "5it [00:01, 4s/it]");
  EXPECT_EQ(progress_line({.total = 4}, 0), "  0% 0/4 [00:00<?, ?it/s]");
  EXPECT_EQ(progress_line({.total = 0}, 0), "100% 0/0 [00:00<?, ?it/s]");
  // More than the total, and almost the total.
  EXPECT_EQ(progress_line({.count = 5, .total = 4, .rate = 1}, 0),
            "5it [00:00, 1it/s]");
  EXPECT_EQ(progress_line({.description = "two\nlines", .total = 4}, 0),
            "two lines:   0% 0/4 [00:00<?, ?it/s]");
  EXPECT_THAT(progress_line({.count = 9'999, .total = 10'000, .rate = 1}, 0),
              StartsWith(" 99%"));
  EXPECT_EQ(clock_text(3599.9), "59:59");
  EXPECT_EQ(clock_text(3600), "1:00:00");
  EXPECT_EQ(clock_text(-1), "00:00");
  EXPECT_EQ(clock_text(std::numeric_limits<double>::infinity()),
            clock_text(4e9));
  EXPECT_EQ(short_number(0.123456), "0.1235");
  EXPECT_EQ(short_number(std::nan("")), "nan");
}

TEST(ProgressBar, ATerminalHasOneLineThatChanges) {
  Terminal terminal;
  {
    ProgressBar bar(
        4, {.unit = "batch", .file = terminal.get(), .min_interval = kAlways});
    bar.set_postfix({{"loss", 0.5}, {"lr", 1e-3}});
    bar.update();
    bar.update(2);
    EXPECT_EQ(bar.count(), 3);
  }
  const std::string text = terminal.text_until("\033[K\r\n");
  EXPECT_THAT(text, HasSubstr("\r 25% 1/4 ["));
  EXPECT_THAT(text, HasSubstr("batch/s, loss=0.5, lr=0.001]"));
  EXPECT_THAT(text, HasSubstr("\r 75% 3/4 ["));
  EXPECT_THAT(text, EndsWith("\033[K\r\n"));
  // One newline, at the end.
  EXPECT_EQ(text.find('\n'), text.size() - 1);
}

// The bar ended with the values of up to 0.1 s before the last update, because
// due() was false at that.
TEST(ProgressBar, TheLastUpdateShowsTheLastValues) {
  Terminal terminal;
  ProgressBar bar(5, {.file = terminal.get(), .min_interval = kNever});
  for (int step = 1; step <= 4; ++step) {
    EXPECT_EQ(bar.due(2), step == 4) << step;
    if (bar.due(2)) bar.set_postfix({{"loss", static_cast<double>(step)}});
    bar.update(step == 4 ? 2 : 1);
  }
  // It is shown before the bar is closed.
  EXPECT_THAT(terminal.text_until("loss=4]\033[K"), HasSubstr("\r100%|"));
  EXPECT_FALSE(bar.due()) << "the total was reached before";
  bar.update();
  bar.close();
  EXPECT_THAT(terminal.text_until("\r\n"), HasSubstr("6it ["));
}

TEST(ProgressBar, AFileGetsALineNowAndThenAndOneAtTheEnd) {
  PlainFile file;
  {
    ProgressBar bar(
        10, {.initial = 4, .file = file.get(), .line_interval = kAlways});
    bar.update(5);
    EXPECT_TRUE(bar.due());
    bar.update();
    bar.close();
    bar.update();  // shows nothing any more
  }
  EXPECT_THAT(file.text(),
              AllOf(MatchesRegex(" 90% 9/10 .*\n100% 10/10 .*\n100% [^\n]*\n"),
                    Not(HasSubstr("\r")), Not(HasSubstr("\033"))));
  // A loop that is over before the first line is due leaves no trace.
  PlainFile short_loop;
  {
    ProgressBar bar(std::nullopt, {.file = short_loop.get(),
                                   .min_interval = kAlways,
                                   .line_interval = kNever});
    bar.update();
    EXPECT_FALSE(bar.due());
  }
  EXPECT_EQ(short_loop.text(), "");
}

TEST(ProgressBar, LinesAreWrittenAboveTheBar) {
  Terminal terminal;
  PlainFile out;
  {
    ProgressBar bar(2, {.leave = false, .file = terminal.get()});
    bar.write("Epoch 1 is done", terminal.get());
    bar.write("elsewhere", out.get());
  }
  EXPECT_EQ(out.text(), "elsewhere\n");
  std::fputs("the end", terminal.get());
  const std::string text = terminal.text_until("the end");
  EXPECT_THAT(text, HasSubstr("\r\033[KEpoch 1 is done\r\n\r"));
  // A bar that does not stay is erased.
  EXPECT_THAT(text, EndsWith("\r\033[Kthe end"));
}

TEST(ProgressBar, CanBeTurnedOff) {
  PlainFile file;
  {
    ProgressBar bar(2, {.disable = true, .file = file.get()});
    bar.update(2);
    EXPECT_FALSE(bar.due());
  }
  ::setenv("LOCKSTEP_PROGRESS", "off", 1);
  const auto count_one = [&](std::optional<bool> disable) {
    ProgressBar bar(
        1, {.disable = disable, .file = file.get(), .line_interval = kAlways});
    bar.update();
  };
  count_one(std::nullopt);
  EXPECT_EQ(file.text(), "");
  count_one(false);
  ::unsetenv("LOCKSTEP_PROGRESS");
  EXPECT_THAT(file.text(), StartsWith("100% 1/1 "));
}

TEST(ProgressBar, RefusesNegativeNumbers) {
  EXPECT_EQ(message_of([] { ProgressBar(-1); }),
            "ProgressBar: total is -1; give 0 or more, or std::nullopt");
  EXPECT_EQ(message_of([] { ProgressBar(1, {.initial = -2}); }),
            "ProgressBar: initial is -2; give 0 or more");
  EXPECT_THAT(message_of([] {
                ProgressBar(1, {.line_interval = std::chrono::seconds(-1)});
              }),
              HasSubstr("negative"));
  EXPECT_THAT(message_of([] { ProgressBar(1, {.file = nullptr}); }),
              HasSubstr("file is null"));
  PlainFile file;
  ProgressBar bar(1, {.file = file.get(), .line_interval = kAlways});
  bar.update(std::numeric_limits<int64_t>::max());
  bar.update();
  EXPECT_EQ(bar.count(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(message_of([&] { bar.update(-3); }),
            "ProgressBar: update(-3); give 0 or more");
}

TEST(ProgressBar, AFileThatCannotBeWrittenChangesNothing) {
  std::FILE* full = std::fopen("/dev/full", "w");
  ASSERT_NE(full, nullptr);
  {
    ProgressBar bar(2, {.file = full, .line_interval = kAlways});
    bar.update();
    bar.update();
    EXPECT_EQ(bar.count(), 2);
  }
  std::fclose(full);
}

TEST(WithProgress, CountsTheElementsOfALoop) {
  PlainFile file;
  std::vector<int> numbers{1, 2, 3};
  int sum = 0;
  for (int& number : with_progress(
           numbers,
           {.unit = "number", .file = file.get(), .line_interval = kAlways})) {
    sum += number;
    number = 0;
  }
  EXPECT_EQ(sum, 6);
  EXPECT_EQ(numbers, std::vector<int>(3));
  EXPECT_THAT(file.text(), HasSubstr("100% 3/3 ["));

  // An rvalue lives as long as the loop, which may be left early.
  PlainFile left;
  auto range = with_progress(std::vector<int>{1, 2, 3}, {.file = left.get()});
  for (int number : range) {
    if (number == 2) break;
  }
  EXPECT_EQ(range.bar().count(), 1);
}

WORLD_TEST(ProgressBar, OnlyRank0ShowsItsBar, 2) {
  auto group = init_process_group("gloo");
  PlainFile file;
  {
    ProgressBar bar(1, {.file = file.get(), .line_interval = kAlways});
    bar.update();
  }
  EXPECT_EQ(file.text().empty(), get_rank() != 0);
}

}  // namespace
}  // namespace lockstep::internal
