#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

#include "lockstep/parallel/comm_hooks/hook_collectives.h"
#include "lockstep/parallel/comm_hooks/orthogonalize.h"
#include "lockstep/parallel/comm_hooks/real_gradients.h"

namespace lockstep {
namespace {

// Returns numpy.random.RandomState.randint(1'000'000'000).
uint64_t next_seed(std::mt19937& rng) {
  constexpr uint32_t kMask = (1u << 30) - 1;
  uint32_t number = 0;
  do {
    number = rng() & kMask;
  } while (number >= 1'000'000'000);
  return number;
}

// Called once for each bucket of a step.
void count_step(PowerSGDState& state, const GradBucket& bucket) {
  if (bucket.is_last()) ++state.iter;
}

void report_stats(PowerSGDState& state, const GradBucket& bucket) {
  if (!bucket.is_last() || state.iter < state.next_stats_report) return;
  state.next_stats_report =
      state.iter + state.options.compression_stats_logging_frequency;
  const auto& log = state.options.log_compression_stats;
  if (log) log(state.compression_stats());
}

// Adds what the last step left out, and stores the sum in its place. Returns
// the stored tensor; it is undefined without error feedback.
at::Tensor feed_error_back(PowerSGDState& state, const GradBucket& bucket,
                           const at::Tensor& gradients) {
  if (!state.options.use_error_feedback) return {};
  auto& error = state.error_dict[bucket.index()];
  if (error.defined() && error.numel() == gradients.numel()) {
    gradients.add_(error);
    error.copy_(gradients);
  } else {
    error = gradients.clone();
  }
  return error;
}

// Returns the memory of a bucket's Qs, [count], and whether it holds those of
// the last step.
std::pair<at::Tensor, bool> q_memory(PowerSGDState& state,
                                     const GradBucket& bucket, int64_t count) {
  const auto& like = bucket.buffer();
  if (state.options.warm_start) {
    auto& kept = state.q_memory_dict[bucket.index()];
    if (kept.defined() && kept.numel() == count) {
      kept = kept.to(like.options()).contiguous();
      return {kept.view(-1), true};
    }
    kept = at::empty({count}, like.options());
    return {kept, false};
  }
  return {at::empty({count}, like.options()), false};
}

at::Tensor random_like(const at::Tensor& q, at::Generator& generator) {
  return at::randn(q.sizes(), generator, q.options().device(c10::kCPU));
}

// One gradient, or several of equal shape, during a step.
struct Compressed {
  at::Tensor gradient;  // [batch, n, m]
  at::Tensor p, q;      // [batch, n, r] and [batch, m, r]; parts of larger ones
  // [n, m] each: the gradients that were stacked in `gradient`
  std::vector<at::Tensor> copied_from;
};

// A bucket's gradients, divided into compressed and uncompressed ones.
struct Parts {
  std::vector<Compressed> compressed;    // p and q not set yet
  std::vector<at::Tensor> uncompressed;  // flat views
  int64_t ps = 0;                        // elements
  int64_t qs = 0;
  int64_t rest = 0;
};

int64_t rank_of(const PowerSGDState& state, int64_t n, int64_t m) {
  return std::min({n, m, state.options.matrix_approximation_rank});
}

// Groups matrices of equal shape, in the order of the first of each group.
std::vector<std::vector<at::Tensor>> by_shape(
    const std::vector<at::Tensor>& matrices) {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& matrix : matrices) {
    auto group = std::ranges::find_if(groups, [&](const auto& other) {
      return other[0].sizes() == matrix.sizes();
    });
    if (group == groups.end()) group = groups.insert(groups.end(), {{}});
    group->push_back(matrix);
  }
  return groups;
}

Parts divide(PowerSGDState& state, const GradBucket& bucket) {
  Parts parts;
  std::vector<at::Tensor> matrices;
  int64_t offset = 0;
  for (const auto& gradient : bucket.gradients()) {
    const auto count = gradient.numel();
    auto flat = bucket.buffer().narrow(0, offset, count);
    offset += count;
    const auto n = gradient.dim() > 0 ? gradient.size(0) : 1;
    const auto m = n > 0 ? count / n : 0;
    const auto sent = (n + m) * rank_of(state, n, m);
    state.total_numel_before_compression += count;
    if (static_cast<double>(sent) * state.options.min_compression_rate <
        static_cast<double>(count)) {
      matrices.push_back(flat.view({n, m}));
      parts.ps += n * rank_of(state, n, m);
      parts.qs += m * rank_of(state, n, m);
      state.total_numel_after_compression += sent;
    } else {
      parts.uncompressed.push_back(flat);
      parts.rest += count;
      state.total_numel_after_compression += count;
    }
  }
  for (auto& group : by_shape(matrices)) {
    if (state.options.batch_tensors_with_same_shape && group.size() > 1) {
      auto stacked = at::stack(group);
      parts.compressed.push_back({stacked, {}, {}, std::move(group)});
      continue;
    }
    for (const auto& matrix : group) {
      parts.compressed.push_back({matrix.unsqueeze(0), {}, {}, {}});
    }
  }
  return parts;
}

// Returns the next [batch, rows, r] of `memory`.
at::Tensor take(const at::Tensor& memory, int64_t& offset, int64_t batch,
                int64_t rows, int64_t rank) {
  const auto count = batch * rows * rank;
  auto place = memory.narrow(0, offset, count).view({batch, rows, rank});
  offset += count;
  return place;
}

CommFuture compress_layers(PowerSGDState& state, const GradBucket& bucket) {
  const auto& group = state.options.process_group;
  const auto epsilon = state.options.orthogonalization_epsilon;
  const auto& gradients = bucket.buffer();
  const auto error = feed_error_back(state, bucket, gradients);
  auto parts = divide(state, bucket);
  report_stats(state, bucket);

  // One all-reduce for all: uncompressed gradients first, then the Ps.
  auto first = at::empty({parts.rest + parts.ps}, gradients.options());
  auto rest = first.narrow(0, 0, parts.rest);
  if (parts.rest > 0) at::cat_out(rest, parts.uncompressed);
  auto [qs, warm] = q_memory(state, bucket, parts.qs);
  int64_t p_offset = parts.rest;
  int64_t q_offset = 0;
  for (auto& [gradient, p, q, copied_from] : parts.compressed) {
    const auto batch = gradient.size(0);
    const auto rank = rank_of(state, gradient.size(1), gradient.size(2));
    p = take(first, p_offset, batch, gradient.size(1), rank);
    q = take(qs, q_offset, batch, gradient.size(2), rank);
  }
  if (!warm) {
    auto generator = at::detail::createCPUGenerator(next_seed(state.rng));
    for (auto& part : parts.compressed) {
      part.q.copy_(random_like(part.q, generator));
    }
  }
  for (auto& [gradient, p, q, copied_from] : parts.compressed) {
    internal::orthogonalize(q, epsilon);
    at::bmm_out(p, gradient, q);
  }

  wait_for_tensor(
      internal::all_reduce_then(first, group, [first] { return first; }));
  rest.div_(group->size());
  int64_t offset = 0;
  for (auto& flat : parts.uncompressed) {
    flat.copy_(rest.narrow(0, offset, flat.numel()));
    offset += flat.numel();
  }
  for (auto& [gradient, p, q, copied_from] : parts.compressed) {
    internal::orthogonalize(p, epsilon);
    at::bmm_out(q, gradient.transpose(1, 2), p);
  }

  auto decompress = [gradients, error, qs = qs, size = group->size(),
                     compressed = std::move(parts.compressed)] {
    qs.div_(size);
    for (const auto& part : compressed) {
      auto gradient = part.gradient;
      at::bmm_out(gradient, part.p, part.q.transpose(1, 2));
      for (size_t i = 0; i < part.copied_from.size(); ++i) {
        part.copied_from[i].copy_(gradient[static_cast<int64_t>(i)]);
      }
    }
    if (error.defined()) error.sub_(gradients);
    return gradients;
  };
  if (parts.qs == 0) return completed_future(decompress());
  return internal::all_reduce_then(qs, group, std::move(decompress));
}

CommFuture compress_bucket(PowerSGDState& state, const GradBucket& bucket) {
  const auto& group = state.options.process_group;
  const auto& gradients = bucket.buffer();
  const auto count = gradients.numel();
  const auto side =
      static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(count))));
  const auto rank = rank_of(state, side, side);
  state.total_numel_before_compression += count;
  state.total_numel_after_compression += 2 * side * rank;
  report_stats(state, bucket);
  if (count == 0) return completed_future(gradients);

  auto matrix = at::constant_pad_nd(gradients, {0, side * side - count});
  const auto error = feed_error_back(state, bucket, matrix);
  matrix = matrix.view({1, side, side});
  auto p = at::empty({1, side, rank}, gradients.options());
  auto [flat, warm] = q_memory(state, bucket, side * rank);
  auto q = flat.view({1, side, rank});
  if (!warm) {
    auto generator = at::detail::createCPUGenerator(next_seed(state.rng));
    q.copy_(random_like(q, generator));
  }
  internal::orthogonalize(q, 0);
  at::bmm_out(p, matrix, q);
  wait_for_tensor(internal::all_reduce_then(p, group, [p] { return p; }));
  internal::orthogonalize(p, 0);
  at::bmm_out(q, matrix.transpose(1, 2), p);
  return internal::all_reduce_then(
      q, group,
      [gradients, error, matrix, p, q, size = group->size()]() mutable {
        q.div_(size);
        at::bmm_out(matrix, p, q.transpose(1, 2));
        if (error.defined()) error.sub_(matrix.view(-1));
        return gradients.copy_(matrix.view(-1).narrow(0, 0, gradients.numel()));
      });
}

using Compress = CommFuture (*)(PowerSGDState&, const GradBucket&);

CommHook after_first_steps(const char* name,
                           std::shared_ptr<PowerSGDState> state,
                           Compress compress) {
  if (!state) {
    throw std::invalid_argument(
        std::string(name) +
        ": the state is null; give a std::make_shared<PowerSGDState>()");
  }
  return [name, state = std::move(state), compress](GradBucket& bucket) {
    internal::require_real(bucket, name);
    at::NoGradGuard no_grad;
    auto future =
        state->iter < state->options.start_power_sgd_iter
            ? internal::average(bucket.buffer(), state->options.process_group)
            : compress(*state, bucket);
    count_step(*state, bucket);
    return future;
  };
}

}  // namespace

PowerSGDState::PowerSGDState(const PowerSGDOptions& given)
    : options(given), rng(given.random_seed) {
  auto refuse = [](const std::string& what) {
    throw std::invalid_argument("PowerSGDState: " + what);
  };
  if (options.matrix_approximation_rank < 1) {
    refuse(c10::str("matrix_approximation_rank is ",
                    options.matrix_approximation_rank, "; give 1 or more"));
  }
  if (!(options.min_compression_rate >= 0)) {
    refuse(c10::str("min_compression_rate is ", options.min_compression_rate,
                    "; give 0 or more"));
  }
  if (!(options.orthogonalization_epsilon >= 0)) {
    refuse(c10::str("orthogonalization_epsilon is ",
                    options.orthogonalization_epsilon, "; give 0 or more"));
  }
  if ((options.use_error_feedback || options.warm_start) &&
      options.start_power_sgd_iter < 2) {
    refuse(c10::str("start_power_sgd_iter is ", options.start_power_sgd_iter,
                    ", but use_error_feedback and warm_start keep memory for "
                    "each bucket, and the buckets are made anew after the "
                    "first step; give 2 or more, or turn both off"));
  }
  options.compression_stats_logging_frequency =
      std::max<int64_t>(1, options.compression_stats_logging_frequency);
  options.process_group =
      internal::group_or_default(std::move(options.process_group));
}

CompressionStats PowerSGDState::compression_stats() const {
  return {.iter = iter,
          .numel_before_compression = total_numel_before_compression,
          .numel_after_compression = total_numel_after_compression,
          .compress_rate =
              total_numel_after_compression > 0
                  ? static_cast<double>(total_numel_before_compression) /
                        static_cast<double>(total_numel_after_compression)
                  : 0};
}

CommHook power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  return after_first_steps("power_sgd_hook", std::move(state), compress_layers);
}

CommHook batched_power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  return after_first_steps("batched_power_sgd_hook", std::move(state),
                           compress_bucket);
}

}  // namespace lockstep
