#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/core/Device.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/batch_tensors.h"
#include "lockstep/data/batch_transfer.h"
#include "lockstep/data/collate.h"
#include "lockstep/data/dataset_access.h"
#include "lockstep/data/ordered_prefetch.h"
#include "lockstep/data/pass_plan.h"
#include "lockstep/data/sample_random.h"
#include "lockstep/data/sampler.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep::internal {

// The modes of the thread that makes this object, for other threads that work
// for it: what Autocast, NoGradGuard and InferenceMode set.
class LoopModes {
 public:
  // Gives the thread these modes until it ends.
  class Guard {
   public:
    explicit Guard(const LoopModes& modes) : guard_(modes.state_) {
      // A profiler of the loop's thread may end before the pass does, so this
      // thread keeps its own.
      at::set_record_function_tls_(own_callbacks_);
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(own_profiler_);
    }

   private:
    const at::RecordFunctionTLS own_callbacks_ = at::get_record_function_tls_();
    const std::shared_ptr<c10::ThreadLocalDebugInfo> own_profiler_ =
        c10::ThreadLocalDebugInfo::current();
    const at::ThreadLocalStateGuard guard_;
  };

 private:
  at::ThreadLocalState state_;
};

}  // namespace lockstep::internal

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

// The arguments of torch.utils.data.DataLoader that have a meaning here, with
// the same names and defaults (PyTorch documentation), and two more.
struct DataLoaderOptions {
  // ---- Behaviour ----

  // Samples in each batch, on this rank. Leave it out if the sampler makes the
  // batches.
  int64_t batch_size{1};

  // Whether to leave out a last batch that would be smaller. Set it to true if
  // the model needs batches of one size.
  bool drop_last{false};

  // Makes the seeds of samples, together with epoch and place, for a dataset
  // that takes them (SampleSeed). Must be the same on all ranks.
  int64_t seed{0};

  // Where the loop gets the tensors of its batches. With workers they are
  // copied ahead, from pinned memory and on a stream of their own, while the
  // loop computes: num_workers * prefetch_factor batches are then in the
  // device's memory. Without workers the copy is queued on the loop's stream.
  // None means that tensors stay where they are.
  std::optional<at::Device> device{};

  // ---- Performance ----

  // Threads that fetch batches ahead. With 0 the thread of the loop fetches
  // each batch when the loop asks for it. Raise it if the loop waits for data;
  // the dataset must then allow calls from several threads.
  int64_t num_workers{0};

  // Batches fetched ahead for each worker, so num_workers * prefetch_factor in
  // all. They take up this rank's memory. Raise it if the time to fetch a batch
  // varies much.
  int64_t prefetch_factor{2};

  // Whether the tensors of batches are in pinned memory, from which
  // `batch.data.to(device, dtype, /*non_blocking=*/true)` does not block. Has
  // no effect without a GPU. `device` pins by itself if there are workers.
  bool pin_memory{false};

  // ---- Debugging ----

  // The longest time that the loop waits for one batch from the workers; then
  // it throws std::runtime_error. Set it if the dataset may get stuck. More
  // than 0, and only with workers. None means no limit.
  std::optional<std::chrono::milliseconds> timeout{};
};

namespace internal {

// Throws std::invalid_argument if `options` are out of range, or if the sampler
// (`batches`, if it is not null) was made for another size of dataset than
// `dataset_size` (none if the dataset does not know it). Warns if a pass has no
// batches.
void check_loader(const DataLoaderOptions& options, const Sampler* sampler,
                  const SamplerOfBatches* batches,
                  std::optional<size_t> dataset_size);
void check_sampler_of_batches(const DataLoaderOptions& options);
void check_tensors_are_found(const DataLoaderOptions& options, bool are_found);

[[noreturn]] void throw_timeout(const DataLoaderOptions& options,
                                int64_t batch);
[[noreturn]] void throw_still_running();

template <class T>
concept AnySampler =
    std::derived_from<T, Sampler> || std::derived_from<T, SamplerOfBatches>;

// LibTorch's samplers are refused: they know neither the ranks (each rank would
// train on everything, or on what its own seed gives) nor how far the loop has
// come.
template <class Other>
Sampler& refuse_sampler() {
  static_assert(
      AnySampler<Other>,
      "lockstep::DataLoader takes a lockstep::Sampler or a "
      "lockstep::SamplerOfBatches. Instead of LibTorch's RandomSampler or "
      "DistributedRandomSampler use "
      "lockstep::DistributedSampler(dataset_size), "
      "which works with one process too, or lockstep::RandomSampler, which is "
      "for one process only; instead of SequentialSampler or "
      "DistributedSequentialSampler lockstep::DistributedSampler with "
      "{.shuffle "
      "= false}, or lockstep::SequentialSampler; for weights "
      "lockstep::DistributedWeightedSampler; for an order of your own derive "
      "from lockstep::Sampler.");
  std::terminate();
}

}  // namespace internal

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
// std::runtime_error if
// the timeout is over; then leaving the loop does not wait, but the loader's
// destructor waits until the dataset's calls have returned.
//
// Threads: loader and loop belong to one thread. With num_workers == 1, the
// dataset and the collate function are called in another thread than the
// loop's; with more, by several threads at once, which they must allow.
//
// This class does not use torch::data::make_data_loader, because that
// function's loader owns a moved copy of the sampler (pytorch issue 73141),
// draws from it ahead of the loop, and refuses to begin another loop after a
// loop with workers was left early.
template <class Dataset, class Collate = internal::DefaultCollate>
class DataLoader {
 public:
  using Batch = std::remove_cvref_t<decltype(internal::make_batch<Dataset>(
      std::declval<internal::Fetched<Dataset>>(),
      std::declval<const Collate&>(), int64_t{}, c10::ArrayRef<size_t>()))>;

  class Iterator;

  // Throws std::invalid_argument if an option is out of range, if LibTorch does
  // not find the device, or if the sampler was made for a dataset of another
  // size (Sampler::dataset_size()). Warns, in one line with the numbers, if a
  // whole pass has no batches on this rank.
  DataLoader(Dataset& dataset, Sampler& sampler, DataLoaderOptions options = {},
             Collate collate = {})
      : DataLoader(dataset, &sampler, nullptr, options, std::move(collate)) {}

  // The same with a sampler that makes the batches. Throws
  // std::invalid_argument, too, if batch_size or drop_last is given.
  DataLoader(Dataset& dataset, SamplerOfBatches& sampler,
             DataLoaderOptions options = {}, Collate collate = {})
      : DataLoader(dataset, nullptr, &sampler, options, std::move(collate)) {
    internal::check_sampler_of_batches(options);
  }

  // Does not compile: LibTorch's samplers are not Samplers.
  template <class Other>
    requires(!internal::AnySampler<Other>)
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
  int64_t size() const {
    return batches_
               ? batches_->size()
               : internal::batches_of(sampler_->size(), options_.batch_size,
                                      options_.drop_last);
  }

  const DataLoaderOptions& options() const { return options_; }

 private:
  struct Pass;
  // A batch, and what the loop waits for if it is still being copied.
  struct Item {
    Batch batch;
    internal::BatchTransfer::Copied copied{};
  };

  DataLoader(Dataset& dataset, Sampler* sampler, SamplerOfBatches* batches,
             DataLoaderOptions options, Collate collate)
      : dataset_(dataset),
        sampler_(sampler),
        batches_(batches),
        options_(options),
        collate_(std::move(collate)),
        transfer_(options.pin_memory, options.device,
                  /*ahead=*/options.num_workers > 0) {
    internal::check_loader(options, sampler, batches, dataset.size());
    internal::check_tensors_are_found(options, internal::kFindsTensors<Batch>);
    if (options.num_workers > 0) {
      prefetch_.emplace(options.num_workers,
                        options.num_workers * options.prefetch_factor);
    }
  }

  std::shared_ptr<const internal::PassPlan> plan_pass() {
    using internal::PassPlan;
    const int64_t pass = passes_++;
    return batches_
               ? std::make_shared<const PassPlan>(*batches_, pass)
               : std::make_shared<const PassPlan>(
                     *sampler_, options_.batch_size, options_.drop_last, pass);
  }

  // The workers call this, so it reads only what does not change during a pass.
  Item fetch(const internal::PassPlan& plan, int64_t batch) const {
    const internal::Span span("data", "fetch");
    const c10::ArrayRef<size_t> indices = plan.indices(batch);
    std::vector<SampleSeed> seeds;
    if constexpr (internal::kTakesSeeds<Dataset>) {
      seeds = plan.seeds(batch, options_.seed);
    }
    Item item{internal::make_batch<Dataset>(
        internal::fetch(dataset_, batch, indices, seeds), collate_, batch,
        indices)};
    if (!transfer_.is_idle()) {
      item.copied = transfer_.begin_copy(visitor(item.batch));
    }
    return item;
  }

  static internal::BatchTransfer::Visitor visitor(Batch& batch) {
    return [&batch](const internal::BatchTransfer::Visit& visit) {
      internal::visit_batch(batch, visit);
    };
  }

  void delivered_batch(size_t samples) {
    internal::TrainingCounters::instance().count_samples(
        static_cast<int64_t>(samples));
    if (batches_) {
      batches_->consumed_batch();
    } else {
      sampler_->consumed(options_.batch_size);
    }
  }
  void delivered_all() {
    if (sampler_ && options_.drop_last) sampler_->rest_left_out();
  }

  Dataset& dataset_;
  Sampler* const sampler_;           // either this or the next one
  SamplerOfBatches* const batches_;  // is null
  const DataLoaderOptions options_;
  const Collate collate_;
  const internal::BatchTransfer transfer_;
  bool looping_ = false;
  int64_t passes_ = 0;  // that have begun
  // Declared last, so that its threads end before what they read is destroyed.
  std::optional<internal::OrderedPrefetch<Item>> prefetch_;
};

template <class Dataset, internal::AnySampler Sampler,
          class Collate = internal::DefaultCollate>
DataLoader(Dataset&, Sampler&, DataLoaderOptions = {},
           Collate = {}) -> DataLoader<Dataset, Collate>;

// One pass: the batches that it visits, and how far it has come.
template <class Dataset, class Collate>
struct DataLoader<Dataset, Collate>::Pass {
  explicit Pass(DataLoader& owner) : loader(owner) {
    if (loader.looping_) internal::throw_still_running();
    plan = loader.plan_pass();
    if (loader.prefetch_) {
      // Workers share the plan: they may still use it after a timeout has ended
      // the loop.
      loader.prefetch_->begin(plan->batches(),
                              [plan = plan, &loader = loader,
                               modes = internal::LoopModes()](int64_t batch) {
                                const internal::LoopModes::Guard guard(modes);
                                return loader.fetch(*plan, batch);
                              });
    }
    if (plan->batches() == 0) loader.delivered_all();
    loader.looping_ = true;
  }
  ~Pass() { leave(); }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  // At the end of the loop, so that `it = loader.begin()` begins the next one.
  void leave() {
    if (!std::exchange(is_running, false)) return;
    loader.looping_ = false;
    if (!loader.prefetch_) return;
    if (is_stuck) {
      loader.prefetch_->abandon();
    } else {
      loader.prefetch_->end();
    }
  }

  void advance() {
    current.reset();  // before making the next: one batch less in memory
    if (delivered == plan->batches()) {
      done = true;
      leave();
      return;
    }
    const internal::Span span("data", "wait");
    if (loader.prefetch_) {
      current = loader.prefetch_->next(loader.options_.timeout);
      if (!current) {
        is_stuck = true;
        internal::throw_timeout(loader.options_, delivered);
      }
    } else {
      current.emplace(loader.fetch(*plan, delivered));
    }
    if (current->copied) {
      loader.transfer_.end_copy(current->copied, visitor(current->batch));
    }
    loader.delivered_batch(plan->indices(delivered).size());
    if (++delivered == plan->batches()) loader.delivered_all();
  }

  DataLoader& loader;
  std::shared_ptr<const internal::PassPlan> plan;
  int64_t delivered = 0;
  bool is_running = true;
  bool done = false;
  bool is_stuck = false;
  std::optional<Item> current;
};

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
      : pass_(std::make_unique<Pass>(loader)) {
    pass_->advance();
  }

  std::unique_ptr<Pass> pass_;
};

}  // namespace lockstep
