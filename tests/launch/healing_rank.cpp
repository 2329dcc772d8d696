// One worker of healing_test.cpp: `healing_rank SCENARIO FOLDER`. It says
// "heals" as a training does, but has no group. Then it prints
//
//   rank R pid P attempt A generation G memory M errors E
//
// where M is the number of the process that had the place before, as that one
// has left it in the memory of the place, or "none"; then, for each generation
// that is announced,
//
//   rank R pid P learns of generation G: CAUSE
//
// and the places that are left, if there are fewer, in a line of their own.
// It ends well when FOLDER holds a file "stop", and with the number in a file
// "exit-P". With a file "hang-P" it makes no progress any more.
//
//   heals    does nothing else
//   mute     rank 1 does not say "heals"
//   whole    the training cannot go on with fewer ranks, "for a reason"
//   fragile  a process that joins generation 1 fails before it says so
//   late     a standby process is on its way until FOLDER holds a file "go"
//   second   likewise, but the first one is not
//   ends     a standby process ends well
//   early    rank 0 has told of generation 1, of one rank, as one that has seen
//            the announcement before its agent has
//   slow     a process that takes a place says "heals" after two seconds, and
//            writes then, in clock ticks since the start of the system, into
//            FOLDER/joined-P
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/standby_place.h"
#include "lockstep/worker/status_publisher.h"
#include "lockstep/worker/worker_store_link.h"

namespace {

using namespace lockstep::internal;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "none" : value;
}

// Leaves `own` in the memory of the place, and returns what it held before.
std::string exchange_memory(const std::string& own) {
  static const FileDescriptor memory = take_place_memory();
  char before[32] = {};
  const ssize_t count = ::pread(memory.get(), before, sizeof before - 1, 0);
  if (::ftruncate(memory.get(), 0) != 0 ||
      ::pwrite(memory.get(), own.data(), own.size(), 0) < 0) {
    return "an error";
  }
  return count > 0 ? before : "none";
}

// Prints the generations that are announced after `last`.
void look_for_generations(WorkerStoreLink& store, int& last,
                          const std::string& who) {
  const auto deadline = Deadline::after(seconds(60));
  while (store.check({generation_key(last + 1)}, deadline)) {
    const auto cause = store.call({.operation = WorkerCall::Operation::get,
                                   .key = generation_key(++last)},
                                  deadline);
    std::cout << who + " learns of generation " + std::to_string(last) + ": " +
                     cause.text
              << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string scenario = argv[1];
  const std::filesystem::path folder = argv[2];
  if (stands_by()) {
    if (scenario == "ends") return 0;
    bool is_late = scenario == "late";
    if (scenario == "second") {
      is_late = std::filesystem::exists(folder / "first");
      std::ofstream(folder / "first") << "has come\n";
    }
    while (is_late && !std::filesystem::exists(folder / "go")) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    take_place();
  }
  if (!job_heals()) return 3;
  const std::string pid = std::to_string(::getpid());
  const std::string rank = variable("RANK");
  const std::string who = "rank " + rank + " pid " + pid;
  int generation = generation_joined();
  if (scenario == "fragile" && generation == 1) return 5;
  const StatusPublisher publisher(std::stoi(rank));
  if (scenario == "slow" && generation > 0) {
    std::this_thread::sleep_for(seconds(2));
    timespec now{};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    const long ticks = ::sysconf(_SC_CLK_TCK);
    std::ofstream(folder / ("joined-" + pid))
        << now.tv_sec * ticks + now.tv_nsec * ticks / 1'000'000'000;
  }
  if (scenario != "mute" || rank != "1") {
    tell_agent_heals(true, scenario == "whole" ? "for a reason" : "");
  }
  if (scenario == "early" && rank == "0") tell_agent_generation(1, 0, 1);
  std::cout << who + " attempt " + variable("TORCHELASTIC_RESTART_COUNT") +
                   " generation " + std::to_string(generation) + " memory " +
                   exchange_memory(pid) + " errors " +
                   variable("TORCHELASTIC_ERROR_FILE")
            << std::endl;

  WorkerStoreLink store(variable("LOCKSTEP_STORE"),
                        Deadline::after(seconds(10)));
  while (!std::filesystem::exists(folder / "stop")) {
    std::ifstream wanted(folder / ("exit-" + pid));
    if (int code = 0; wanted >> code) return code;
    if (variable("LOCKSTEP_PROGRESS_FILE") != "none" &&
        !std::filesystem::exists(folder / ("hang-" + pid))) {
      std::ofstream(variable("LOCKSTEP_PROGRESS_FILE")) << "on\n";
    }
    look_for_generations(store, generation, who);
    std::this_thread::sleep_for(milliseconds(10));
  }
  return 0;
}
