#include "lockstep/worker/status_publisher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/trace/flight_recorder.h"
#include "lockstep/worker/training_counters.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using ::testing::HasSubstr;

constexpr milliseconds kLong{20'000};

// The part of an agent for the publishers of this process.
class FakeAgent {
 public:
  FakeAgent()
      : name_("lockstep-test-agent/" + std::to_string(getpid())),
        listener_(listen_at(name_)) {
    setenv("LOCKSTEP_AGENT", name_.c_str(), 1);
    setenv("LOCAL_RANK", "1", 1);
  }
  ~FakeAgent() {
    unsetenv("LOCKSTEP_AGENT");
    unsetenv("LOCAL_RANK");
  }

  // Waits for the next question and answers; returns the question.
  std::string serve(const std::string& answer, int descriptor) {
    const Deadline deadline = Deadline::after(kLong);
    FileDescriptor asker;
    while (!(asker = accept_from(listener_)) && !deadline.expired()) {
      pollfd entry{listener_.get(), POLLIN, 0};
      poll(&entry, 1, 100);
    }
    std::array<std::byte, 4096> bytes;
    Packet packet{};
    while ((packet = receive_packet(asker, bytes)).state ==
               Packet::State::none &&
           !deadline.expired()) {
      pollfd entry{asker.get(), POLLIN, 0};
      poll(&entry, 1, 100);
    }
    send_packet(asker, std::as_bytes(std::span(answer)), descriptor);
    return {reinterpret_cast<const char*>(bytes.data()), packet.bytes};
  }

 private:
  std::string name_;
  FileDescriptor listener_;
};

template <class Condition>
bool comes_true(const Condition& condition) {
  const Deadline deadline = Deadline::after(kLong);
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

TEST(StatusPublisher, TellsOnlyWhileSomebodyLooks) {
  FakeAgent agent;
  StatusBoard board = StatusBoard::create(2);
  std::optional<StatusPublisher> publisher(std::in_place, 5);
  EXPECT_THAT(agent.serve("/folder", board.descriptor()),
              HasSubstr("\"local_rank\": 1"));
  std::this_thread::sleep_for(2 * StatusBoard::kInterval);
  EXPECT_FALSE(board.read(1));

  auto& counters = TrainingCounters::instance();
  const int64_t steps = counters.steps();
  const int64_t samples = counters.samples();
  counters.count_step();
  {
    const TrainingCounters::WholeStep step;
    counters.count_step();  // counts nothing
  }
  counters.count_samples(32);
  counters.set_progress("half");
  board.watch(milliseconds(60'000));
  ASSERT_TRUE(comes_true([&] { return board.read(1).has_value(); }));
  const RankStatus first = *board.read(1);
  EXPECT_EQ(first.pid, getpid());
  EXPECT_EQ(first.rank, 5);
  EXPECT_EQ(first.steps, steps + 2);
  EXPECT_EQ(first.samples, samples + 32);
  EXPECT_EQ(first.progress.view(), "half");
  EXPECT_GT(first.last_step_ns, 0);
  EXPECT_LE(first.last_step_ns, first.published_ns);
  EXPECT_FALSE(board.read(0));
  // And again, as long as somebody looks.
  EXPECT_TRUE(comes_true(
      [&] { return board.read(1)->published_ns > first.published_ns; }));
  EXPECT_EQ(board.read(1)->has_left, 0);
  publisher.reset();
  EXPECT_EQ(board.read(1)->has_left, 1);
  counters.set_progress("");
}

TEST(StatusPublisher, PlaceOfTheLauncherComesBeforeTheLocalRank) {
  FakeAgent agent;
  setenv("LOCKSTEP_AGENT_PLACE", "0", 1);
  StatusBoard board = StatusBoard::create(2);
  {
    StatusPublisher publisher(5);
    EXPECT_THAT(agent.serve("/folder", board.descriptor()),
                HasSubstr("\"local_rank\": 0"));
  }
  unsetenv("LOCKSTEP_AGENT_PLACE");
}

TEST(StatusPublisher, EndsAtOnceWhateverTheAgentDoes) {
  const auto end_within = [](const auto& meanwhile) {
    const auto begin = steady_ns();
    {
      StatusPublisher publisher(0);
      meanwhile();
    }
    EXPECT_LT(steady_ns() - begin, nanoseconds(kLong).count() / 2);
  };
  end_within([] {});  // there is none
  setenv("LOCAL_RANK", "0", 1);
  setenv("LOCKSTEP_AGENT", "lockstep-test-agent/none", 1);
  end_within([] {});  // it has gone
  FakeAgent agent;
  end_within([] {});  // it does not answer
  // It has refused.
  end_within([&] { agent.serve("{\"refused\": \"no\"}", -1); });
  // It has another board: one without this place, or none.
  StatusBoard small = StatusBoard::create(1);
  end_within([&] { agent.serve("/", small.descriptor()); });
  end_within([&] { agent.serve("/", STDIN_FILENO); });
  EXPECT_FALSE(small.read(0));
  // It has a board at which nobody looks, or everybody.
  StatusBoard board = StatusBoard::create(2);
  end_within([&] { agent.serve("/", board.descriptor()); });
  board.watch(kLong);
  end_within([&] { agent.serve("/", board.descriptor()); });
}

// A bug: of several requests that came together, only the newest had an answer.
TEST(StatusPublisher, EveryRequestOfStacksHasAnAnswer) {
  const testing::TemporaryFolder folder;
  FakeAgent agent;
  StatusBoard board = StatusBoard::create(2);
  const StatusPublisher publisher(5);
  agent.serve(folder.path(), board.descriptor());
  board.watch(milliseconds(60'000));
  ASSERT_TRUE(comes_true([&] { return board.read(1).has_value(); }));
  for (int request = 1; request <= 3; ++request) {
    EXPECT_EQ(board.ask_stacks(), request);
  }
  EXPECT_TRUE(comes_true([&] { return board.read(1)->stacks == 3; }));
  for (int request = 1; request <= 3; ++request) {
    EXPECT_THAT(
        testing::read_file(folder.file(StatusBoard::stacks_file(request, 5))),
        HasSubstr("\"frames\""));
  }
  EXPECT_EQ(folder.count(), 3u);
}

// A profiler that says what it was asked for.
class FakeProfiler final : public ProfileOnDemand {
 public:
  void ask(Request request) override {
    const std::lock_guard lock(mutex);
    asked = std::move(request);
  }
  Progress progress() const override {
    const std::lock_guard lock(mutex);
    if (!asked) return {};
    return {ProfileState::failed, "words of " + asked->folder};
  }
  void stop() override { ++stops; }
  void on_step(int64_t /*step*/) noexcept override {}
  void end() noexcept override { ++ends; }

  mutable std::mutex mutex;
  std::optional<Request> asked;
  std::atomic<int> stops = 0;
  int ends = 0;
};

TEST(StatusPublisher, PassesAProfileOnAndItsOutcomeBack) {
  FakeAgent agent;
  StatusBoard board = StatusBoard::create(2);
  board.ask_profile(milliseconds(1), 1);  // before this process came
  FakeProfiler profiler;
  {
    StatusPublisher publisher(5);
    agent.serve("/folder", board.descriptor());
    board.watch(milliseconds(60'000));
    ASSERT_TRUE(comes_true([&] { return board.read(1).has_value(); }));
    EXPECT_EQ(board.read(1)->profile, 1);
    EXPECT_EQ(board.read(1)->profile_state, ProfileState::failed);
    EXPECT_THAT(std::string(board.read(1)->profile_words.view()),
                HasSubstr("does not include"));
    ProfileOnDemand::provide(&profiler);
    board.ask_profile(milliseconds(70), 8);
    ASSERT_TRUE(comes_true([&] { return board.read(1)->profile == 2; }));
    EXPECT_EQ(board.read(1)->profile_words.view(), "words of /folder/profile2");
    EXPECT_EQ(profiler.stops, 0);
    board.stop_profile(1);  // another one
    const int64_t asked_ns = steady_ns();
    ASSERT_TRUE(
        comes_true([&] { return board.read(1)->published_ns > asked_ns; }));
    EXPECT_EQ(profiler.stops, 0);
    board.stop_profile(2);
    EXPECT_TRUE(comes_true([&] { return profiler.stops > 0; }));
  }
  ProfileOnDemand::provide(nullptr);
  EXPECT_EQ(profiler.ends, 1);
  EXPECT_EQ(profiler.asked->duration, milliseconds(70));
  EXPECT_EQ(profiler.asked->first_step, 8);
}

FlightRecorder::Clock::time_point at(int64_t ns) {
  return FlightRecorder::Clock::time_point(nanoseconds(ns));
}

TEST(Operations, AreCountedAndTheirTimesCoverEachOther) {
  const auto one = FlightRecorder::make(
      {.name = "one", .rank = 0, .ranks = {0}, .backend = "b"}, 8);
  const auto two = FlightRecorder::make(
      {.name = "two", .rank = 0, .ranks = {0}, .backend = "b"}, 8);
  const auto add = [](FlightRecorder& recorder, int64_t begin, int64_t end) {
    const auto id =
        recorder.begin({.operation = "all_reduce",
                        .number = static_cast<uint64_t>(begin / 100)},
                       FlightState::started, at(begin));
    if (end > 0) recorder.end(id, false, at(end));
  };
  add(*one, 100, 900);    // before what is asked for
  add(*one, 800, 1'200);  // 200 of it are asked for
  add(*two, 1'100, 1'300);
  add(*one, 1'500, 1'600);
  RankStatus status;
  status.comm_ns = 5;
  read_operations(status, 1'000, 2'000);
  EXPECT_EQ(status.operations, 4);
  EXPECT_EQ(status.last_operation_ns, 1'600);
  EXPECT_EQ(last_operation(status), "all_reduce 15 (one)");
  EXPECT_EQ(current_operation(status), "");
  EXPECT_EQ(status.comm_ns, 5 + 300 + 100);
  EXPECT_EQ(status.current_since_ns, 0);

  add(*two, 1'800, 0);
  add(*one, 1'700, 0);
  status.comm_ns = 0;
  read_operations(status, 1'000, 2'000);
  EXPECT_EQ(status.comm_ns, 300 + 100 + 300);
  EXPECT_EQ(status.current_since_ns, 1'700);
  EXPECT_EQ(status.current_number, 17);
  EXPECT_EQ(status.current_operation.view(), "all_reduce");
  EXPECT_EQ(status.current_group.view(), "one");
  EXPECT_EQ(current_operation(status), "all_reduce 17 (one)");
}

TEST(Operations, AreReadFromARingThatHasTurned) {
  const auto ring = FlightRecorder::make(
      {.name = "ring", .rank = 0, .ranks = {0}, .backend = "b"}, 4);
  for (int64_t begin = 0; begin < 1'000; begin += 10) {
    ring->end(
        ring->begin({.operation = "barrier"}, FlightState::started, at(begin)),
        false, at(begin + 5));
  }
  RankStatus status;
  read_operations(status, 0, 1'000);
  EXPECT_EQ(status.operations, 100);
  EXPECT_EQ(status.comm_ns, 4 * 5);
}

}  // namespace
}  // namespace lockstep::internal
