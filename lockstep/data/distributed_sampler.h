#pragma once

#include <map>
#include <optional>
#include <string>

#include "lockstep/data/sampler.h"

namespace lockstep {

// The arguments of torch.utils.data.distributed.DistributedSampler (PyTorch
// documentation), with the same defaults, and pad.
struct DistributedSamplerOptions {
  // ---- Behaviour ----

  // The number of parts that the dataset is split into, and the part of this
  // process. Most programs leave both. Default: none, which is world size and
  // rank of the default process group; 1 and 0 in a process that was started
  // alone and has no group.
  std::optional<int64_t> num_replicas{};
  std::optional<int64_t> rank{};

  // Whether every epoch has a new order; otherwise samples keep the dataset's
  // own order. Set it to false for evaluation. Default: true.
  bool shuffle{true};

  // Epoch e is shuffled by generator seed `seed + e`. Must be the same on all
  // ranks. Default: 0.
  int64_t seed{0};

  // If num_replicas does not divide the number of samples: leave out the end of
  // the order (true), or repeat samples from its start (false). Either way
  // every rank visits the same number of samples. Default: false.
  bool drop_last{false};

  // ---- Beyond Python ----

  // If false, and drop_last is false too, samples are neither repeated nor left
  // out, so that over all ranks each sample is visited exactly once. With
  // drop_last this option has no effect. Set it to false for evaluation. Ranks
  // then differ by up to one sample, and may differ by one batch: do not call a
  // collective inside the loop (the backward of DistributedDataParallel calls
  // some), but reduce sums and counts after it. Default: true.
  bool pad{true};
};

// Gives each rank its own part of a dataset. It follows
// torch.utils.data.distributed.DistributedSampler and gives the *same indices*
// as Python for the same arguments: the order comes from LibTorch's CPU
// generator, and rank r takes places r, r + num_replicas, ... of it.
//
//   DistributedSampler sampler(dataset.size().value(), {.seed = 0});
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& batch : loader) { ... }
//   }
//
// Position. The sampler knows how far the training loop has come in its epoch.
// Batches that the loop has received count, including the batch that it is
// working on; batches that the loader only fetched ahead do not. So a state
// that is taken in the loop's body after the optimizer's step continues with
// the next batch, and repeats or skips nothing. The position counts places of
// the *global* order: it is the same number on all ranks, so the state of rank
// 0 serves all of them, and another number of ranks may share the rest of the
// epoch.
class DistributedSampler : public Sampler {
 public:
  // Throws std::invalid_argument for a negative size, num_replicas < 1, and a
  // rank outside [0, num_replicas). Also throws it if a default is wanted in a
  // process that was launched as one of several (WORLD_SIZE > 1) but has no
  // group yet.
  explicit DistributedSampler(int64_t dataset_size,
                              const DistributedSamplerOptions& options = {});

  // Selects the order of the next pass. Call it before every epoch, but not
  // while a loop runs; without it every pass has the order of epoch 0. A new
  // epoch starts at its beginning; if `epoch` is the current epoch, a loaded
  // position is kept.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }

  // Returns this rank's indices of the whole epoch: what iterating Python's
  // sampler yields.
  std::vector<size_t> indices() const;

  // Returns this rank's indices from the loaded position on, if
  // load_state_dict() was called since the last pass; otherwise those of the
  // whole epoch.
  std::vector<size_t> begin_pass() override;
  void consumed(int64_t count) override;

  // Returns the number of this rank's samples in a whole epoch: Python's len().
  // Equal on all ranks unless `pad` is false.
  int64_t size() const override { return size_; }
  int64_t dataset_size() const override { return dataset_size_; }
  int64_t num_replicas() const { return num_replicas_; }
  int64_t rank() const { return rank_; }

  // Returns how many samples of the epoch all ranks together have consumed,
  // padding included. 0 before the first batch.
  int64_t position() const { return position_; }

  // Returns the entries epoch, seed, position, shuffle (0 or 1) and
  // dataset_size.
  std::map<std::string, int64_t> state_dict() const;

  // Takes over epoch, seed and position: the next pass begins at the first
  // sample that was not consumed, and is empty if all were. This sampler keeps
  // its own options for everything that the state does not hold; with the same
  // num_replicas and drop_last the rest of the epoch is exactly that of an
  // uninterrupted run. With another num_replicas the remaining samples are
  // split anew.
  //
  // An empty state, which a snapshot between two epochs holds, changes nothing:
  // the next epoch begins at its beginning.
  //
  // Throws std::invalid_argument, and changes nothing, if an entry is missing
  // or out of range, or if the state was saved with another dataset size or
  // another `shuffle`. Do not call it while a loop runs.
  void load_state_dict(const std::map<std::string, int64_t>& state);

 private:
  int64_t total_size(int64_t start) const;
  std::vector<size_t> indices_from(int64_t start) const;

  int64_t dataset_size_;
  int64_t num_replicas_ = 1;
  int64_t rank_ = 0;
  bool shuffle_;
  int64_t seed_;
  bool drop_last_;
  bool pad_;
  int64_t size_ = 0;

  int64_t epoch_ = 0;
  int64_t position_ = 0;
  // The place in the order at which the current pass ends; position_ stops
  // there.
  int64_t pass_end_ = 0;
  bool resume_ = false;
};

}  // namespace lockstep
