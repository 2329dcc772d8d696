#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::testing {

// How `lockstep` is started: nothing of the test's own environment but PATH.
struct LauncherSetup {
  std::vector<std::string> environment{};  // NAME=value
  std::string input{};                     // stdin; /dev/null where empty
};

struct LauncherResult {
  int exit_code = -1;  // 128 + signal where a signal ended it
  std::string out{};
  std::string err{};
};

// One running `lockstep` command with its output in pipes. Killed at the end
// of its life if it has not ended.
class Launcher {
 public:
  Launcher(const std::vector<std::string>& arguments,
           const LauncherSetup& setup);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher();

  pid_t pid() const { return pid_; }
  void signal(int signal) const;
  // Reads on until stdout holds `text` `times` times; a test failure after
  // 20 s.
  void await_output(const std::string& text, int times = 1);
  // Reads to the end of both streams and reaps; a test failure and SIGKILL
  // after `allowed`.
  LauncherResult finish(
      std::chrono::seconds allowed = std::chrono::seconds(30));
  // As a reader of stdout that goes away.
  void close_output() { out_.reset(); }
  const std::string& out() const { return result_.out; }

 private:
  bool read_some(int timeout_ms);

  pid_t pid_ = -1;
  FileDescriptor out_;
  FileDescriptor err_;
  LauncherResult result_;
};

// A test that starts launchers. Behind each test no process that descends from
// one, and no temporary file, may be left.
class LauncherTest : public ::testing::Test {
 protected:
  LauncherTest();
  ~LauncherTest() override;
  void TearDown() override;

  // Arguments after "lockstep run".
  LauncherResult run(const std::vector<std::string>& arguments,
                     LauncherSetup setup = {});
  // "lockstep run" and "sh -c script" behind the options.
  LauncherResult run_script(std::vector<std::string> options,
                            const std::string& script,
                            LauncherSetup setup = {});
  std::unique_ptr<Launcher> start(const std::vector<std::string>& arguments,
                                  LauncherSetup setup = {});
  std::unique_ptr<Launcher> start_script(std::vector<std::string> options,
                                         const std::string& script,
                                         LauncherSetup setup = {});
  // Any arguments behind "lockstep".
  LauncherResult run_command(const std::vector<std::string>& arguments,
                             LauncherSetup setup = {});

  // Processes that carry this test's mark in their environment.
  std::vector<pid_t> marked_processes() const;
  // Waits until there is none; false after `allowed`.
  bool await_no_process(std::chrono::milliseconds allowed) const;

  // For the test's own files; removed behind it.
  std::filesystem::path scratch() const { return root_ / "scratch"; }

 private:
  LauncherSetup complete(LauncherSetup setup) const;

  std::filesystem::path root_;
  std::string mark_;
};

std::vector<std::string> lines(const std::string& text);
int count(const std::string& text, const std::string& part);
std::string read_file(const std::filesystem::path& path);

}  // namespace lockstep::testing
