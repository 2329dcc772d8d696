#include "lockstep/data/data_loader.h"

#include <c10/util/Exception.h>

#include "lockstep/comm/errors.h"

namespace lockstep::internal {
namespace {

void require_at_least(const char* name, int64_t value, int64_t lowest) {
  if (value < lowest) {
    throw std::invalid_argument(std::string("DataLoader: ") + name + " is " +
                                std::to_string(value) + "; it must be " +
                                std::to_string(lowest) + " or more");
  }
}

std::string listed(c10::ArrayRef<size_t> indices) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < indices.size() && i < kMost; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(indices[i]);
  }
  if (indices.size() > kMost) {
    text += " and " + std::to_string(indices.size() - kMost) + " more";
  }
  return text;
}

}  // namespace

void check_loader(const DataLoaderOptions& options, const Sampler* sampler,
                  const SamplerOfBatches* batches,
                  std::optional<size_t> dataset_size) {
  require_at_least("batch_size", options.batch_size, 1);
  require_at_least("num_workers", options.num_workers, 0);
  require_at_least("prefetch_factor", options.prefetch_factor, 1);
  if (options.timeout && options.timeout->count() <= 0) {
    throw std::invalid_argument("DataLoader: timeout is " +
                                std::to_string(options.timeout->count()) +
                                " ms; give more than 0, or none for no limit");
  }
  if (options.timeout && options.num_workers == 0) {
    throw std::invalid_argument(
        "DataLoader: a timeout is given, but num_workers is 0, so that the "
        "loop's own thread fetches the batches; give num_workers of 1 or more, "
        "or no timeout");
  }
  const int64_t expected =
      batches ? batches->dataset_size() : sampler->dataset_size();
  const int64_t size =
      dataset_size ? static_cast<int64_t>(*dataset_size) : expected;
  const bool selects = batches ? batches->takes_larger_dataset()
                               : sampler->takes_larger_dataset();
  if (size < expected || (size > expected && !selects)) {
    throw std::invalid_argument(
        "DataLoader: the sampler was made for a dataset of " +
        std::to_string(expected) + " samples, but this one has " +
        std::to_string(size) +
        "; make the sampler with the dataset itself (for a part of a dataset: "
        "with a TakeDataset or Subset of it)");
  }
  if (batches && (options.batch_size != 1 || options.drop_last)) {
    throw std::invalid_argument(
        std::string("DataLoader: ") +
        (options.drop_last ? "drop_last" : "batch_size") +
        " is given, but the sampler makes the batches; give it to the sampler");
  }
  if (batches && batches->size() == 0) {
    TORCH_WARN("DataLoader: the sampler makes no batches of this dataset of ",
               size, " samples, so the loop will do nothing");
  }
  if (sampler &&
      batches_of(sampler->size(), options.batch_size, options.drop_last) == 0) {
    TORCH_WARN(
        "DataLoader: there are no batches, so the loop will do nothing: "
        "of the dataset's ",
        size, " samples this rank visits ", sampler->size(),
        ", with batch_size ", options.batch_size,
        options.drop_last ? " and drop_last" : "");
  }
}

void check_tensors_are_found(const DataLoaderOptions& options, bool are_found) {
  if (are_found || !(options.device || options.pin_memory)) return;
  throw std::invalid_argument(
      std::string("DataLoader: ") + (options.device ? "device" : "pin_memory") +
      " is given, but the loader cannot find the tensors in the type of the "
      "batches; write a function for_each_tensor(batch, visit) in its "
      "namespace, or leave out the option");
}

void throw_timeout(const DataLoaderOptions& options, int64_t batch) {
  throw std::runtime_error(
      "DataLoader: the workers had not fetched batch " + std::to_string(batch) +
      " of this loop after " + std::to_string(options.timeout->count()) +
      " ms; the dataset is stuck, or needs more workers or a longer timeout");
}

void throw_still_running() {
  throw std::logic_error(
      "DataLoader: a loop over this loader is still running; leave it first, "
      "or make a second loader with a sampler of its own");
}

void throw_loader_gone() {
  throw std::logic_error(
      "DataLoader: the loader of this loop does not exist any more; make it "
      "outside of the loop over it");
}

void throw_failed_sample(int64_t batch, size_t index) {
  throw DataLoaderError(
      "DataLoader: the dataset failed at sample " + std::to_string(index) +
          ", in batch " + std::to_string(batch) +
          " of this loop: " + words_of(std::current_exception()),
      batch, {index});
}

void throw_failed_batch(int64_t batch, const char* what_failed,
                        c10::ArrayRef<size_t> indices) {
  throw DataLoaderError(
      std::string("DataLoader: ") + what_failed + " in batch " +
          std::to_string(batch) + " of this loop, with the samples " +
          listed(indices) + ": " + words_of(std::current_exception()),
      batch, indices.vec());
}

}  // namespace lockstep::internal
