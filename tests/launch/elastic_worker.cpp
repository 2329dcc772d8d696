// A worker that tells its agent of snapshots, as a program of Lockstep does.
//
//   elastic_worker FOLDER
//
// It prints its place; when there is a file FOLDER/save it has written a
// snapshot; when there is a file FOLDER/end it ends well. At SIGTERM it prints
// "saved" and ends.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "lockstep/worker/status_publisher.h"
#include "lockstep/worker/training_counters.h"

namespace {
volatile std::sig_atomic_t stopped = 0;
}  // namespace

int main(int argc, char** argv) {
  using namespace lockstep::internal;
  if (argc != 2) return 2;
  const std::filesystem::path folder = argv[1];
  std::signal(SIGTERM, [](int) { stopped = 1; });
  const StatusPublisher publisher(std::atoi(std::getenv("RANK")));
  std::printf("place %s of %s \n", std::getenv("GROUP_RANK"),
              std::getenv("GROUP_WORLD_SIZE"));
  std::fflush(stdout);
  bool has_saved = false;
  while (!std::filesystem::exists(folder / "end")) {
    if (stopped) {
      std::puts("saved");
      return 0;
    }
    if (!has_saved && std::filesystem::exists(folder / "save")) {
      TrainingCounters::instance().count_snapshot();
      has_saved = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return 0;
}
