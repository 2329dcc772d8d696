#include "lockstep/checkpoint/training_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "lockstep/base/current_call.h"
#include "lockstep/base/digest.h"
#include "lockstep/checkpoint/atomic_file.h"
#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/scheduler_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"

namespace lockstep {
namespace {

// The ranks that save or load together; this process alone if there is no
// group.
class Ranks {
 public:
  explicit Ranks(ProcessGroupPtr group) : group_(std::move(group)) {
    if (!group_ && is_initialized()) group_ = default_group();
  }
  size_t rank() const {
    return group_ ? static_cast<size_t>(group_->rank()) : 0;
  }
  size_t size() const {
    return group_ ? static_cast<size_t>(group_->size()) : 1;
  }

  // Returns every rank's `mine`, by rank; shape and dtype must be equal on all
  // ranks.
  std::vector<at::Tensor> gather(const at::Tensor& mine) const {
    if (size() == 1) return {mine};
    const at::Tensor sent = mine.to(group_->control_device());
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < size(); ++i) all.push_back(at::empty_like(sent));
    all_gather(all, sent, {.group = group_});
    for (at::Tensor& tensor : all) tensor = tensor.cpu();
    return all;
  }

  // Returns the `text` of rank `from`, on all ranks.
  std::string share(const std::string& text, size_t from) const {
    if (size() == 1) return text;
    const int source = group_->global_ranks().at(from);
    const c10::Device device = group_->control_device();
    at::Tensor length =
        at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
    broadcast(length, source, {.group = group_});
    at::Tensor bytes = at::zeros({length.item<int64_t>()}, at::kByte);
    if (rank() == from) {
      std::memcpy(bytes.data_ptr(), text.data(), text.size());
    }
    if (bytes.numel() == 0) return "";
    bytes = bytes.to(device);
    broadcast(bytes, source, {.group = group_});
    bytes = bytes.cpu();
    return {static_cast<const char*>(bytes.data_ptr()),
            static_cast<size_t>(bytes.numel())};
  }

 private:
  ProcessGroupPtr group_;
};

std::string words_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown error";
  }
}

at::Tensor generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// Returns the state that `rank` of `size` takes from a snapshot; none if the
// rank keeps its own.
std::optional<at::Tensor> generator_state_for(const Snapshot& snapshot,
                                              size_t rank, size_t size) {
  const auto& saved = snapshot.generator_states;
  if (saved.empty()) return std::nullopt;
  // The states are tried on a generator of our own, so that a wrong state is
  // refused before anything is changed.
  at::Generator trial = at::detail::createCPUGenerator(0);
  if (saved.size() == size) {
    at::Tensor state = saved[rank].contiguous();
    trial.set_state(state);
    return state;
  }
  const at::Tensor first = saved[0].contiguous();
  internal::Digest seed;
  seed.add({static_cast<const char*>(first.data_ptr()), first.nbytes()});
  seed.add(uint64_t{rank});
  trial.set_current_seed(seed.value());
  return trial.get_state();
}

void require_optimizer(const TrainingState& state) {
  if (!state.scheduler || state.optimizer) return;
  throw std::invalid_argument(
      "TrainingState.scheduler is set, but TrainingState.optimizer is not; set "
      "both, because the learning rates are in the optimizer");
}

struct Loaded {
  enum Outcome : int64_t { kMissing, kReady, kFailed };

  Outcome outcome = kFailed;
  Snapshot snapshot;
  std::unique_ptr<internal::OptimizerLoad> optimizer;
  std::function<void()> scheduler;
  std::optional<at::Tensor> generator;
  std::exception_ptr failure;
};

// Does everything that can fail on this rank alone.
Loaded prepare(const std::string& path, const TrainingState& state,
               const Ranks& ranks, bool will_save) {
  Loaded loaded;
  try {
    if (will_save && ranks.rank() == 0) internal::check_can_save(path);
    if (will_save && state.optimizer)
      internal::require_state_dict(*state.optimizer);
    require_optimizer(state);
    try {
      loaded.snapshot = load_snapshot_file(path);
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::no_such_file_or_directory) throw;
      loaded.outcome = Loaded::kMissing;
      return loaded;
    }
    if (!state.model) {
      throw std::invalid_argument("TrainingState.model is not set");
    }
    try {
      internal::check_state_dict(*state.model, loaded.snapshot.model_state);
      if (state.optimizer && loaded.snapshot.optimizer_state) {
        loaded.optimizer = std::make_unique<internal::OptimizerLoad>(
            *state.optimizer, *loaded.snapshot.optimizer_state);
      }
      if (state.scheduler && loaded.snapshot.scheduler_state) {
        loaded.scheduler = state.scheduler->prepare_load(
            internal::scheduler_state_of(loaded.snapshot));
      }
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(path + ": " + error.what());
    }
    try {
      loaded.generator =
          generator_state_for(loaded.snapshot, ranks.rank(), ranks.size());
    } catch (const c10::Error&) {
      throw SnapshotError(path,
                          "holds a generator state that is not one of "
                          "LibTorch's CPU generator");
    }
    loaded.outcome = Loaded::kReady;
  } catch (...) {
    loaded.failure = std::current_exception();
  }
  return loaded;
}

std::string list_of(const std::vector<size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return text;
}

// Throws on every rank unless all ranks have the same file, or none has one.
void agree(const std::string& path, const Loaded& mine, const Ranks& ranks) {
  int64_t digest = 0;
  std::memcpy(&digest, &mine.snapshot.digest, sizeof digest);
  const auto all = ranks.gather(
      at::tensor({static_cast<int64_t>(mine.outcome), digest}, at::kLong));
  std::vector<size_t> failed;
  std::vector<size_t> missing;
  std::vector<size_t> ready;
  std::vector<size_t> different;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto* pair = all[rank].const_data_ptr<int64_t>();
    auto& list = pair[0] == Loaded::kFailed    ? failed
                 : pair[0] == Loaded::kMissing ? missing
                                               : ready;
    list.push_back(rank);
    if (pair[1] != all[0].const_data_ptr<int64_t>()[1]) {
      different.push_back(rank);
    }
  }
  if (!failed.empty()) {
    const std::string words =
        ranks.share(mine.failure ? words_of(mine.failure) : "", failed.front());
    if (mine.failure) std::rethrow_exception(mine.failure);
    throw SnapshotError(
        path, "was loaded by no rank: " + list_of(failed) + ": " + words, "");
  }
  const std::string advice =
      "copy one file to the hosts of all ranks, or name a path that they share";
  if (!missing.empty() && !ready.empty()) {
    throw SnapshotError(path,
                        "is missing on " + list_of(missing) + " of " +
                            std::to_string(ranks.size()),
                        advice);
  }
  if (!different.empty()) {
    throw SnapshotError(
        path, "is not the same file on " + list_of(different) + " as on rank 0",
        advice);
  }
}

}  // namespace

void save_snapshot(const std::string& path, const TrainingState& state,
                   const SnapshotOptions& options) {
  const internal::UserFunction function("save_snapshot()");
  const Ranks ranks(options.group);
  const auto generators = ranks.gather(generator_state());
  std::exception_ptr failure;
  if (ranks.rank() == 0) {
    try {
      if (!state.model) {
        throw std::invalid_argument("TrainingState.model is not set");
      }
      require_optimizer(state);
      Snapshot snapshot;
      snapshot.model_state = state_dict(*state.model);
      if (state.optimizer) {
        snapshot.optimizer_state = state_dict(*state.optimizer);
      }
      if (state.scheduler) {
        internal::set_scheduler_state(snapshot, state.scheduler->state_dict());
      }
      snapshot.epochs_run = state.epochs_run;
      snapshot.step = state.step;
      snapshot.sampler_state = state.sampler_state;
      snapshot.generator_states = generators;
      snapshot.metadata = state.metadata;
      save_snapshot_file(path, snapshot);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  // This collective also tells the other ranks that the file is written: no
  // rank returns before that.
  const std::string words = ranks.share(failure ? words_of(failure) : "", 0);
  if (failure) std::rethrow_exception(failure);
  if (!words.empty()) {
    throw SnapshotError(path, "was not written by rank 0: " + words, "");
  }
}

bool load_snapshot(const std::string& path, TrainingState& state,
                   const LoadSnapshotOptions& options) {
  const internal::UserFunction function("load_snapshot()");
  const Ranks ranks(options.group);
  const Loaded loaded = prepare(path, state, ranks, options.will_save);
  agree(path, loaded, ranks);
  if (loaded.outcome == Loaded::kMissing) return false;
  load_state_dict(*state.model, loaded.snapshot.model_state);
  if (loaded.optimizer) loaded.optimizer->apply();
  if (loaded.scheduler) loaded.scheduler();
  if (loaded.generator) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*loaded.generator);
  }
  state.epochs_run = loaded.snapshot.epochs_run;
  state.step = loaded.snapshot.step;
  state.sampler_state = loaded.snapshot.sampler_state;
  state.metadata = loaded.snapshot.metadata;
  return true;
}

}  // namespace lockstep
