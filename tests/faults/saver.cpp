// One rank of a job that saves in a folder of snapshots, in which a rank is
// killed: `faults_saver SCENARIO BACKEND [NAME=N]`, with the environment of a
// rank and the folder in LOCKSTEP_TEST_FOLDER. It prints and ends as described
// in rank.cpp; it also prints
//
//   saved R STEP           a save has ended
//   harm R                 it will be killed before the next call to the system
//   loaded R STEP SKIPPED  what load_snapshot() has found
//
// Scenarios:
//
//   kill  saves step 1, then step 2, in which the rank `odd` is killed before
//         the first call that begins with LOCKSTEP_TEST_CALL, which has the
//         name of the call and of the file; with `keep_last` = 1
//   load  loads, and saves one step more
//   background  saves step 1, and begins to save step 2 in the background; then
//         the rank `odd` is killed, and the others wait for the save
//   missing  saves a file in the background where there is no folder
//
// All parameters of a snapshot hold its step.

#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>

#include "lockstep/checkpoint/sharded/sharded_save.h"
#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/init.h"
#include "lockstep/optim/adam.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/faults/rank_report.h"

namespace lockstep::internal::testing {
namespace {

struct SavedNet : torch::nn::Module {
  SavedNet() {
    large = register_parameter("large", torch::zeros({100, 200}));
    small = register_parameter("small", torch::zeros({3}));
  }
  at::Tensor large, small;
};

class Saving {
 public:
  // Every rank has the same gradients.
  void step() {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net_->parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
    optimizer_.step();
    state_.step += 1;
    for (auto& parameter : net_->parameters()) {
      parameter.fill_(static_cast<double>(state_.step));
    }
  }

  void save(SaveFiles& files) {
    const Ranks ranks(nullptr);
    ShardedSave save(folder(), state_, {.keep_last = 1}, ranks, files);
    save.write();
    save.commit(ranks);
    say("saved", std::to_string(state_.step));
  }

  void save_in_background(bool is_killed) {
    SnapshotSaver saver(folder(), state_, {.keep_last = 1});
    saver.save();
    if (is_killed) {
      say("harm");
      ::raise(SIGKILL);
    }
    saver.wait();
    saver.finish();
  }

  void save_without_a_folder() {
    const TrainingState state{.model = net_};
    SnapshotSaver saver(folder() + "missing/file.pt", state,
                        {.on_saved = [](const SavedSnapshot&) {}});
    saver.finish();
  }

  void load() {
    const LoadedSnapshot loaded = load_snapshot(folder(), state_);
    for (const auto& parameter : net_->parameters()) {
      if (parameter.ne(static_cast<double>(state_.step)).any().item<bool>()) {
        throw std::logic_error("a parameter is not that of the snapshot");
      }
    }
    optimizer_.consolidate_state_dict();
    if (get_rank() == 0) {
      for (const auto& [number, values] : optimizer_.state_dict().state) {
        const auto& steps = std::get<at::Tensor>(values.at("step"));
        if (steps.item<double>() != static_cast<double>(state_.step)) {
          throw std::logic_error("the optimizer is not that of the snapshot");
        }
      }
    }
    say("loaded", std::to_string(state_.step) + " " +
                      std::to_string(loaded.skipped.size()));
  }

 private:
  static std::string folder() {
    return std::string(std::getenv("LOCKSTEP_TEST_FOLDER")) + "/";
  }

  std::shared_ptr<SavedNet> net_ = std::make_shared<SavedNet>();
  ZeroRedundancyOptimizer<lockstep::optim::Adam> optimizer_{net_->parameters()};
  TrainingState state_{.model = net_, .optimizer = &optimizer_};
};

class KilledFiles : public SaveFiles {
  void before(const char* call, const std::string& path) override {
    const std::string text = std::string(call) + " " +
                             std::filesystem::path(path).filename().string();
    if (!text.starts_with(std::getenv("LOCKSTEP_TEST_CALL"))) return;
    say("harm");
    ::raise(SIGKILL);
  }
};

}  // namespace

int run(const std::string& scenario, const std::string& backend,
        const Arguments& given) {
  const auto group =
      init_process_group(backend, {.timeout = std::chrono::minutes(5)});
  try {
    Saving saving;
    SaveFiles files;
    if (scenario == "load") {
      saving.load();
      saving.step();
      saving.save(files);
      return 0;
    }
    if (scenario == "missing") saving.save_without_a_folder();
    saving.step();
    saving.save(files);
    saving.step();
    const bool is_odd = own_rank() == given.get("odd");
    if (scenario == "background") {
      saving.save_in_background(is_odd);
    } else if (is_odd) {
      KilledFiles killed;
      saving.save(killed);
    } else {
      saving.save(files);
    }
  } catch (const std::exception& error) {
    say("failed", one_line(error));
    return 1;
  }
  return 0;
}

}  // namespace lockstep::internal::testing
