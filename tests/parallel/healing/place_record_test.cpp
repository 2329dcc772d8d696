// The records that a process has left in its place's memory, whenever it was
// killed.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/parallel/healing/place_record.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

const std::string kState = "a state";

FileDescriptor memory() {
  return FileDescriptor(::memfd_create("place", MFD_CLOEXEC));
}

void write(PlaceRecord& record, int64_t steps, const std::string& text) {
  const PlaceRecord::Bytes whole = std::as_bytes(std::span(text));
  // In two parts.
  const std::vector<PlaceRecord::Bytes> parts = {
      whole.first(text.size() / 2), whole.subspan(text.size() / 2)};
  record.write(steps, parts);
}

std::string read(PlaceRecord& record, int64_t steps) {
  const auto bytes = record.read(steps);
  if (!bytes) return "nothing";
  return {reinterpret_cast<const char*>(bytes->data()), bytes->size()};
}

TEST(PlaceRecord, KeepsTheLastThreeAndTheNewestOfAStep) {
  const auto place = memory();
  PlaceRecord record(place, 0, 3);
  EXPECT_EQ(read(record, 0), "nothing");
  write(record, 0, "begin 0");
  write(record, 1, "computed 1");
  write(record, 1, "begin 1");
  EXPECT_EQ(read(record, 0), "begin 0");
  EXPECT_EQ(read(record, 1), "begin 1");
  write(record, 2, "computed 2");
  EXPECT_EQ(read(record, 0), "nothing");
  EXPECT_EQ(read(record, 1), "begin 1");
  EXPECT_EQ(read(record, 2), "computed 2");
}

TEST(PlaceRecord, TellsWhatWasWrittenInItsOrder) {
  const auto place = memory();
  PlaceRecord record(place, 0, 3);
  const auto after = [](PlaceRecord& from, uint64_t number) {
    std::vector<std::string> all;
    for (const auto& one : from.written_after(number)) {
      all.push_back(std::to_string(one.number) + "@" +
                    std::to_string(one.steps) + " " +
                    std::string(reinterpret_cast<const char*>(one.bytes.data()),
                                one.bytes.size()));
    }
    return all;
  };
  EXPECT_THAT(after(record, 0), ElementsAre());
  for (int64_t steps = 4; steps < 8; ++steps) {
    write(record, steps, "state " + std::to_string(steps));
  }
  EXPECT_THAT(after(record, 3), ElementsAre("4@7 state 7"));
  PlaceRecord next(place, 0, 3);  // in the next process
  EXPECT_THAT(after(next, 0),
              ElementsAre("2@5 state 5", "3@6 state 6", "4@7 state 7"));
  next.forget_all();
  EXPECT_THAT(after(next, 0), ElementsAre());
  EXPECT_EQ(read(next, 7), "nothing");
}

TEST(PlaceRecord, IsReadByTheNextProcessOfThePlace) {
  const auto place = memory();
  {
    PlaceRecord record(place, 0, 3);
    write(record, 7, "seven");
  }
  PlaceRecord record(place, 0, 3);
  EXPECT_EQ(read(record, 7), "seven");
  write(record, 8, "eight");
  EXPECT_EQ(read(record, 7), "seven");
}

TEST(PlaceRecord, GrowsWithItsRecordsAndKeepsTheOthers) {
  const auto place = memory();
  const std::string large(5 << 20, 'x');
  {
    PlaceRecord record(place, 0, 2);
    write(record, 0, "zero");
    write(record, 1, large);
    EXPECT_EQ(read(record, 0), "zero");
    EXPECT_EQ(read(record, 1), large);
    write(record, 2, large + "y");
    EXPECT_EQ(read(record, 1), large);
  }
  PlaceRecord record(place, 0, 2);
  EXPECT_EQ(read(record, 1), large);
  EXPECT_EQ(read(record, 2), large + "y");
  write(record, 3, "three");
  EXPECT_EQ(read(record, 2), large + "y");
  EXPECT_EQ(read(record, 3), "three");
}

TEST(PlaceRecord, SharesTheMemoryWithOneOfOtherSlots) {
  const auto place = memory();
  PlaceRecord few(place, 0, 1);
  PlaceRecord more(place, 1, 2);
  write(more, 7, "more");
  write(few, 7, "few");
  write(few, 8, "few again");
  EXPECT_EQ(read(few, 7), "nothing");
  EXPECT_EQ(read(few, 8), "few again");
  EXPECT_EQ(read(more, 7), "more");
}

// The next record takes the place of a forgotten one, not of the last good one.
TEST(PlaceRecord, ForgetsLaterSteps) {
  const auto place = memory();
  PlaceRecord record(place, 0, 2);
  write(record, 4, "four");
  write(record, 5, "five");
  EXPECT_THAT(record.steps(), UnorderedElementsAre(4, 5));
  record.forget_after(4);
  EXPECT_THAT(record.steps(), ElementsAre(4));
  EXPECT_EQ(read(record, 5), "nothing");
  write(record, 5, "five again");
  EXPECT_EQ(read(record, 4), "four");
  EXPECT_EQ(read(record, 5), "five again");
}

TEST(PlaceRecord, NoticesDamage) {
  const auto place = memory();
  PlaceRecord record(place, 0, 2);
  write(record, 3, kState);
  auto* bytes = static_cast<char*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE,
                                          MAP_SHARED, place.get(), 0));
  ASSERT_NE(bytes, MAP_FAILED);
  *std::search(bytes, bytes + 4096, kState.begin(), kState.end()) = 'A';
  ::munmap(bytes, 4096);
  EXPECT_THROW(read(record, 3), std::runtime_error);
}

// A process is killed while it writes records of a step's number, repeated, as
// fast as it can. Whatever is left is whole.
TEST(PlaceRecord, IsWholeWheneverItsWriterIsKilled) {
  constexpr size_t kNumbers = 4096;
  SharedMemory shared = SharedMemory::create(sizeof(std::atomic<int64_t>));
  auto* ready = new (shared.data()) std::atomic<int64_t>(-1);
  for (int round = 0; round < 20; ++round) {
    ready->store(-1);
    const auto place = memory();
    PlaceRecord record(place, 0, 3);
    const pid_t child = ::fork();
    if (child == 0) {
      for (int64_t step = 0;; ++step) {
        const std::vector<int64_t> numbers(kNumbers, step);
        const PlaceRecord::Bytes bytes = std::as_bytes(std::span(numbers));
        record.write(step, std::span(&bytes, 1));
        ready->store(step, std::memory_order_release);
      }
    }
    while (ready->load(std::memory_order_acquire) < 100 + round) ::usleep(100);
    ::kill(child, SIGKILL);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    int found = 0;
    const int64_t last = ready->load();
    for (int64_t step = last - 3; step <= last + 1; ++step) {
      const auto bytes = record.read(step);
      if (!bytes) continue;
      ++found;
      ASSERT_EQ(bytes->size(), kNumbers * sizeof(int64_t));
      std::vector<int64_t> numbers(kNumbers);
      std::memcpy(numbers.data(), bytes->data(), bytes->size());
      EXPECT_EQ(numbers, std::vector<int64_t>(kNumbers, step));
    }
    EXPECT_GE(found, 2);
  }
}

TEST(PlaceRecord, AboveTheLimitOfFilesIsAnErrorAndNoSignal) {
  const auto place = memory();
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &usual), 0);
  const rlimit small{.rlim_cur = 1 << 30, .rlim_max = usual.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::error_code code;
  try {
    PlaceRecord(place, 0, 3);
  } catch (const std::system_error& error) {
    code = error.code();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &usual), 0);
  EXPECT_EQ(code, std::errc::file_too_large);
}

}  // namespace
}  // namespace lockstep::internal
