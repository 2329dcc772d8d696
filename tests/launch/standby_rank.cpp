// One worker of standby_test.cpp: `standby_rank SCENARIO FOLDER`. It prints
//
//   early PID            before init_process_group()
//   rank R of N ...      after the first all_reduce, with what it was given
//
// and reduces until FOLDER holds a file "stop". Before the group:
//
//   train   does nothing else
//   early   asks for its local rank
//   ends    a standby process ends well
//   dies    a standby process appends a line to FOLDER/starts and fails
//   second  as above, but it goes on if it is the first one; others wait until
//           FOLDER holds a file "go"
//   absent  local rank 1, or a rank with LOCKSTEP_TEST_ABSENT, fails in attempt
//   0
//           once FOLDER holds a file "go"
//   lingers as above, and local rank 2 of that attempt ignores SIGTERM and ends
//           once FOLDER holds a file "seen"
//
// After the group, if the scenario is "slow": at SIGTERM a rank of attempt 0
// waits until a worker of attempt 1 has written its first line into its log
// file, but no longer than the launcher allows; then it appends "saw it" or
// "saw nothing" to FOLDER/ended, and ends. The line of a rank says how many
// have done so.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "none" : value;
}

std::filesystem::path folder_of_slow;

bool has_begun(const std::filesystem::path& logs) {
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(logs)) {
    if (entry.path().string().find("/attempt_1/") != std::string::npos &&
        entry.path().filename() == "stdout.log" &&
        std::filesystem::file_size(entry.path()) > 0) {
      return true;
    }
  }
  return false;
}

void end_slowly() {
  bool saw = false;
  for (int wait = 0; wait < 40 && !saw; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    saw = has_begun(folder_of_slow / "logs");
  }
  std::ofstream(folder_of_slow / "ended", std::ios::app)
      << (saw ? "saw it\n" : "saw nothing\n") << std::flush;
}

volatile std::sig_atomic_t ends = 0;

int ended_in(const std::filesystem::path& folder) {
  std::ifstream file(folder / "ended");
  int count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string scenario = argv[1];
  const std::filesystem::path folder = argv[2];
  const bool stands_by = std::getenv("LOCKSTEP_STANDBY") != nullptr;
  if (stands_by && scenario == "ends") return 0;
  if (stands_by && scenario == "dies") {
    std::ofstream(folder / "starts", std::ios::app) << "one\n";
    std::cerr << "no luck\n";
    return 3;
  }
  if (stands_by && scenario == "second") {
    std::ofstream(folder / "starts", std::ios::app) << getpid() << "\n";
    std::ifstream starts(folder / "starts");
    pid_t first = 0;
    starts >> first;
    while (first != getpid() && !std::filesystem::exists(folder / "go")) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  std::cout << "early " << getpid() << std::endl;
  if (scenario == "early") lockstep::get_local_rank();
  if ((scenario == "absent" || scenario == "lingers") &&
      variable("TORCHELASTIC_RESTART_COUNT") == "0") {
    const auto await_file = [&](const char* file) {
      while (!std::filesystem::exists(folder / file)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      return 7;
    };
    if (variable("LOCAL_RANK") == "1" ||
        variable("LOCKSTEP_TEST_ABSENT") != "none") {
      return await_file("go");
    }
    if (variable("LOCAL_RANK") == "2") {
      std::signal(SIGTERM, SIG_IGN);
      return await_file("seen");
    }
  }

  const auto group = lockstep::init_process_group();
  auto sum = at::full({1}, lockstep::get_rank() + 1);
  lockstep::all_reduce(sum);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(0, sizeof cpus, &cpus);
  std::string line = "rank " + std::to_string(lockstep::get_rank()) + " of " +
                     std::to_string(lockstep::get_world_size()) + " local " +
                     variable("LOCAL_RANK") + " restart " +
                     variable("TORCHELASTIC_RESTART_COUNT") + " stood by " +
                     std::to_string(stands_by) + " sum " +
                     std::to_string(sum.item<int64_t>()) + " threads " +
                     std::to_string(at::get_num_threads()) + " cpus " +
                     std::to_string(CPU_COUNT(&cpus)) + " mark " +
                     variable("LOCKSTEP_STANDBY") + " errors " +
                     variable("TORCHELASTIC_ERROR_FILE") + " pid " +
                     std::to_string(getpid()) + " ended " +
                     std::to_string(ended_in(folder));
  if (lockstep::get_rank() == 0 && isatty(STDIN_FILENO) == 0) {
    std::string word;
    if (std::filesystem::exists(folder / "reads") && std::cin >> word) {
      line += " input " + word;
    }
  }
  std::cout << line << std::endl;
  if (scenario == "slow" && variable("TORCHELASTIC_RESTART_COUNT") == "0") {
    folder_of_slow = folder;
    std::signal(SIGTERM, [](int) { ends = 1; });
    while (ends == 0) usleep(5000);
    end_slowly();
    _exit(0);
  }
  auto stop = at::zeros({1});
  while (stop.item<double>() == 0) {
    stop.fill_(std::filesystem::exists(folder / "stop") ? 1 : 0);
    lockstep::all_reduce(stop);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return 0;
}
