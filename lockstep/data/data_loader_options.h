#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace lockstep {

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

}  // namespace lockstep
