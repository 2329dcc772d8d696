#include "lockstep/data/data_loader.h"

#include <stdexcept>

namespace lockstep::internal {

void check_loader(const DataLoaderOptions& options, const Sampler& sampler,
                  int64_t dataset_size) {
  auto require_at_least = [](const char* name, int64_t value, int64_t lowest) {
    if (value < lowest) {
      throw std::invalid_argument(std::string("DataLoader: ") + name + " is " +
                                  std::to_string(value) + "; it must be " +
                                  std::to_string(lowest) + " or more");
    }
  };
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
  if (dataset_size >= 0 && sampler.dataset_size() > dataset_size) {
    throw std::invalid_argument("DataLoader: the sampler was made for " +
                                std::to_string(sampler.dataset_size()) +
                                " samples, the dataset has " +
                                std::to_string(dataset_size) +
                                "; make the sampler with this dataset's size");
  }
}

void throw_timeout(const DataLoaderOptions& options, int64_t batch) {
  throw std::runtime_error(
      "DataLoader: the workers had not fetched batch " + std::to_string(batch) +
      " of this loop after " + std::to_string(options.timeout->count()) +
      " ms; the dataset is stuck, or needs more workers or a longer timeout");
}

int64_t batches(int64_t samples, const DataLoaderOptions& options) {
  return options.drop_last
             ? samples / options.batch_size
             : (samples + options.batch_size - 1) / options.batch_size;
}

}  // namespace lockstep::internal
