#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/batch_loop.h"
#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/collate.h"
#include "lockstep/data/data_loader_options.h"
#include "lockstep/data/sampler.h"

namespace lockstep {

// The exception of the loop over a DataLoader if the dataset, or the function
// that collates, has thrown. It says at which samples; the exception itself is
// nested:
//
//   try {
//     for (auto& batch : loader) { ... }
//   } catch (const lockstep::DataLoaderError& error) {
//     // error.what(): "DataLoader: the dataset failed at sample 9, in batch 2
//     // of this loop: cannot read b.png"
//     error.rethrow_nested();  // the exception that the dataset threw
//   }
class DataLoaderError : public std::runtime_error,
                        public std::nested_exception {
 public:
  // Nests the exception that is being handled.
  DataLoaderError(const std::string& what, int64_t batch,
                  std::vector<size_t> indices)
      : std::runtime_error(what), batch_(batch), indices_(std::move(indices)) {}

  // Returns the number of the batch in its loop, from 0.
  int64_t batch() const { return batch_; }

  // Returns the index of the sample that failed. If that is not known, because
  // the dataset has no get() or collating failed, these are the indices of all
  // samples in the batch.
  const std::vector<size_t>& indices() const { return indices_; }

 private:
  int64_t batch_;
  std::vector<size_t> indices_;
};

// Loops over a dataset in batches, as torch.utils.data.DataLoader does:
//
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//   for (auto& batch : loader) train(batch.data, batch.target);
//
// Dataset: any class with a `size()` that is an optional number or converts to
// one, and with one of these, of which the loader takes the first that there
// is:
//
//   get_batch(c10::ArrayRef<size_t>, c10::ArrayRef<SampleSeed>)
//   get(size_t, SampleSeed)
//   get_batch(c10::ArrayRef<size_t>)
//   get(size_t)
//
// So LibTorch's datasets (also with `.map(...)`), TensorDataset, or a class of
// your own. (A get_batch() that is inherited from an abstract class, as the one
// of torch::data::datasets::Dataset, does not count.)
//
// Batch: samples that get() returns, or get_batch() in a vector, are collated
// by default_collate() (lockstep/data/collate.h): tensors are stacked, pairs,
// tuples, maps and torch::data::Example become ones of stacked tensors. The
// fourth argument is a function that collates instead; it gets the vector of
// samples, or what get_batch() returned. If the dataset has whole batches only
// (get_batch() but no get()), they are what the loop gets, except that a vector
// of torch::data::Example is collated. Nothing is done for each sample then:
// TensorDataset makes a batch by one gather.
//
// Sampler: one of Lockstep's, or a class of your own that derives from Sampler
// or SamplerOfBatches; not LibTorch's.
//
// The loader *refers to* dataset and sampler, never copies them, and both must
// outlive it: what the program tells the sampler (set_epoch, load_state_dict)
// reaches the next loop. The sampler counts a batch as consumed when the loop
// receives it. Batches, their order and the seeds of samples do not depend on
// num_workers. Workers have the modes (Autocast, NoGradGuard, InferenceMode)
// that the loop's thread has when the loop begins.
//
// Workers are threads that start with the first loop and are kept until the
// loader is destroyed. Leaving a loop early (break, return, an exception) waits
// for the batches that are being fetched; the next loop is a new pass. Only one
// loop may run: a second begin() throws std::logic_error as long as the
// iterator of the first lives and is not at the end.
//
// Errors: if the dataset throws for a batch, or collating it fails, the loop
// throws DataLoaderError when that batch is due, with any number of workers.
// The error names the sample, and nests the exception. (If get_batch() throws,
// the loader calls get(), if there is one, to find the sample.)
// std::runtime_error if the timeout is over; then leaving the loop does not
// wait, but the loader's destructor waits until the dataset's calls have
// returned. std::runtime_error, too, in a child process that was forked after a
// loop with workers had begun.
//
// Threads: loader and loop belong to one thread. With num_workers == 1, the
// dataset and the collate function are called in another thread than the
// loop's; with more, by several threads at once, which they must allow.
//
// This class does not use torch::data::make_data_loader, because that
// function's loader owns a moved copy of the sampler (pytorch issue 73141),
// draws from it ahead of the loop, and refuses to begin another loop after a
// loop with workers was left early.
template <class Dataset, class Collate = DefaultCollate>
class DataLoader {
  using Loop = internal::BatchLoop<Dataset, Collate>;

 public:
  using Batch = typename Loop::Batch;

  class Iterator;

  // Throws std::invalid_argument if an option is out of range, if LibTorch does
  // not find the device, or if the sampler was made for a dataset of another
  // size (Sampler::dataset_size()). Warns, in one line with the numbers, if a
  // whole pass has no batches on this rank.
  DataLoader(Dataset& dataset, Sampler& sampler, DataLoaderOptions options = {},
             Collate collate = {})
      : loop_(dataset, &sampler, nullptr, options, std::move(collate)) {}

  // The same with a sampler that makes the batches. Throws
  // std::invalid_argument, too, if batch_size or drop_last is given.
  DataLoader(Dataset& dataset, SamplerOfBatches& sampler,
             DataLoaderOptions options = {}, Collate collate = {})
      : loop_(dataset, nullptr, &sampler, options, std::move(collate)) {}

  // Does not compile: LibTorch's samplers are not Samplers.
  template <class Other>
    requires(!AnySampler<Other>)
  DataLoader(Dataset& dataset, Other&, DataLoaderOptions = {}, Collate = {})
      : DataLoader(dataset, internal::refuse_sampler<Other>()) {}

  // The compiler's error for an option that does not exist: a few lines, with
  // "no such option", and not each constructor. So do other classes.
  template <class = void>
  DataLoader(Dataset&, Sampler&, ...) = delete;  // no such option
  template <class = void>
  DataLoader(Dataset&, SamplerOfBatches&, ...) = delete;  // no such option

  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // Starts a pass of the sampler, and blocks until the first batch is ready.
  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

  // Returns the number of batches in a whole pass on this rank: Python's len().
  // A resumed pass has only the remaining ones.
  int64_t size() const { return loop_.size(); }

  const DataLoaderOptions& options() const { return loop_.options(); }

 private:
  Loop loop_;
};

template <class Dataset, AnySampler Sampler, class Collate = DefaultCollate>
DataLoader(Dataset&, Sampler&, DataLoaderOptions = {},
           Collate = {}) -> DataLoader<Dataset, Collate>;

// A move-only input iterator that owns its pass. The batch belongs to the
// iterator: it may be changed or moved from, and is gone after the increment.
template <class Dataset, class Collate>
class DataLoader<Dataset, Collate>::Iterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;

  Batch& operator*() const { return pass_->current->batch; }
  Batch* operator->() const { return &pass_->current->batch; }
  Iterator& operator++() {
    pass_->advance();
    return *this;
  }
  void operator++(int) { pass_->advance(); }
  bool operator==(std::default_sentinel_t) const { return pass_->done; }

 private:
  friend class DataLoader;
  explicit Iterator(DataLoader& loader)
      : pass_(std::make_unique<typename Loop::Pass>(loader.loop_)) {
    pass_->advance();
  }

  std::unique_ptr<typename Loop::Pass> pass_;
};

}  // namespace lockstep
