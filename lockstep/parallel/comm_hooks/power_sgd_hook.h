#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/state/box.h"

// The hook of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, and
// Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization" (NeurIPS 2019). It is registered like the hooks of
// comm_hooks.h.
namespace lockstep {

struct ItemState;  // lockstep/checkpoint/snapshot.h

struct CompressionStats {
  int64_t iter = 0;
  // The elements of all gradients since start_power_sgd_iter, compressed or
  // not, the elements that were sent for them, and the ratio of the two numbers
  // (0 if nothing was sent).
  int64_t numel_before_compression = 0;
  int64_t numel_after_compression = 0;
  double compress_rate = 0;
};

// The arguments of Python's PowerSGDState, with its defaults, and
// log_compression_stats. The same on all ranks, except under Debugging.
// batched_power_sgd_hook() does not use orthogonalization_epsilon,
// min_compression_rate or batch_tensors_with_same_shape.
struct PowerSGDOptions {
  // ---- Behaviour ----

  // The ranks that average. Null means the default group. Most programs leave
  // it.
  ProcessGroupPtr process_group{};

  // The rank r of the approximation: a gradient of shape [n, m] is sent as (n +
  // m) r elements. Start with 1 and double it until the accuracy is good
  // enough.
  int64_t matrix_approximation_rank{1};

  // The number of first steps that average without compression. Raise it if the
  // loss falls fast for longer than that. At least 2 with use_error_feedback or
  // warm_start: they keep memory for each bucket, and the buckets are made anew
  // after the first step.
  int64_t start_power_sgd_iter{1'000};

  // Whether the error of a step's compression is added to the next step's
  // gradients, which takes as much memory as all gradients. Most programs leave
  // it: without it the accuracy suffers.
  bool use_error_feedback{true};

  // Whether a step starts with the Q of the last step, not with a random one.
  // Most programs leave it.
  bool warm_start{true};

  // Added to the norms by which columns are divided. Used for ranks up to 2 and
  // for 16-bit gradients; otherwise columns are made orthonormal by a QR
  // decomposition, without this number. Most programs leave it. With 0, columns
  // of zeros stay zeros.
  double orthogonalization_epsilon{0};

  // The seed of the first Qs, which equal Python's.
  uint32_t random_seed{0};

  // ---- Performance ----

  // A gradient is compressed if (n + m) r times this is less than n m. Raise it
  // if compressing costs more time than it saves.
  double min_compression_rate{2};

  // Whether gradients of equal shape in a bucket are compressed by one
  // operation. Set it to true for many layers of one shape.
  bool batch_tensors_with_same_shape{false};

  // ---- Debugging ----

  // Once in so many steps, log_compression_stats is called: in backward, on
  // this rank. Set both to see what the compression saves.
  int64_t compression_stats_logging_frequency{10'000};
  std::function<void(const CompressionStats&)> log_compression_stats{};
};

// The memory of PowerSGD from step to step, for one DistributedDataParallel.
// Public, as in Python. Do not access it during a backward.
//
// An item of TrainingState::items: a resumed training continues as if it had
// not stopped. (Not so with batched_power_sgd_hook(), whose Qs are of whole
// buckets and begin anew.) The memory is that of each rank, so snapshots are
// folders, and the number of ranks must stay the same.
struct PowerSGDState {
  // Throws std::invalid_argument for an option out of its range, and what
  // default_group() throws.
  explicit PowerSGDState(const PowerSGDOptions& options = {});

  CompressionStats compression_stats() const;

  static constexpr bool state_is_per_rank = true;
  // Everything below but the options. Tensors share their memory with this
  // object. load_state_dict() throws std::invalid_argument for what is not such
  // a state.
  ItemState state_dict() const;
  void load_state_dict(const ItemState& state);

  PowerSGDOptions options;
  // Seeds the Qs, as Python's numpy.random.RandomState(random_seed).
  at::mt19937 rng;
  // Both maps are indexed by GradBucket::index(). A stored Q is used if
  // warm_start is on, so a program can also give one for the first step.
  // Shapes: for power_sgd_hook() [sum of m r], the matrices [m, r] of the
  // compressed gradients one after the other, those of equal shape together;
  // for batched_power_sgd_hook() [side, r].
  std::map<size_t, at::Tensor> error_dict;
  std::map<size_t, at::Tensor> q_memory_dict;
  // Where each parameter's share of these lies, by bucket. The buckets are
  // others after the first step, also of a resumed training, and if other
  // parameters are trained; the memory follows its parameters then.
  struct Share {
    std::string parameter;
    internal::Range error;
    internal::Range q;
  };
  std::map<size_t, std::vector<Share>> shares;
  // The memory of parameters that are in none of these buckets, by name.
  struct Left {
    at::Tensor error;
    at::Tensor q;
  };
  std::map<std::string, Left> left;
  int64_t iter = 0;  // steps so far
  int64_t total_numel_before_compression = 0;
  int64_t total_numel_after_compression = 0;
  int64_t next_stats_report = 0;
};

// Approximates each gradient of two or more dimensions as a matrix M [n, m] ~ P
// Q^T: P = M Q, summed over the ranks and made orthonormal; Q = M^T P,
// averaged. Other gradients, and those for which it does not pay, are averaged.
//
// On the wire: (n + m) min(n, m, r) elements for each matrix, and the other
// gradients. Two all-reduces for each bucket (Python makes three). The first
// (Ps and uncompressed gradients) is waited for in backward, because the second
// needs its result.
CommHook power_sgd_hook(std::shared_ptr<PowerSGDState> state);

// Treats the whole bucket as one square matrix, filled up with zeros: fewer and
// larger operations, but the structure of the layers is lost; meant for rank 1.
// Ignores orthogonalization_epsilon, min_compression_rate and
// batch_tensors_with_same_shape, as Python does.
// (Python's own hook fails in torch 2.13: it passes matrices where batches of
// matrices are expected.)
//
// On the wire: 2 r sqrt(elements), rounded up.
CommHook batched_power_sgd_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace lockstep
