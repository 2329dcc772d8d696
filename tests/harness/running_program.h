#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/file_descriptor.h"

// For tests that start programs and look at their output, their end and what
// they leave. Does not link LibTorch.
namespace lockstep::internal::testing {

// How a program is started. It gets nothing of the test's own environment
// except PATH.
struct ProgramSetup {
  std::vector<std::string> environment{};  // NAME=value; the first one counts
  std::string input{};                     // stdin; empty means /dev/null
  std::filesystem::path folder{};          // to run in; empty means the test's
};

struct ProgramResult {
  int exit_code = -1;  // 128 + signal if a signal ended it
  std::string out{};
  std::string err{};
};

// One running program with its output in pipes. The destructor kills it if it
// has not ended.
class RunningProgram {
 public:
  // `command`: the program's path and its arguments.
  RunningProgram(const std::vector<std::string>& command,
                 const ProgramSetup& setup);
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;
  ~RunningProgram();

  pid_t pid() const { return pid_; }
  void signal(int signal) const;
  // Reads on until stdout holds `text` `times` times. The test fails after
  // `allowed`.
  void await_output(
      const std::string& text, int times = 1,
      std::chrono::milliseconds allowed = std::chrono::seconds(20)) {
    await_text(result_.out, text, times, allowed);
  }
  // The same for stderr, once.
  void await_error(const std::string& text, std::chrono::milliseconds allowed =
                                                std::chrono::seconds(20)) {
    await_text(result_.err, text, 1, allowed);
  }
  // Reads to the end of both streams and reaps the program. After `allowed` the
  // test fails and the program is killed.
  ProgramResult finish(std::chrono::seconds allowed = std::chrono::seconds(30));
  // Stops reading stdout, as a reader that goes away.
  void close_output() { out_.reset(); }
  const std::string& out() const { return result_.out; }
  const std::string& err() const { return result_.err; }

 private:
  void await_text(const std::string& stream, const std::string& text, int times,
                  std::chrono::milliseconds allowed);
  bool read_some(int timeout_ms);

  pid_t pid_ = -1;
  FileDescriptor out_;
  FileDescriptor err_;
  ProgramResult result_;
};

// A test that starts programs. After each test no process that descends from
// one, and no temporary file, may be left.
class ProgramTest : public ::testing::Test {
 protected:
  ProgramTest();
  ~ProgramTest() override;
  void TearDown() override;

  std::unique_ptr<RunningProgram> start_program(
      const std::vector<std::string>& command, ProgramSetup setup = {});
  ProgramResult run_program(
      const std::vector<std::string>& command, ProgramSetup setup = {},
      std::chrono::seconds allowed = std::chrono::seconds(30));

  // Sets a variable (NAME=value) of every program that is started from now on,
  // unless its setup has it.
  void set_for_all(std::string variable) {
    for_all_.push_back(std::move(variable));
  }

  // Returns the processes that carry this test's mark in their environment, and
  // also all of `variables` (NAME=value).
  std::vector<pid_t> marked_processes(
      const std::vector<std::string>& variables = {}) const;
  // Waits until there is no such process. Returns false after `allowed`.
  bool await_no_process(std::chrono::milliseconds allowed) const;

  // A folder for the test's own files; removed after the test.
  std::filesystem::path scratch() const { return root_ / "scratch"; }

 private:
  ProgramSetup complete(ProgramSetup setup) const;

  std::filesystem::path root_;
  std::string mark_;
  std::vector<std::string> for_all_{};
};

std::vector<std::string> lines(const std::string& text);
int count(const std::string& text, const std::string& part);
std::string read_file(const std::filesystem::path& path);

}  // namespace lockstep::internal::testing
