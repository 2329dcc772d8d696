// The parts that programs of ranks that heal share.
#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/lockstep.h"

#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/state_transfer.h"
#include "lockstep/checkpoint/tensor_bytes.h"

namespace lockstep::internal::testing {

class Kills {
 public:
  Kills(std::filesystem::path folder, const std::string& list)
      : folder_(std::move(folder)) {
    std::istringstream all(list);
    for (std::string one; std::getline(all, one, ',');) list_.push_back(one);
  }

  // Kills this process if the list says so and it has not been done.
  void at(int64_t step, const std::string& moment) const {
    const std::string here =
        std::to_string(get_rank()) + "@" + std::to_string(step) + ":" + moment;
    for (size_t i = 0; i < list_.size(); ++i) {
      if (list_[i] != here) continue;
      const auto mark = folder_ / ("killed-" + std::to_string(i));
      if (std::filesystem::exists(mark)) continue;
      std::ofstream(mark) << getpid();
      if (moment == "exits") std::exit(0);
      if (moment == "leaves") ::_exit(0);
      // The kernel then ends the agent's workers.
      if (moment.starts_with("agent") || moment == "end") {
        ::kill(::getppid(), SIGKILL);
      }
      if (moment == "throws") throw std::runtime_error("a mistake of the user");
      if (moment == "node") return stop_node();
      if (moment == "lingers") {
        return std::this_thread::sleep_for(std::chrono::minutes(5));
      }
      ::raise(moment.starts_with("stop") ? SIGSTOP : SIGKILL);
    }
  }

 private:
  // As if the host had no power: nothing of it says anything or is closed.
  static void stop_node() {
    const std::string agent = std::to_string(::getppid());
    std::ifstream workers("/proc/" + agent + "/task/" + agent + "/children");
    ::kill(::getppid(), SIGSTOP);
    for (pid_t one; workers >> one;) {
      if (one != ::getpid()) ::kill(one, SIGSTOP);
    }
    ::raise(SIGSTOP);
  }

  std::filesystem::path folder_;
  std::vector<std::string> list_{};
};

inline std::string checksum(const at::Tensor& tensor) {
  const auto bytes = file_form(tensor);
  return hex_of(xxh3(bytes.data_ptr(), bytes.nbytes()));
}

// Returns how many descriptors and how much mapped shared memory this process
// has. The kernel joins neighbouring mappings, so their number says nothing.
inline std::string held() {
  const auto all = std::filesystem::directory_iterator("/proc/self/fd");
  std::ifstream maps("/proc/self/maps");
  size_t shared = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") == line.npos) continue;
    const size_t end = line.find('-') + 1;
    shared += std::stoull(line.substr(end), nullptr, 16) -
              std::stoull(line, nullptr, 16);
  }
  return std::to_string(std::distance(begin(all), end(all))) +
         " descriptors, " + std::to_string(shared) +
         " bytes of shared mappings";
}

inline void write_result(const std::filesystem::path& path,
                         const TrainingState& state,
                         const HealedTraining& training) {
  std::ostringstream all;
  const auto snapshot = snapshot_of_training(state, /*objects=*/true);
  all << "step " << snapshot.step << ", epochs " << snapshot.epochs_run << "\n";
  for (const auto& [name, tensor] : snapshot.model_state) {
    all << name << " " << checksum(tensor) << "\n";
  }
  for (const auto& [number, values] : snapshot.optimizer_state->state) {
    for (const auto& [name, value] : values) {
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        all << number << "." << name << " " << checksum(*tensor) << "\n";
      }
    }
  }
  for (const auto& group : state.optimizer->param_groups()) {
    all << "lr " << group.options().get_lr() << "\n";
  }
  for (const auto& [name, item] : snapshot.items) {
    for (const auto& [key, tensor] : item.tensors) {
      all << name << "." << key << " " << checksum(tensor) << "\n";
    }
  }
  all << "generator " << checksum(generator_state(state.model.get())) << "\n";
  std::ofstream(path) << all.str();
  std::ofstream(path.string() + ".healings") << training.healings().size();
  std::ofstream(path.string() + ".held") << held();
}

}  // namespace lockstep::internal::testing
