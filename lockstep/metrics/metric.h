#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::metrics {

// The metrics of this folder have sums over samples, which each rank adds up
// for the samples that it has seen:
//
//   metrics::Accuracy accuracy;
//   for (auto& batch : loader) {
//     accuracy.update(model->forward(batch.data), batch.target);
//   }
//   const double part = accuracy.compute();  // over the samples of all ranks
//
// - update() adds to this rank's sums. It neither communicates nor waits for
//   the device: sums of tensors on a GPU stay there. Ranks may call it
//   differently often, and with batches of different sizes; a rank may have no
//   samples at all. It does not keep its arguments, and is not differentiated.
// - compute() is collective: all ranks of the group call it. It adds the ranks'
//   sums by one all_reduce, returns the same number on every rank, and leaves
//   the sums as they are. It waits for the device and blocks within the group's
//   timeout. Without a process group, it computes for this process alone.
// - reset() forgets this rank's samples. Call it on all ranks, before the next
//   epoch.
// - Sums are kept and reduced in float64, so counts are exact up to 2^53. They
//   are added in another order than in one process, so a mean may differ in its
//   last bits.
// - If there are no samples on any rank, the quotient of two sums is NaN (Mean,
//   Accuracy, Perplexity), a Sum is 0, and a ConfusionMatrix has zeros.
//
// Each sample counts once for each rank that has it: a DistributedSampler that
// pads gives some samples twice, which its option pad = false avoids.
//
// update() throws std::invalid_argument for tensors whose shape or dtype does
// not fit; what it can know only by looking at the values (a label that is not
// a class) is thrown by compute(), on every rank. compute() throws
// std::invalid_argument on every rank if the ranks compute metrics of different
// kinds or with different options, with equally many sums; with another number
// of sums, the backend reports it (collective_options.h). Two metrics of one
// kind with the same options cannot be told apart: call their compute() in the
// same order on all ranks, or their sums are mixed. Threads: one at a time.
struct MetricOptions {
  // The ranks whose samples count. Null means the default group.
  ProcessGroupPtr group{};
};

class Metric {
 public:
  Metric(const Metric&) = delete;
  Metric& operator=(const Metric&) = delete;

  void reset() { sums_.clear(); }

  // Return and set this rank's sums: float64, one dimension, on the CPU, a
  // copy. For a snapshot within an evaluation: among the items of a
  // TrainingState each rank's sums are saved. load_state_dict() throws
  // std::invalid_argument for a tensor of another dtype or size.
  at::Tensor state_dict() const;
  void load_state_dict(const at::Tensor& state);
  static constexpr bool state_is_per_rank = true;

 protected:
  // `function`: a literal, "metrics::Accuracy::compute()". `kind`: what must be
  // equal on all ranks, such as "Accuracy(top_k=5)".
  Metric(const char* function, std::string kind, int64_t count,
         const ProcessGroupPtr& group);
  ~Metric() = default;

  // Throws std::invalid_argument that names `metric` if the values are complex.
  static void require_real(const char* metric, const at::Tensor& values);

  // Add to one sum. The tensor has no dimensions; it may be on any device and
  // of any real dtype.
  void add(int64_t index, double value);
  void add(int64_t index, const at::Tensor& value);
  // Returns this rank's sums on a device, float64 [count], to be added to.
  at::Tensor sums_on(const at::Device& device);

  // Returns the sums over all ranks: float64 [count], on the CPU. Collective.
  at::Tensor reduce() const;

 private:
  const char* const function_;
  const std::string kind_;
  const int64_t count_;
  const ProcessGroupPtr group_;
  std::vector<at::Tensor> sums_;  // one for each device that had tensors
};

}  // namespace lockstep::metrics
