#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// After torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, and Vogels
// et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
// Optimization" (NeurIPS 2019); the form of hooks as in default_hooks.h.
namespace lockstep {

struct CompressionStats {
  int64_t iter = 0;
  // Elements of all buckets that were compressed so far, and of what was sent
  // for them; their ratio, 0 where nothing was.
  int64_t numel_before_compression = 0;
  int64_t numel_after_compression = 0;
  double compress_rate = 0;
};

struct PowerSGDOptions {
  ProcessGroupPtr process_group{};  // none: the default group
  // The rank r of the approximation: a gradient of [n, m] is sent as (n + m) r
  // elements. Start with 1 and double it until the accuracy is enough.
  int64_t matrix_approximation_rank{1};
  // The first steps average without compression. At least 2 with
  // use_error_feedback or warm_start, whose memory belongs to buckets that are
  // made anew behind the first step.
  int64_t start_powerSGD_iter{1'000};
  // A gradient is compressed if (n + m) r times this is less than n m.
  double min_compression_rate{2};
  // What compression left out of a step's gradients is added to the next's.
  // Memory: two buckets' worth.
  bool use_error_feedback{true};
  // A step's Q begins with the last one's.
  bool warm_start{true};
  // Added to the norms by which columns are divided. Without it columns of
  // zeros stay zeros.
  double orthogonalization_epsilon{0};
  // Of the first Qs; the same on all ranks. They are those of Python.
  uint32_t random_seed{0};
  // How many steps lie between two calls of `log_compression_stats`, where
  // there is one: in backward, on this rank.
  int64_t compression_stats_logging_frequency{10'000};
  std::function<void(const CompressionStats&)> log_compression_stats{};
  // Gradients of equal shape in a bucket are compressed by one operation.
  bool batch_tensors_with_same_shape{false};
};

// What PowerSGD keeps from step to step; of one DistributedDataParallel. Public
// as in Python: save and restore all of it with a snapshot, and a training goes
// on as if it had not stopped. Not while a backward is under way.
struct PowerSGDState {
  // Throws std::invalid_argument for an option out of its range, and as
  // default_group() does.
  explicit PowerSGDState(const PowerSGDOptions& options = {});

  CompressionStats compression_stats() const;

  PowerSGDOptions options;
  // Which seeds the Qs; numpy.random.RandomState(random_seed) of Python.
  std::mt19937 rng;
  // By GradBucket::index(). A Q is used where it is there and warm_start is on,
  // so that one can be given for a first step: of powerSGD_hook() [sum of m r],
  // the matrices [m, r] of the compressed gradients one behind the other, those
  // of equal shape together; of batched_powerSGD_hook() [side, r].
  std::map<size_t, at::Tensor> error_dict;
  std::map<size_t, at::Tensor> q_memory_dict;
  int64_t iter = 0;  // steps so far
  int64_t total_numel_before_compression = 0;
  int64_t total_numel_after_compression = 0;
  int64_t next_stats_report = 0;
};

// Each gradient of two or more dimensions as a matrix M [n, m] ~ P Q^T:
// P = M Q summed over the ranks, made orthonormal; Q = M^T P averaged. Others,
// and those not worth it, are averaged.
//
// On the wire: (n + m) min(n, m, r) elements of each matrix, and the others.
// Two all-reduces a bucket, the first of which (Ps and what is not compressed)
// is waited for in backward, as the second needs it; Python makes three.
CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);

// The whole bucket as one square matrix, filled up with zeros: fewer and larger
// operations, but the structure of the layers is lost; meant for rank 1.
// Ignores orthogonalization_epsilon and min_compression_rate, as Python. (The
// hook of torch 2.13 itself fails: it hands matrices where batches of them are
// expected.)
//
// On the wire: 2 r sqrt(elements), rounded up.
CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace lockstep
