#include "lockstep/worker/error_file.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class ErrorFile : public ::testing::Test {
 protected:
  ErrorFile() {
    auto pattern =
        (fs::temp_directory_path() / "lockstep_test_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw_errno("mkdtemp");
    folder_ = pattern;
    file_ = folder_ / "error.json";
    ::setenv("TORCHELASTIC_ERROR_FILE", file_.c_str(), 1);
    forget_failure();
  }
  ~ErrorFile() override {
    forget_failure();
    ::unsetenv("TORCHELASTIC_ERROR_FILE");
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  json written() const {
    std::ifstream file(file_);
    return json::parse(file);
  }
  std::string message() const {
    return written().at("message").at("message").get<std::string>();
  }
  std::string kind() const {
    return written()
        .at("message")
        .at("extraInfo")
        .at("kind")
        .get<std::string>();
  }

  fs::path folder_;
  fs::path file_;
};

TEST_F(ErrorFile, AnEchoIsKnownInTheProcess) {
  EXPECT_EQ(noted_echo(), "");
  note_failure(FailureKind::echo, "rank 1 died");
  EXPECT_EQ(noted_echo(), "rank 1 died");
  forget_failure();
  EXPECT_EQ(noted_echo(), "");
  note_failure(FailureKind::cause, "no such file");
  EXPECT_EQ(noted_echo(), "");
}

TEST_F(ErrorFile, HasTheFormThatTorchrunReads) {
  const auto seconds = [] {
    return std::chrono::floor<std::chrono::seconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  };
  const auto before = seconds();
  note_failure(FailureKind::cause, "it \"broke\" \\ in\ntwo \xc3\xa4\xff\x01");
  const auto document = written();
  EXPECT_EQ(message(), "it \"broke\" \\ in\ntwo \xc3\xa4\xef\xbf\xbd\x01");
  const auto& extra = document.at("message").at("extraInfo");
  // torchrun prints py_callstack, so it must hold the message.
  EXPECT_EQ(extra.at("py_callstack"), document.at("message").at("message"));
  // The timestamp must be an integer; otherwise torchrun itself fails.
  const auto time = extra.at("timestamp").get<std::string>();
  EXPECT_EQ(time.find_first_not_of("0123456789"), time.npos);
  EXPECT_GE(std::stoll(time), before);
  EXPECT_LE(std::stoll(time), seconds());
  EXPECT_EQ(extra.at("time_ns").get<std::string>().substr(0, time.size()),
            time);
  EXPECT_EQ(kind(), "cause");
}

// The launcher reads 1 MiB of the file.
TEST_F(ErrorFile, OfALongMessageTheBeginIsKept) {
  note_failure(FailureKind::cause, "it broke" + std::string(3 << 20, '\x01'));
  EXPECT_EQ(message().substr(0, 9), "it broke\x01");
  EXPECT_EQ(message().substr(message().size() - 5), "\x01 ...");
  EXPECT_LT(fs::file_size(file_), size_t{1} << 20);
}

TEST_F(ErrorFile, TheFirstFailureCounts) {
  note_failure(FailureKind::echo, "rank 3 died");
  note_failure(FailureKind::cause, "training failed");
  EXPECT_EQ(message(), "rank 3 died");
  EXPECT_EQ(kind(), "echo");
  forget_failure();
  EXPECT_FALSE(fs::exists(file_));
  note_failure(FailureKind::cause, "of the next world");
  EXPECT_EQ(message(), "of the next world");
}

TEST_F(ErrorFile, WordsReplaceACauseWithoutWords) {
  note_failure(FailureKind::cause_without_words, "an exception");
  EXPECT_EQ(kind(), "cause");
  note_failure(FailureKind::cause_without_words, "another exception");
  EXPECT_EQ(message(), "an exception");
  note_failure(FailureKind::cause, "no such file");
  EXPECT_EQ(message(), "no such file");
}

TEST_F(ErrorFile, WithoutTheVariableThereIsNone) {
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  note_failure(FailureKind::cause, "it broke");
  EXPECT_TRUE(fs::is_empty(folder_));
}

// The child has inherited the variable, but its failure is not the rank's.
TEST_F(ErrorFile, ProcessForkedSinceLeavesItAlone) {
  note_failure(FailureKind::cause, "of the parent");
  const pid_t child = ::fork();
  if (child == 0) {
    forget_failure();
    note_failure(FailureKind::cause, "of the child");
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(message(), "of the parent");
}

}  // namespace
}  // namespace lockstep::internal
