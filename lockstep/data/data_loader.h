#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>
#include <torch/data/transforms/stack.h>

#include <chrono>
#include <concepts>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/ordered_prefetch.h"
#include "lockstep/data/sampler.h"

namespace lockstep {

// The arguments of torch.utils.data.DataLoader that have a meaning here, with
// the same names and defaults (PyTorch documentation).
struct DataLoaderOptions {
  // ---- Behaviour ----

  // Samples in each batch, on this rank. Default: 1.
  int64_t batch_size{1};

  // Whether to leave out a last batch that would be smaller. Set it to true if
  // the model needs batches of one size. Default: false.
  bool drop_last{false};

  // ---- Performance ----

  // Threads that fetch batches ahead. 0: the thread of the loop fetches each
  // batch when the loop asks for it. Raise it if the loop waits for data;
  // get_batch() must then allow calls from several threads. Default: 0.
  int64_t num_workers{0};

  // Batches fetched ahead for each worker, so num_workers * prefetch_factor in
  // all. They take up this rank's memory. Raise it if the time to fetch a batch
  // varies much. Default: 2.
  int64_t prefetch_factor{2};

  // ---- Debugging ----

  // The longest time that the loop waits for one batch from the workers; then
  // it throws std::runtime_error. Set it if the dataset may get stuck. More
  // than 0, and only with workers. Default: none, which is no limit.
  std::optional<std::chrono::milliseconds> timeout{};
};

namespace internal {

// Throws std::invalid_argument if `options` are out of range, or if `sampler`
// visits more than `dataset_size` samples (-1: the dataset does not know its
// size).
void check_loader(const DataLoaderOptions& options, const Sampler& sampler,
                  int64_t dataset_size);

[[noreturn]] void throw_timeout(const DataLoaderOptions& options,
                                int64_t batch);

int64_t batches(int64_t samples, const DataLoaderOptions& options);

// LibTorch's samplers are refused: they know neither the ranks (each rank would
// train on everything, or on what its own seed gives) nor how far the loop has
// come.
template <class Other>
Sampler& refuse_sampler() {
  static_assert(
      std::is_base_of_v<Sampler, Other>,
      "lockstep::DataLoader takes a lockstep::Sampler. Instead of LibTorch's "
      "RandomSampler or DistributedRandomSampler use "
      "lockstep::DistributedSampler(dataset_size), which works with one "
      "process too; instead of SequentialSampler or "
      "DistributedSequentialSampler give it {.shuffle = false}; for an order "
      "of your own derive from lockstep::Sampler.");
  std::terminate();
}

// Makes one batch of a list of samples, as Python's default_collate does.
template <class Batch>
Batch collate(Batch batch) {
  return batch;
}
template <class Target>
torch::data::Example<at::Tensor, Target> collate(
    std::vector<torch::data::Example<at::Tensor, Target>> samples) {
  using Sample = torch::data::Example<at::Tensor, Target>;
  return torch::data::transforms::Stack<Sample>().apply_batch(
      std::move(samples));
}

}  // namespace internal

// Loops over a dataset in batches, as torch.utils.data.DataLoader does:
//
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//   for (auto& batch : loader) train(batch.data, batch.target);
//
// Dataset: any class with `get_batch(c10::ArrayRef<size_t>)` and a `size()`
// that is an optional or converts to one: LibTorch's datasets (also with
// `.map(...)`), TensorDataset, or a class of your own. A batch is what
// get_batch() returns, except that a vector of torch::data::Example is stacked
// into one Example ([B, ...] each), as Python's default_collate does.
//
// Sampler: DistributedSampler, or a class of your own; not LibTorch's.
//
// The loader *refers to* dataset and sampler, never copies them, and both must
// outlive it: what the program tells the sampler (set_epoch, load_state_dict)
// reaches the next loop. The sampler counts a batch as consumed when the loop
// receives it. Batches and their order do not depend on num_workers.
//
// Leaving the loop early (break, return, an exception) ends the workers, after
// waiting for the batches that are being fetched; the next loop is a new pass.
// Only one loop may run: a second begin() while the iterator of the first lives
// throws std::logic_error.
//
// Errors: what the dataset throws for a batch is rethrown in the loop when that
// batch is due, with any number of workers. std::runtime_error if the timeout
// is over.
//
// Threads: loader and loop belong to one thread. With num_workers == 1,
// get_batch() runs in another thread than the loop; with more, several threads
// call it at once, which the dataset must allow.
//
// This class does not use torch::data::make_data_loader, because that
// function's loader owns a moved copy of the sampler (pytorch issue 73141),
// draws from it ahead of the loop, and refuses to begin another loop after a
// loop with workers was left early.
template <class Dataset>
class DataLoader {
 public:
  using Batch = decltype(internal::collate(std::declval<Dataset&>().get_batch(
      std::declval<c10::ArrayRef<size_t>>())));

  class Iterator;

  // Throws std::invalid_argument if an option is out of range, or the sampler
  // was made for more samples than the dataset has.
  DataLoader(Dataset& dataset, Sampler& sampler, DataLoaderOptions options = {})
      : dataset_(dataset), sampler_(sampler), options_(options) {
    std::optional<size_t> size = dataset.size();
    internal::check_loader(options, sampler,
                           size ? static_cast<int64_t>(*size) : -1);
  }

  // Does not compile: LibTorch's samplers are not Samplers.
  template <class Other>
    requires(!std::derived_from<Other, Sampler>)
  DataLoader(Dataset& dataset, Other&, DataLoaderOptions = {})
      : DataLoader(dataset, internal::refuse_sampler<Other>()) {}

  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // Starts a pass of the sampler, and blocks until the first batch is ready.
  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

  // Returns the number of batches in a whole pass on this rank: Python's len().
  // A resumed pass has only the remaining ones.
  int64_t size() const { return internal::batches(sampler_.size(), options_); }

  const DataLoaderOptions& options() const { return options_; }

 private:
  struct Pass;

  Dataset& dataset_;
  Sampler& sampler_;
  DataLoaderOptions options_;
  bool looping_ = false;
};

// One pass: the indices that it visits, how far it has come, and its workers.
template <class Dataset>
struct DataLoader<Dataset>::Pass {
  explicit Pass(DataLoader& owner) : loader(owner) {
    if (loader.looping_) {
      throw std::logic_error(
          "DataLoader: a loop over this loader is still running; leave it "
          "first, or make a second loader with a sampler of its own");
    }
    const DataLoaderOptions& options = loader.options_;
    indices = loader.sampler_.begin_pass();
    count = internal::batches(static_cast<int64_t>(indices.size()), options);
    if (options.num_workers > 0) {
      prefetch.emplace(count, options.num_workers,
                       options.num_workers * options.prefetch_factor,
                       [this](int64_t index) { return fetch(index); });
    }
    loader.looping_ = true;
  }
  ~Pass() { loader.looping_ = false; }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  // The workers call this, so it reads only what no longer changes.
  Batch fetch(int64_t index) const {
    const auto batch_size = static_cast<size_t>(loader.options_.batch_size);
    const size_t first = static_cast<size_t>(index) * batch_size;
    const size_t size = std::min(batch_size, indices.size() - first);
    return internal::collate(loader.dataset_.get_batch(
        c10::ArrayRef<size_t>(indices.data() + first, size)));
  }

  void advance() {
    current.reset();  // before making the next: one batch less in memory
    if (delivered == count) {
      done = true;
      return;
    }
    if (prefetch) {
      current = prefetch->next(loader.options_.timeout);
      if (!current) internal::throw_timeout(loader.options_, delivered);
    } else {
      current.emplace(fetch(delivered));
    }
    ++delivered;
    loader.sampler_.consumed(loader.options_.batch_size);
  }

  DataLoader& loader;
  std::vector<size_t> indices;
  int64_t count = 0;
  int64_t delivered = 0;
  bool done = false;
  std::optional<Batch> current;
  // Declared last, so that its threads end before what they read is destroyed.
  std::optional<internal::OrderedPrefetch<Batch>> prefetch;
};

// A move-only input iterator that owns its pass. The batch belongs to the
// iterator: it may be changed or moved from, and is gone after the increment.
template <class Dataset>
class DataLoader<Dataset>::Iterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;

  Batch& operator*() const { return *pass_->current; }
  Batch* operator->() const { return &*pass_->current; }
  Iterator& operator++() {
    pass_->advance();
    return *this;
  }
  void operator++(int) { pass_->advance(); }
  bool operator==(std::default_sentinel_t) const { return pass_->done; }

 private:
  friend class DataLoader;
  explicit Iterator(DataLoader& loader)
      : pass_(std::make_unique<Pass>(loader)) {
    pass_->advance();
  }

  std::unique_ptr<Pass> pass_;
};

}  // namespace lockstep
