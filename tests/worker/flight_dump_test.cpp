#include "lockstep/worker/flight_dump.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

int64_t unix_now() {
  return std::chrono::nanoseconds(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Each test has a folder, a job and a rank of its own.
class FlightDump : public ::testing::Test {
 protected:
  FlightDump() {
    auto pattern =
        (fs::temp_directory_path() / "lockstep_test_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw_errno("mkdtemp");
    folder_ = pattern;
    ::setenv("LOCKSTEP_FLIGHT_DIR", (folder_ / "made").c_str(), 1);
    ::setenv("MASTER_PORT", "29500", 1);
    ::unsetenv("TORCHELASTIC_RESTART_COUNT");
    ::unsetenv("LOCKSTEP_FLIGHT_SIGNAL");
    ::unsetenv("LOCKSTEP_FLIGHT_RECORDS");
    ::signal(SIGUSR1, SIG_DFL);
  }
  ~FlightDump() override {
    ::signal(SIGUSR1, SIG_DFL);
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  static json written() {
    std::ifstream file(flight_record_path());
    return json::parse(file);
  }

  fs::path folder_;
};

TEST_F(FlightDump, FileHasEveryFieldOfEveryGroup) {
  arm_flight_dump(1, 3);
  EXPECT_EQ(flight_record_path(),
            folder_ / "made/lockstep-flight-29500-rank1.json");
  auto whole = FlightRecorder::make(
      {.name = "default_pg", .rank = 1, .ranks = {0, 1, 2}, .backend = "a:b"},
      4);
  auto part = FlightRecorder::make(
      {.name = "quo\"te\\\n", .rank = 0, .ranks = {1}, .backend = ""}, 4);
  const int64_t before = unix_now();
  const auto id = whole->begin({.operation = "reduce",
                                .dtype = "Float",
                                .reduce_op = "MAX",
                                .number = 1,
                                .peer = 2,
                                .in_elements = uint64_t{1} << 40,
                                .out_elements = 6},
                               FlightState::started);
  whole->end(id, /*failed=*/true);
  whole->begin({.operation = "recv", .dtype = "Int"}, FlightState::scheduled);
  const int64_t after = unix_now();
  ASSERT_EQ(write_flight_record(FlightReason::request), 0);

  const json document = written();
  EXPECT_EQ(document.at("format"), "lockstep-flight");
  EXPECT_EQ(document.at("version"), 1);
  EXPECT_EQ(document.at("job"), "29500");
  EXPECT_EQ(document.at("rank"), 1);
  EXPECT_EQ(document.at("world_size"), 3);
  EXPECT_FALSE(document.at("host").get<std::string>().empty());
  EXPECT_EQ(document.at("pid"), ::getpid());
  EXPECT_EQ(document.at("reason"), "request");
  EXPECT_GE(document.at("time_ns"), before);
  ASSERT_EQ(document.at("groups").size(), 2u);
  const json& group = document.at("groups")[0];
  EXPECT_EQ(group.at("process_group"), "default_pg");
  EXPECT_EQ(group.at("backend"), "a:b");
  EXPECT_EQ(group.at("rank"), 1);
  EXPECT_EQ(group.at("ranks"), json({0, 1, 2}));
  EXPECT_EQ(group.at("capacity"), 4);
  EXPECT_EQ(group.at("last_record_id"), 2);
  EXPECT_EQ(group.at("last_collective_seq_id"), 1);
  ASSERT_EQ(group.at("entries").size(), 2u);
  json reduce = group.at("entries")[0];
  // Either clock may be adjusted during the test, so they agree within a
  // second.
  constexpr int64_t kSecond = 1'000'000'000;
  EXPECT_GT(reduce.at("time_created_ns"), before - kSecond);
  EXPECT_LT(reduce.at("time_ended_ns"), after + kSecond);
  EXPECT_GE(reduce.at("time_ended_ns"),
            reduce.at("time_created_ns").get<int64_t>());
  reduce.erase("time_created_ns");
  reduce.erase("time_ended_ns");
  EXPECT_EQ(reduce, json({{"record_id", 1},
                          {"collective_seq_id", 1},
                          {"is_p2p", false},
                          {"operation", "reduce"},
                          {"dtype", "Float"},
                          {"reduce_op", "MAX"},
                          {"peer", 2},
                          {"in_elements", uint64_t{1} << 40},
                          {"out_elements", 6},
                          {"state", "failed"},
                          {"thread", ::gettid()}}));
  const json& recv = group.at("entries")[1];
  EXPECT_EQ(recv.at("is_p2p"), true);
  EXPECT_EQ(recv.at("state"), "scheduled");
  EXPECT_TRUE(recv.at("peer").is_null());
  EXPECT_TRUE(recv.at("reduce_op").is_null());
  EXPECT_TRUE(recv.at("time_ended_ns").is_null());
  EXPECT_EQ(document.at("groups")[1].at("process_group"), "quo\"te\\?");
  EXPECT_EQ(document.at("groups")[1].at("entries"), json::array());
}

TEST_F(FlightDump, NameTellsJobsAndRestartsApart) {
  auto some = FlightRecorder::make({"g", 0, {0}, ""}, 1);
  ::setenv("TORCHELASTIC_RESTART_COUNT", "2", 1);
  arm_flight_dump(0, 1);
  EXPECT_EQ(fs::path(flight_record_path()).filename(),
            "lockstep-flight-29500.2-rank0.json");
  ASSERT_EQ(write_flight_record(FlightReason::request), 0);
  EXPECT_EQ(written().at("job"), "29500.2");
  ::unsetenv("MASTER_PORT");
  arm_flight_dump(0, 1);
  EXPECT_EQ(fs::path(flight_record_path()).filename(),
            "lockstep-flight-pid" + std::to_string(::getpid()) + "-rank0.json");
  ASSERT_EQ(write_flight_record(FlightReason::request), 0);
  EXPECT_TRUE(written().at("job").is_null());
}

TEST_F(FlightDump, OnlyTheLastOfALongRunIsWritten) {
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 8);
  for (uint64_t number = 1; number <= 100; ++number) {
    flight->end(flight->begin({.operation = "barrier", .number = number},
                              FlightState::started),
                false);
  }
  ASSERT_EQ(write_flight_record(FlightReason::request), 0);
  const json group = written().at("groups")[0];
  ASSERT_EQ(group.at("entries").size(), 8u);
  EXPECT_EQ(group.at("entries")[0].at("collective_seq_id"), 93);
  EXPECT_EQ(group.at("entries")[7].at("collective_seq_id"), 100);
  EXPECT_EQ(group.at("last_record_id"), 100);
}

// Several groups share the allowed size, and every number has its largest
// width.
TEST_F(FlightDump, FileOfTheLargestRingsIsNotTooLargeForInspect) {
  arm_flight_dump(0, 1);
  constexpr size_t kCapacity = size_t{1} << 17;
  constexpr auto kWide = std::numeric_limits<uint64_t>::max() >> 2;
  std::vector<FlightRecorderPtr> groups;
  for (const char* name : {"one", "another"}) {
    groups.push_back(FlightRecorder::make({name, 0, {0}, ""}, kCapacity));
    for (size_t i = 0; i < kCapacity; ++i) {
      const auto id =
          groups.back()->begin({.operation = "reduce_scatter_tensor_coalesced",
                                .dtype = "ComplexDouble",
                                .reduce_op = "PRODUCT",
                                .number = kWide,
                                .peer = std::numeric_limits<int>::max(),
                                .in_elements = kWide,
                                .out_elements = kWide},
                               FlightState::scheduled);
      groups.back()->end(id, /*failed=*/false);
    }
  }
  ASSERT_EQ(write_flight_record(FlightReason::request), 0);
  EXPECT_LE(fs::file_size(flight_record_path()), size_t{64} << 20);
  const json document = written();
  for (const json& group : document.at("groups")) {
    const json& entries = group.at("entries");
    EXPECT_EQ(entries.size(), kCapacity / 2);
    EXPECT_EQ(entries.back().at("record_id"), kCapacity) << "not the newest";
  }
}

TEST_F(FlightDump, FailureIsWrittenOnceAndItsPathIsSaid) {
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 8);
  const auto id = flight->begin({.operation = "barrier", .number = 1},
                                FlightState::started);
  flight->end(id, /*failed=*/true);
  const std::string text = "; flight record: " + flight_record_path();
  EXPECT_EQ(record_failure(*flight), text);
  EXPECT_EQ(written().at("reason"), "failure");
  fs::remove(flight_record_path());
  EXPECT_EQ(record_failure(*flight), text);
  EXPECT_FALSE(fs::exists(flight_record_path())) << "written again";
  flight->end(flight->begin({.operation = "barrier", .number = 2},
                            FlightState::started),
              /*failed=*/true);
  EXPECT_EQ(record_failure(*flight), text);
  EXPECT_EQ(written().at("groups")[0].at("entries").size(), 2u);
}

TEST_F(FlightDump, RecordThatCannotBeWrittenIsSaidWithTheReason) {
  ::setenv("LOCKSTEP_FLIGHT_DIR", (folder_ / "no/such/folder").c_str(), 1);
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 8);
  for (int time = 0; time < 2; ++time) {
    EXPECT_EQ(record_failure(*flight),
              "; no flight record: " + flight_record_path() +
                  ": No such file or directory");
  }
}

TEST_F(FlightDump, NothingIsWrittenOrSaidWithoutRecords) {
  arm_flight_dump(0, 1);
  auto off = FlightRecorder::make({"g", 0, {0}, ""}, 0);
  EXPECT_EQ(record_failure(*off), "");
  EXPECT_EQ(write_flight_record(FlightReason::request), ENODATA);
  EXPECT_FALSE(fs::exists(flight_record_path()));
}

TEST_F(FlightDump, LinkOfAnotherUserIsReplacedNotFollowed) {
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 8);
  fs::create_directory(folder_ / "made");
  std::ofstream(folder_ / "victim") << "precious";
  fs::create_symlink(folder_ / "victim", flight_record_path());
  ASSERT_EQ(write_flight_record(FlightReason::request), 0);
  EXPECT_FALSE(fs::is_symlink(flight_record_path()));
  EXPECT_EQ(fs::file_size(folder_ / "victim"), 8u);
  struct stat status {};
  ASSERT_EQ(::stat(flight_record_path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(FlightDump, SignalWritesTheRecordAndTheProcessGoesOn) {
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 8);
  errno = 42;
  ASSERT_EQ(::raise(SIGUSR1), 0);
  EXPECT_EQ(errno, 42);
  EXPECT_EQ(written().at("reason"), "signal");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "made"), {}), 1)
      << "a file aside was left";
}

TEST_F(FlightDump, HandlerOfTheProgramStays) {
  static std::atomic<int> own{0};
  own = 0;
  ::signal(SIGUSR1, [](int) { ++own; });
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 8);
  ::raise(SIGUSR1);
  EXPECT_EQ(own, 1);
  EXPECT_FALSE(fs::exists(flight_record_path()));
}

TEST_F(FlightDump, EnvironmentTurnsTheSignalOff) {
  ::setenv("LOCKSTEP_FLIGHT_SIGNAL", "0", 1);
  arm_flight_dump(0, 1);
  struct sigaction current {};
  ASSERT_EQ(::sigaction(SIGUSR1, nullptr, &current), 0);
  EXPECT_EQ(current.sa_handler, SIG_DFL);
  ::setenv("LOCKSTEP_FLIGHT_SIGNAL", "yes", 1);
  EXPECT_THAT([] { arm_flight_dump(0, 1); },
              ThrowsMessage<std::invalid_argument>(AllOf(
                  HasSubstr("LOCKSTEP_FLIGHT_SIGNAL"), HasSubstr("\"yes\""))));
}

// The child's file would have the name of its parent's rank.
TEST_F(FlightDump, ProcessForkedSinceWritesNothing) {
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 8);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(write_flight_record(FlightReason::request));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), ENODATA);
  EXPECT_FALSE(fs::exists(flight_record_path()));
}

// Threads of LibTorch fail, and so record, while static objects are destroyed.
TEST_F(FlightDump, AtTheEndOfTheProcessTheFileHasItsNameStill) {
  const pid_t child = ::fork();
  if (child == 0) {
    // Runs after the objects that are made below have been destroyed.
    std::atexit([] {
      // Reuses freed memory, so that a path read after its destruction shows.
      std::vector<std::string> others(1000, std::string(100, 'x'));
      write_flight_record(FlightReason::failure);
    });
    static const auto flight =
        FlightRecorder::make({"g", 0, {0}, ""}, 8).release();
    EXPECT_NE(flight, nullptr);
    for (int rank = 0; rank < 9; ++rank) arm_flight_dump(rank, 9);
    std::exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    if (entry.is_regular_file()) names.push_back(entry.path());
  }
  EXPECT_EQ(names, std::vector<std::string>{
                       folder_ / "made/lockstep-flight-29500-rank8.json"});
}

TEST_F(FlightDump, FileIsWholeWhileThreadsRecordAndOthersDump) {
  arm_flight_dump(0, 1);
  auto flight = FlightRecorder::make({"g", 0, {0}, ""}, 64);
  std::atomic<bool> done{false};
  std::thread worker([&] {
    for (uint64_t number = 1; !done; ++number) {
      const auto id = flight->begin(
          {.operation = "all_reduce", .number = number, .in_elements = number},
          FlightState::started);
      flight->end(id, number % 2 == 0);
    }
  });
  std::thread other([&] {
    while (!done) write_flight_record(FlightReason::request);
  });
  for (int round = 0; round < 50; ++round) {
    ASSERT_EQ(write_flight_record(FlightReason::request), 0);
    const json document = written();
    const json& group = document.at("groups")[0];
    for (const json& entry : group.at("entries")) {
      ASSERT_EQ(entry.at("collective_seq_id"), entry.at("in_elements"));
      ASSERT_LE(entry.at("collective_seq_id"),
                group.at("last_collective_seq_id"));
    }
  }
  done = true;
  worker.join();
  other.join();
}

}  // namespace
}  // namespace lockstep::internal
