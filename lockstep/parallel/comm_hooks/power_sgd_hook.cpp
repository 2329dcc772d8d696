#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/hook_collectives.h"

namespace lockstep::internal {
namespace {

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const auto columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    auto column = matrices.narrow(2, i, 1);
    auto norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1},
                                       /*keepdim=*/true);
    if (epsilon == 0) {
      norm.masked_fill_(norm.eq(0), 1);
    } else {
      norm.add_(epsilon);
    }
    column.div_(norm);
    if (i + 1 == columns) break;
    auto rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(1, /*keepdim=*/true) * column);
  }
}

// Makes the columns of each of `matrices` ([count, rows, columns], columns <=
// rows) orthonormal, in place: by Gram-Schmidt for up to two columns and for
// 16-bit dtypes, otherwise by QR, as Python's PowerSGD does.
//
// Gram-Schmidt adds `epsilon` to the norms by which it divides. A column of
// norm 0 stays 0 (in Python it becomes NaN if epsilon is 0). Internal to
// comm_hooks.
void orthogonalize(const at::Tensor& matrices, double epsilon) {
  const auto dtype = matrices.scalar_type();
  if (matrices.size(2) <= 2 || dtype == at::kHalf || dtype == at::kBFloat16) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

}  // namespace

}  // namespace lockstep::internal

namespace lockstep {
namespace {

// Returns numpy.random.RandomState.randint(1'000'000'000).
uint64_t next_seed(at::mt19937& rng) {
  constexpr uint32_t kMask = (1u << 30) - 1;
  uint32_t number = 0;
  do {
    number = rng() & kMask;
  } while (number >= 1'000'000'000);
  return number;
}

// The numbers of an engine: how many are left and the next one's place, and the
// words from which they are made.
at::Tensor words_of(const at::mt19937& rng) {
  const auto data = rng.data();
  std::vector<int64_t> words{data.left_, data.next_};
  words.insert(words.end(), data.state_.begin(), data.state_.end());
  return at::tensor(words, at::kLong);
}

// Returns false if `words` are not such numbers.
bool set_words(at::mt19937& rng, const at::Tensor& given) {
  constexpr int64_t kWords = at::MERSENNE_STATE_N;
  if (given.dim() != 1 || given.numel() != kWords + 2) return false;
  const at::Tensor words = given.to(at::kCPU, at::kLong).contiguous();
  const auto* word = words.const_data_ptr<int64_t>();
  const bool is_new = word[0] == 1 && word[1] == 0;
  if (!is_new &&
      (word[0] < 1 || word[1] < 1 || word[0] + word[1] != kWords + 1)) {
    return false;
  }
  auto data = rng.data();
  data.left_ = static_cast<int>(word[0]);
  data.next_ = static_cast<uint32_t>(word[1]);
  std::copy_n(word + 2, kWords, data.state_.begin());
  rng.set_data(data);
  return true;
}

// The names in a state dict.
constexpr const char* kRng = "rng";
constexpr std::string_view kError = "error.";
constexpr std::string_view kQ = "q.";
constexpr std::pair<const char*, int64_t PowerSGDState::*> kCounts[] = {
    {"iter", &PowerSGDState::iter},
    {"total_numel_before_compression",
     &PowerSGDState::total_numel_before_compression},
    {"total_numel_after_compression",
     &PowerSGDState::total_numel_after_compression},
    {"next_stats_report", &PowerSGDState::next_stats_report}};

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
    error = error.to(gradients.options());
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

// Returns the sizes [n, m] of a gradient as a matrix.
std::pair<int64_t, int64_t> matrix_of(const at::Tensor& gradient) {
  const auto n = gradient.dim() > 0 ? gradient.size(0) : 1;
  return {n, n > 0 ? gradient.numel() / n : 0};
}

// Returns whether compressing an [n, m] pays.
bool pays(const PowerSGDState& state, int64_t n, int64_t m) {
  const auto sent = (n + m) * rank_of(state, n, m);
  return static_cast<double>(sent) * state.options.min_compression_rate <
         static_cast<double>(n * m);
}

using Share = PowerSGDState::Share;

// The shares in the memory of a whole bucket, which has no Q for each.
std::vector<Share> shares_of_bucket(const GradBucket& bucket) {
  const auto& names = bucket.parameter_names();
  std::vector<Share> shares;
  int64_t offset = 0;
  for (size_t i = 0; i < bucket.gradients().size(); ++i) {
    const auto end = offset + bucket.gradients()[i].numel();
    shares.push_back({.parameter = names.empty()
                                       ? c10::str(bucket.index(), " ", i)
                                       : names[i],
                      .error = {offset, end},
                      .q = {0, 0}});
    offset = end;
  }
  return shares;
}

// The shares in the memory of power_sgd_hook(): Qs of equal shape together, as
// by_shape() has them.
std::vector<Share> shares_of_layers(const PowerSGDState& state,
                                    const GradBucket& bucket) {
  auto shares = shares_of_bucket(bucket);
  const auto& gradients = bucket.gradients();
  int64_t offset = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto shape = matrix_of(gradients[i]);
    const auto [n, m] = shape;
    if (!pays(state, n, m) || shares[i].q.size() > 0) continue;
    for (size_t j = i; j < gradients.size(); ++j) {
      if (matrix_of(gradients[j]) != shape) continue;
      shares[j].q = {offset, offset + m * rank_of(state, n, m)};
      offset = shares[j].q.end;
    }
  }
  return shares;
}

at::Tensor part_of(const at::Tensor& flat, const internal::Range& range) {
  return flat.view(-1).narrow(0, range.begin, range.size());
}

// Calls visit(parameter, memory) for all that the buckets from `first` on have.
template <class Visit>
void visit_shares(const PowerSGDState& state, size_t first, Visit visit) {
  for (auto at = state.shares.lower_bound(first); at != state.shares.end();
       ++at) {
    const auto of_bucket = [&](const std::map<size_t, at::Tensor>& memory,
                               const internal::Range& range) {
      const auto found = memory.find(at->first);
      const bool has = range.size() > 0 && found != memory.end() &&
                       found->second.defined() &&
                       found->second.numel() >= range.end;
      return has ? part_of(found->second, range) : at::Tensor();
    };
    for (const Share& share : at->second) {
      visit(share.parameter,
            PowerSGDState::Left{of_bucket(state.error_dict, share.error),
                                of_bucket(state.q_memory_dict, share.q)});
    }
  }
}

// Makes the memory of this bucket from that of its parameters, if they were in
// other buckets in the last step. `error_size`, `q_size`: of the bucket's.
void follow_parameters(PowerSGDState& state, const GradBucket& bucket,
                       std::vector<Share> shares, int64_t error_size,
                       int64_t q_size) {
  const auto same = [](const Share& a, const Share& b) {
    return a.parameter == b.parameter && a.error == b.error && a.q == b.q;
  };
  const auto index = bucket.index();
  const auto known = state.shares.find(index);
  if (known != state.shares.end()) {
    if (std::ranges::equal(known->second, shares, same)) return;
    // The buckets before this one are the same, and in use by this step.
    visit_shares(state, index,
                 [&](const std::string& parameter, PowerSGDState::Left memory) {
                   state.left[parameter] = std::move(memory);
                 });
    const auto forget = [index](auto& of_buckets) {
      of_buckets.erase(of_buckets.lower_bound(index), of_buckets.end());
    };
    forget(state.error_dict);
    forget(state.q_memory_dict);
    forget(state.shares);
  }
  at::Tensor error, q;
  bool has_all_qs = true;
  for (const Share& share : shares) {
    const auto found = state.left.find(share.parameter);
    const auto take = [&](const at::Tensor& from, const internal::Range& range,
                          at::Tensor& to, int64_t size) {
      if (!from.defined() || from.numel() != range.size()) return false;
      if (!to.defined()) to = at::zeros({size}, bucket.buffer().options());
      part_of(to, range).copy_(from);
      return true;
    };
    const auto memory =
        found == state.left.end() ? PowerSGDState::Left{} : found->second;
    take(memory.error, share.error, error, error_size);
    if (share.q.size() > 0) has_all_qs &= take(memory.q, share.q, q, q_size);
    if (found != state.left.end()) state.left.erase(found);
  }
  if (error.defined()) state.error_dict[index] = error;
  if (q.defined() && has_all_qs) state.q_memory_dict[index] = q;
  state.shares[index] = std::move(shares);
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
    const auto [n, m] = matrix_of(gradient);
    state.total_numel_before_compression += count;
    if (pays(state, n, m)) {
      matrices.push_back(flat.view({n, m}));
      parts.ps += n * rank_of(state, n, m);
      parts.qs += m * rank_of(state, n, m);
      state.total_numel_after_compression += (n + m) * rank_of(state, n, m);
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
  auto shares = shares_of_layers(state, bucket);
  int64_t q_size = 0;
  for (const Share& share : shares) q_size += share.q.size();
  follow_parameters(state, bucket, std::move(shares), gradients.numel(),
                    q_size);
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
      internal::keep_for_current_stream(part.p);
      internal::keep_for_current_stream(gradient);
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

  follow_parameters(state, bucket, shares_of_bucket(bucket), side * side, 0);
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
        internal::keep_for_current_stream(matrix);
        internal::keep_for_current_stream(p);
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
    if (!bucket.is_last()) return future;
    return internal::after_success(future, [state] { ++state->iter; });
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

ItemState PowerSGDState::state_dict() const {
  StateTree::Dict values;
  for (const auto& [name, number] : kCounts) values.set(name, this->*number);
  ItemState state{.values = std::move(values)};
  state.tensors.emplace_back(kRng, words_of(rng));
  auto memory = left;
  visit_shares(*this, 0, [&](const std::string& parameter, Left of_bucket) {
    memory[parameter] = std::move(of_bucket);
  });
  for (const auto& [parameter, of] : memory) {
    if (of.error.defined()) {
      state.tensors.emplace_back(std::string(kError) + parameter, of.error);
    }
    if (of.q.defined())
      state.tensors.emplace_back(std::string(kQ) + parameter, of.q);
  }
  return state;
}

void PowerSGDState::load_state_dict(const ItemState& state) {
  const auto refuse = [](const char* name) {
    throw std::invalid_argument(
        c10::str("PowerSGDState: \"", name,
                 "\" of the state is missing or wrong; load what the "
                 "state_dict() of a PowerSGDState returned"));
  };
  PowerSGDState loaded(*this);
  const auto* values = state.values.as<StateTree::Dict>();
  for (const auto& [name, number] : kCounts) {
    const auto* found = values ? values->find(name) : nullptr;
    const auto* value = found ? found->as<int64_t>() : nullptr;
    if (!value) refuse(name);
    loaded.*number = *value;
  }
  loaded.error_dict.clear();
  loaded.q_memory_dict.clear();
  loaded.shares.clear();
  loaded.left.clear();
  bool has_rng = false;
  for (const auto& [name, tensor] : state.tensors) {
    if (name == kRng) {
      has_rng = set_words(loaded.rng, tensor);
    } else if (name.starts_with(kError)) {
      loaded.left[name.substr(kError.size())].error = tensor;
    } else if (name.starts_with(kQ)) {
      loaded.left[name.substr(kQ.size())].q = tensor;
    }
  }
  if (!has_rng) refuse(kRng);
  *this = std::move(loaded);
}

CommHook power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  return after_first_steps("power_sgd_hook", std::move(state), compress_layers);
}

CommHook batched_power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  return after_first_steps("batched_power_sgd_hook", std::move(state),
                           compress_bucket);
}

}  // namespace lockstep
