#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// The facts that DistributedDataParallel has about itself, and how long its
// last sampled iteration took; like Python's _get_ddp_logging_data(), whose
// keys are the members' names. Times in nanoseconds, bytes if a name says bytes
// or size.
struct DDPLoggingData {
  int world_size{0};
  int rank{0};
  std::string module_name{};
  std::string backend_name{};

  // Options.
  bool broadcast_buffers{false};
  std::vector<int64_t> bucket_cap_bytes{};
  bool find_unused_parameters{false};
  bool gradient_as_bucket_view{false};
  bool static_graph{false};
  bool mixed_precision{false};
  std::string comm_hook{};  // "allreduce", or "user" with register_comm_hook

  // The model.
  int64_t num_parameter_tensors{0};
  int64_t total_parameter_size_bytes{0};
  std::vector<std::string> dtypes{};
  int64_t num_buckets{0};
  std::vector<int64_t> bucket_sizes{};  // bytes, in the order of reduction
  bool has_rebuilt_buckets{false};
  std::vector<std::vector<size_t>> per_bucket_param_indices{};

  // The run.
  int64_t iteration{0};  // backward passes that were averaged, from 0
  // Indices of parameters, in the order in which their gradients became ready.
  std::vector<size_t> prev_iteration_grad_ready_order_indices{};
  int64_t unused_parameter_size{0};  // bytes, of the last iteration
  // Whether all iterations so far used the same parameters.
  bool can_set_static_graph{false};

  // Forward: from its start to the first gradient. Backward: from the first
  // gradient to the last. Communication: from the first published bucket to the
  // last reduced one. Overlap: the part of communication before the last
  // gradient.
  int64_t forward_compute_time{0};
  int64_t backward_compute_time{0};
  int64_t backward_comm_time{0};
  int64_t backward_compute_comm_overlap_time{0};
  int64_t avg_forward_compute_time{0};
  int64_t avg_backward_compute_time{0};
  int64_t avg_backward_comm_time{0};
  int64_t avg_backward_compute_comm_overlap_time{0};
};

}  // namespace lockstep
