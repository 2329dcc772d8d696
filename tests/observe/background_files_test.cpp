// Records, their checksums, and the thread that writes them.

#include "lockstep/observe/background_files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "lockstep/observe/event.h"
#include "tests/harness/in_child.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using namespace std::chrono_literals;

// RFC 3720, section B.4: the checksums there are written with their lowest byte
// first.
TEST(Crc32c, HasTheNumbersOfTheStandard) {
  std::string ascending(32, '\0');
  for (size_t at = 0; at < ascending.size(); ++at) {
    ascending[at] = static_cast<char>(at);
  }
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
  EXPECT_EQ(crc32c(std::string(ascending.rbegin(), ascending.rend())),
            0x113fdb5cu);
  const unsigned char read_command[48] = {
      0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0, 0,
      0x14, 0,    0, 0, 0, 0, 4, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
      0x28, 0,    0, 0, 0, 0, 0, 0, 2, 0, 0, 0,    0, 0, 0, 0};
  EXPECT_EQ(crc32c({reinterpret_cast<const char*>(read_command), 48}),
            0xd9963a56u);
}

// Bit by bit, for every length around the eight bytes that are taken at once.
TEST(Crc32c, IsTheSameForEveryLength) {
  const auto bit_by_bit = [](const std::string& bytes) {
    uint32_t crc = 0xffffffff;
    for (const char byte : bytes) {
      crc ^= static_cast<unsigned char>(byte);
      for (int bit = 0; bit < 8; ++bit) {
        crc = crc & 1 ? crc >> 1 ^ 0x82f63b78 : crc >> 1;
      }
    }
    return ~crc;
  };
  std::string bytes;
  for (int at = 0; at < 50; ++at) {
    EXPECT_EQ(crc32c(bytes), bit_by_bit(bytes)) << bytes.size();
    bytes += static_cast<char>(at * 151 + 7);
  }
}

FileDescriptor open_log(const std::string& path) {
  return FileDescriptor(
      ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0666));
}

class BackgroundFilesTest : public ::testing::Test {
 protected:
  TemporaryFolder folder_;
  const std::string path_ = folder_.file("log");
  const std::string other_ = folder_.file("other");
};

TEST_F(BackgroundFilesTest, FlushWritesWhatThreadsAppended) {
  BackgroundFiles files({.most_records = 3});
  const size_t log = files.add(open_log(path_), path_);
  const size_t other = files.add(open_log(other_), other_);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      for (int record = 0; record < 500; ++record) {
        files.append(log, "one\n");
        if (record % 100 == 0) files.flush();
        files.append(other, "2");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  files.flush();
  std::string expected;
  for (int record = 0; record < 1500; ++record) expected += "one\n";
  EXPECT_EQ(read_file(path_), expected);
  EXPECT_EQ(read_file(other_), std::string(1500, '2'));
  EXPECT_EQ(files.take_notice(), "");
}

// Waits with a deadline until the file has this content.
bool await_content(const std::string& path, const std::string& content) {
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (read_file(path) != content) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

TEST_F(BackgroundFilesTest, ManyRecordsAreWrittenWithoutFlush) {
  BackgroundFiles files({.most_records = 3});
  const size_t log = files.add(open_log(path_), path_);
  files.append(log, "a");
  files.append(log, "b");
  files.append(log, "c");
  EXPECT_TRUE(await_content(path_, "abc"));
}

TEST_F(BackgroundFilesTest, OneRecordIsWrittenWhenItHasWaited) {
  BackgroundFiles files({.most_records = 1000, .interval = 1ms});
  const size_t log = files.add(open_log(path_), path_);
  files.append(log, "a");
  EXPECT_TRUE(await_content(path_, "a"));
  files.append(log, "b");
  EXPECT_TRUE(await_content(path_, "ab"));
}

TEST_F(BackgroundFilesTest, AFullQueueWaitsForTheDisk) {
  BackgroundFiles files({.most_records = 1000000, .most_bytes = 100});
  const size_t log = files.add(open_log(path_), path_);
  const std::string record(60, 'x');
  std::string expected;
  for (int count = 0; count < 50; ++count) {
    files.append(log, record);
    expected += record;
  }
  const std::string large(1000, 'y');  // larger than the queue
  files.append(log, large);
  files.close();
  EXPECT_EQ(read_file(path_), expected + large);
}

TEST_F(BackgroundFilesTest, ClosingWritesAndEnds) {
  BackgroundFiles files({});
  const size_t log = files.add(open_log(path_), path_);
  files.append(log, "a");
  files.close();
  EXPECT_EQ(read_file(path_), "a");
  EXPECT_THROW(files.append(log, "b"), std::logic_error);
  EXPECT_THROW(files.add(open_log(other_), other_), std::logic_error);
  files.flush();
  files.close();
  EXPECT_EQ(read_file(path_), "a");
}

// /dev/full is a disk that is full.
TEST_F(BackgroundFilesTest, AFullDiskIsOneNoticeAndAnErrorOfFlush) {
  BackgroundFiles files({.most_records = 1, .most_bytes = 100});
  const size_t full =
      files.add(FileDescriptor(::open("/dev/full", O_WRONLY)), "/dev/full");
  files.append(files.add(open_log(path_), path_), "whole");
  std::string notice;
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  for (; notice.empty() && std::chrono::steady_clock::now() < deadline;) {
    files.append(full, "aaaaa");
    notice = files.take_notice();
  }
  EXPECT_THAT(notice, AllOf(HasSubstr("\"/dev/full\" cannot be written (No "
                                      "space left on device); training goes"),
                            ::testing::Not(HasSubstr("\n"))));
  EXPECT_EQ(files.take_notice(), "");
  EXPECT_THAT(message_of([&] { files.flush(); }),
              HasSubstr("the log \"/dev/full\" cannot be written; make room"));
  EXPECT_EQ(files.take_notice(), "");
  // Another file is written, the queue does not grow, and nobody waits.
  EXPECT_EQ(read_file(path_), "whole");
  for (int count = 0; count < 100; ++count) files.append(full, "bbbbbbbbbb");
  EXPECT_THROW(files.flush(), std::system_error);
  EXPECT_THROW(files.close(), std::system_error);
}

// A limit on the size of files is a disk that is full at any byte.
TEST_F(BackgroundFilesTest, AfterAFullDiskWholeRecordsAreWritten) {
  EXPECT_EQ(
      in_child([&] {
        ::rlimit limit{.rlim_cur = 10, .rlim_max = RLIM_INFINITY};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        BackgroundFiles files({.most_bytes = 40});
        const size_t log = files.add(open_log(path_), path_);
        files.append(log, "12345678");
        files.flush();
        files.append(log, "abcdefgh");
        try {
          files.flush();
          return 1;
        } catch (const std::system_error&) {
        }
        if (read_file(path_) != "12345678") return 2;  // no "ab"
        for (int count = 0; count < 10; ++count) {
          files.append(log, "ABCDEFGH");
        }
        limit.rlim_cur = RLIM_INFINITY;
        ::setrlimit(RLIMIT_FSIZE, &limit);
        files.flush();
        if (read_file(path_) !=
            "12345678abcdefghABCDEFGHABCDEFGHABCDEFGHABCDEFGH") {
          return 3;
        }
        return files.take_notice().find("6 records were dropped") == 0 ? 0 : 4;
      }),
      0);
}

TEST_F(BackgroundFilesTest, AForkedChildLeavesTheFileAlone) {
  BackgroundFiles files({});
  const size_t log = files.add(open_log(path_), path_);
  files.append(log, "parent");
  EXPECT_EQ(in_child([&] {
              const std::string message =
                  message_of([&] { files.append(log, "child"); });
              files.~BackgroundFiles();  // returns
              return message.find("before fork()") == std::string::npos;
            }),
            0);
  files.flush();
  EXPECT_EQ(read_file(path_), "parent");
}

}  // namespace
}  // namespace lockstep::internal
