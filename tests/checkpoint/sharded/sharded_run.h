#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/sharded/sharded_save.h"
#include "lockstep/checkpoint/training_state.h"
#include "tests/checkpoint/sample_snapshot.h"

namespace lockstep::internal::testing {

// A small training whose parameters all hold the number of its snapshot.
struct ShardedRun {
  torch::nn::Sequential model{torch::nn::Linear(3, 2),
                              torch::nn::BatchNorm1d(2)};
  torch::optim::Adam optimizer{model->parameters()};
  TrainingState state{.model = model.ptr(), .optimizer = &optimizer};

  ShardedRun() { set(0); }

  // Lets model, optimizer and numbers be those of snapshot `number`.
  void set(int64_t number) {
    const torch::NoGradGuard no_grad;
    optimizer.zero_grad();
    for (auto& parameter : model->parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
    optimizer.state().clear();
    for (int64_t i = 0; i < number; ++i) optimizer.step();
    for (auto& parameter : model->parameters()) {
      parameter.fill_(static_cast<double>(number));
    }
    state.step = number;
    state.metadata["number"] = std::to_string(number);
  }

  // Returns the number of the snapshot that everything holds; -1 if they do not
  // agree.
  int64_t number() const {
    for (const auto& parameter : model->parameters()) {
      if (!parameter.eq(static_cast<double>(state.step)).all().item<bool>()) {
        return -1;
      }
      const auto found =
          optimizer.state().find(parameter.unsafeGetTensorImpl());
      const int64_t steps =
          found == optimizer.state().end()
              ? 0
              : static_cast<const torch::optim::AdamParamState&>(*found->second)
                    .step();
      if (steps != state.step) return -1;
    }
    return state.metadata.at("number") == std::to_string(state.step)
               ? state.step
               : -1;
  }
};

// Saves without ranks, and with the file operations of a test.
inline std::string save_with(SaveFiles& files, const std::string& folder,
                             const ShardedRun& run,
                             const SnapshotOptions& options = {}) {
  const Ranks alone(nullptr);
  ShardedSave save(folder, run.state, options, alone, files);
  save.write();
  return save.commit(alone);
}

// Returns the names in a folder, sorted.
inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace lockstep::internal::testing
