// One rank of a training with FullyShard whose ranks die and are replaced:
//
//   fsdp_reconfigure_rank FORM RANK SIZE FOLDER DEATHS
//
// FORM is one of interrupted_forms(). DEATHS, "2f1,3b0", says where ranks kill
// themselves, one after the other: rank 1 in a forward of step 2, then rank 0
// in a backward of step 3; "-" means nowhere. The test gives the place to a new
// process, with LOCKSTEP_GENERATION, and writes the generation into
// FOLDER/generation. Each rank writes FOLDER/result.RANK at the end.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/worker/healing_place.h"
#include "tests/parallel/fsdp/interrupted_training.h"

namespace lockstep::internal::testing {
namespace {

constexpr int kSteps = 6;
constexpr std::chrono::seconds kReplacedWithin{60};

std::vector<Interruption> deaths_of(const std::string& text) {
  std::vector<Interruption> deaths;
  std::istringstream all(text);
  for (std::string one; std::getline(all, one, ',');) {
    if (one.size() == 3) deaths.push_back({one[0] - '0', one[1], one[2] - '0'});
  }
  return deaths;
}

int announced(const std::filesystem::path& folder) {
  int number = 0;
  std::ifstream(folder / "generation") >> number;
  return number;
}

void run_rank(const std::string& form_name, int rank, int size,
              const std::filesystem::path& folder, const std::string& deaths) {
  const auto& form = interrupted_forms().at(form_name);
  take_host(form, rank, size);
  int generation = generation_joined();
  const auto store =
      c10::make_intrusive<c10d::FileStore>((folder / "store").string(), -1);
  const auto group =
      init_process_group(form.backend, {.timeout = kReplacedWithin,
                                        .world_size = size,
                                        .rank = rank,
                                        .store = store});
  at_moment = [&, all = deaths_of(deaths)](int step, char moment) {
    if (generation >= static_cast<int>(all.size())) return;
    const auto& death = all[generation];
    if (death.rank == rank && death.step == step && death.moment == moment) {
      ::kill(::getpid(), SIGKILL);
    }
  };
  InterruptedTraining training(form, folder / "records");
  const auto join = [&] {
    reconfigure({.uuid = std::to_string(generation), .store = store});
    training.resume();
  };
  if (generation > 0) join();
  while (true) {
    try {
      training.run(kSteps);
      break;
    } catch (const std::exception& error) {
      std::cerr << "rank " << rank << " failed: " << error.what() << std::endl;
    }
    const auto deadline = Deadline::after(kReplacedWithin);
    while (announced(folder) <= generation) {
      if (deadline.expired()) throw std::runtime_error("no rank was replaced");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ++generation;
    join();
  }
  std::ofstream(folder / ("result." + std::to_string(rank)))
      << training.result();
}

}  // namespace
}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  lockstep::internal::testing::run_rank(argv[1], std::stoi(argv[2]),
                                        std::stoi(argv[3]), argv[4], argv[5]);
  return 0;
}
