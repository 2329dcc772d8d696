#include "tests/harness/running_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

std::pair<FileDescriptor, FileDescriptor> make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const auto& text : strings) {
    result.push_back(const_cast<char*>(text.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

// Returns whether something was read.
bool append_from(FileDescriptor& fd, std::string& text) {
  char bytes[65536];
  const ssize_t count = read(fd.get(), bytes, sizeof(bytes));
  if (count > 0) {
    text.append(bytes, static_cast<size_t>(count));
    return true;
  }
  if (count == 0) fd.reset();
  return false;
}

}  // namespace

RunningProgram::RunningProgram(const std::vector<std::string>& command,
                               const ProgramSetup& setup) {
  auto [out, out_end] = make_pipe();
  auto [err, err_end] = make_pipe();
  auto [in_end, in] = make_pipe();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (setup.input.empty()) {
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  } else {
    posix_spawn_file_actions_adddup2(&actions, in_end.get(), 0);
  }
  posix_spawn_file_actions_adddup2(&actions, out_end.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, err_end.get(), 2);
  if (!setup.folder.empty()) {
    posix_spawn_file_actions_addchdir_np(&actions, setup.folder.c_str());
  }
  const char* program = command.at(0).c_str();
  const int error =
      posix_spawn(&pid_, program, &actions, nullptr, pointers(command).data(),
                  pointers(setup.environment).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    errno = error;
    throw_errno(program);
  }
  // The input fits into a pipe.
  [[maybe_unused]] auto written =
      write(in.get(), setup.input.data(), setup.input.size());
  out_ = std::move(out);
  err_ = std::move(err);
}

RunningProgram::~RunningProgram() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void RunningProgram::signal(int signal) const { ::kill(pid_, signal); }

bool RunningProgram::read_some(int timeout_ms) {
  pollfd entries[] = {{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}};
  if (poll(entries, 2, timeout_ms) <= 0) return false;
  bool any = false;
  if (entries[0].revents != 0) any |= append_from(out_, result_.out);
  if (entries[1].revents != 0) any |= append_from(err_, result_.err);
  return any;
}

void RunningProgram::await_text(const std::string& stream,
                                const std::string& text, int times,
                                milliseconds allowed) {
  const Deadline deadline = Deadline::after(allowed);
  while (count(stream, text) < times) {
    if (deadline.expired() || (!out_ && !err_)) {
      ADD_FAILURE() << "\"" << text << "\" did not come " << times
                    << " times; stdout:\n"
                    << result_.out << "stderr:\n"
                    << result_.err;
      return;
    }
    read_some(static_cast<int>(deadline.remaining().count()));
  }
}

ProgramResult RunningProgram::finish(std::chrono::seconds allowed) {
  const Deadline deadline = Deadline::after(allowed);
  while ((out_ || err_) && !deadline.expired()) {
    read_some(static_cast<int>(deadline.remaining().count()));
  }
  if (out_ || err_) {
    ADD_FAILURE() << "the program's output did not end within "
                  << allowed.count() << " s; stderr:\n"
                  << result_.err;
    ::kill(pid_, SIGKILL);
  }
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  result_.exit_code =
      WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result_;
}

ProgramTest::ProgramTest() {
  std::string name =
      (fs::temp_directory_path() / "lockstep_test_XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw_errno("mkdtemp");
  root_ = name;
  fs::create_directory(root_ / "tmp");
  fs::create_directory(scratch());
  mark_ = "LOCKSTEP_TEST_MARK=" + name;
}

ProgramTest::~ProgramTest() {
  for (const pid_t pid : marked_processes()) ::kill(pid, SIGKILL);
  std::error_code ignored;
  fs::remove_all(root_, ignored);
}

void ProgramTest::TearDown() {
  EXPECT_TRUE(await_no_process(milliseconds(1000)))
      << marked_processes().size() << " processes were left behind";
  for (const auto& left : fs::recursive_directory_iterator(root_ / "tmp")) {
    ADD_FAILURE() << "a temporary file was left: " << left.path();
  }
}

ProgramSetup ProgramTest::complete(ProgramSetup setup) const {
  const char* path = getenv("PATH");
  setup.environment.push_back(std::string("PATH=") +
                              (path != nullptr ? path : "/usr/bin:/bin"));
  setup.environment.push_back("TMPDIR=" + (root_ / "tmp").string());
  // Tests that fail on purpose leave flight records, which do not count as
  // leftovers.
  setup.environment.push_back("LOCKSTEP_FLIGHT_DIR=" +
                              (root_ / "flight").string());
  setup.environment.push_back(mark_);
  std::ranges::copy(for_all_, std::back_inserter(setup.environment));
  return setup;
}

std::unique_ptr<RunningProgram> ProgramTest::start_program(
    const std::vector<std::string>& command, ProgramSetup setup) {
  return std::make_unique<RunningProgram>(command, complete(std::move(setup)));
}

ProgramResult ProgramTest::run_program(const std::vector<std::string>& command,
                                       ProgramSetup setup,
                                       std::chrono::seconds allowed) {
  return start_program(command, std::move(setup))->finish(allowed);
}

std::vector<pid_t> ProgramTest::marked_processes(
    const std::vector<std::string>& variables) const {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    // A zombie's environment is empty.
    const std::string environment =
        std::string(1, '\0') + read_file(entry.path() / "environ");
    const auto holds = [&](const std::string& variable) {
      return environment.find('\0' + variable + '\0') != std::string::npos;
    };
    if (holds(mark_) && std::ranges::all_of(variables, holds)) {
      found.push_back(std::stoi(name));
    }
  }
  return found;
}

bool ProgramTest::await_no_process(milliseconds allowed) const {
  const Deadline deadline = Deadline::after(allowed);
  while (!marked_processes().empty()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return true;
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

int count(const std::string& text, const std::string& part) {
  int number = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + part.size())) {
    ++number;
  }
  return number;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace lockstep::internal::testing
