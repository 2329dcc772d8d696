#pragma once

#include <ATen/ThreadLocalState.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/batch_tensors.h"
#include "lockstep/data/batch_transfer.h"
#include "lockstep/data/data_loader_options.h"
#include "lockstep/data/dataset_access.h"
#include "lockstep/data/ordered_prefetch.h"
#include "lockstep/data/pass_plan.h"
#include "lockstep/data/sample_random.h"
#include "lockstep/data/sampler.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/training_counters.h"

// The loop over a DataLoader (lockstep/data/data_loader.h).
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

// Throws std::invalid_argument if `options` are out of range, or if the sampler
// (`batches`, if it is not null) was made for another size of dataset than
// `dataset_size` (none if the dataset does not know it), or makes the batches
// while batch_size or drop_last is given. Warns if a pass has no batches.
void check_loader(const DataLoaderOptions& options, const Sampler* sampler,
                  const SamplerOfBatches* batches,
                  std::optional<size_t> dataset_size);
void check_tensors_are_found(const DataLoaderOptions& options, bool are_found);

[[noreturn]] void throw_timeout(const DataLoaderOptions& options,
                                int64_t batch);
[[noreturn]] void throw_still_running();
[[noreturn]] void throw_loader_gone();

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

// Fetches the batches of each pass over a dataset.
template <class Dataset, class Collate>
class BatchLoop {
 public:
  using Batch = std::remove_cvref_t<decltype(make_batch<Dataset>(
      std::declval<Fetched<Dataset>>(), std::declval<const Collate&>(),
      int64_t{}, c10::ArrayRef<size_t>()))>;

  struct Pass;

  BatchLoop(Dataset& dataset, Sampler* sampler, SamplerOfBatches* batches,
            DataLoaderOptions options, Collate collate)
      : dataset_(dataset),
        sampler_(sampler),
        batches_(batches),
        options_(options),
        collate_(std::move(collate)),
        transfer_(options.pin_memory, options.device,
                  /*ahead=*/options.num_workers > 0) {
    check_loader(options, sampler, batches, dataset.size());
    check_tensors_are_found(options, kFindsTensors<Batch>);
    if (options.num_workers > 0) {
      prefetch_.emplace(options.num_workers,
                        options.num_workers * options.prefetch_factor);
    }
  }

  // Returns the number of batches in a whole pass on this rank.
  int64_t size() const {
    return batches_ ? batches_->size()
                    : batches_of(sampler_->size(), options_.batch_size,
                                 options_.drop_last);
  }
  const DataLoaderOptions& options() const { return options_; }

 private:
  // A batch, and what the loop waits for if it is still being copied.
  struct Item {
    Batch batch;
    BatchTransfer::Copied copied{};
  };

  std::shared_ptr<const PassPlan> plan_pass() {
    const int64_t pass = passes_++;
    return batches_
               ? std::make_shared<const PassPlan>(*batches_, pass)
               : std::make_shared<const PassPlan>(
                     *sampler_, options_.batch_size, options_.drop_last, pass);
  }

  // The workers call this, so it reads only what does not change during a pass.
  Item fetch(const PassPlan& plan, int64_t batch) const {
    const Span span("data", "fetch");
    const c10::ArrayRef<size_t> indices = plan.indices(batch);
    std::vector<SampleSeed> seeds;
    if constexpr (kTakesSeeds<Dataset>) {
      seeds = plan.seeds(batch, options_.seed);
    }
    Item item{
        make_batch<Dataset>(internal::fetch(dataset_, batch, indices, seeds),
                            collate_, batch, indices)};
    if (!transfer_.is_idle()) {
      item.copied = transfer_.begin_copy(visitor(item.batch));
    }
    return item;
  }

  static BatchTransfer::Visitor visitor(Batch& batch) {
    return [&batch](const BatchTransfer::Visit& visit) {
      visit_batch(batch, visit);
    };
  }

  void delivered_batch(size_t samples) {
    TrainingCounters::instance().count_samples(static_cast<int64_t>(samples));
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
  const BatchTransfer transfer_;
  bool looping_ = false;
  int64_t passes_ = 0;  // that have begun
  // A pass may outlive its loader: it finds out by this.
  const std::shared_ptr<const void> life_ = std::make_shared<char>();
  // Declared last, so that its threads end before what they read is destroyed.
  std::optional<OrderedPrefetch<Item>> prefetch_;
};

// One pass: the batches that it visits, and how far it has come.
template <class Dataset, class Collate>
struct BatchLoop<Dataset, Collate>::Pass {
  explicit Pass(BatchLoop& owner) : loader(owner) {
    if (loader.looping_) throw_still_running();
    plan = loader.plan_pass();
    if (loader.prefetch_) {
      // Workers share the plan: they may still use it after a timeout has ended
      // the loop.
      loader.prefetch_->begin(
          plan->batches(),
          [plan = plan, &loader = loader, modes = LoopModes()](int64_t batch) {
            const LoopModes::Guard guard(modes);
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
    if (!std::exchange(is_running, false) || life.expired()) return;
    loader.looping_ = false;
    if (!loader.prefetch_) return;
    if (is_stuck) {
      loader.prefetch_->abandon();
    } else {
      loader.prefetch_->end();
    }
  }

  void advance() {
    if (life.expired()) throw_loader_gone();
    current.reset();  // before making the next: one batch less in memory
    if (delivered == plan->batches()) {
      done = true;
      leave();
      return;
    }
    const Span span("data", "wait");
    if (loader.prefetch_) {
      current = loader.prefetch_->next(loader.options_.timeout);
      if (!current) {
        is_stuck = true;
        throw_timeout(loader.options_, delivered);
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

  BatchLoop& loader;
  const std::weak_ptr<const void> life = loader.life_;
  std::shared_ptr<const PassPlan> plan;
  int64_t delivered = 0;
  bool is_running = true;
  bool done = false;
  bool is_stuck = false;
  std::optional<Item> current;
};

}  // namespace lockstep::internal
