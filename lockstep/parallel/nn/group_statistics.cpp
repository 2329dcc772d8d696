#include "lockstep/parallel/nn/group_statistics.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <sstream>
#include <stdexcept>
#include <tuple>

#include "lockstep/comm/data_movement.h"
#include "lockstep/parallel/nn/channel_moments.h"

namespace lockstep::nn {
namespace {

int64_t values_per_channel(const at::Tensor& input) {
  int64_t count = input.size(0);
  for (int64_t size : input.sizes().slice(2)) count *= size;
  return count;
}

at::TensorOptions statistics_options(const at::Tensor& input) {
  return input.options()
      .dtype(at::toOpMathType(input.scalar_type()))
      .memory_format(std::nullopt);
}

void check_count(int64_t count, const at::Tensor& input) {
  if (count != 1) return;
  std::ostringstream text;
  text << "SyncBatchNorm: Expected more than 1 value per channel when "
          "training, got 1 on all ranks together, and input size "
       << input.sizes()
       << " on this one; use larger batches, or eval() for single samples";
  throw std::invalid_argument(text.str());
}

void update_running(const at::Tensor& running, const at::Tensor& value,
                    double momentum) {
  if (!running.defined()) return;
  running.copy_(
      running.to(at::kDouble).mul_(1 - momentum).add_(value, momentum));
}

GroupStatistics on_cpu(const at::Tensor& input, const at::Tensor& running_mean,
                       const at::Tensor& running_var, double momentum,
                       double eps, const ProcessGroupPtr& group) {
  int64_t channels = input.size(1);
  auto rows = at::empty({group->size(), 2 * channels + 1}, at::kDouble);
  all_gather_into_tensor(rows, channel_moments(input), {.group = group});

  GroupStatistics all{.group = group, .eps = eps};
  const double* first = rows.const_data_ptr<double>();
  const int64_t stride = 2 * channels + 1;
  for (int rank = 0; rank < group->size(); ++rank) {
    all.count += static_cast<int64_t>(first[rank * stride + 2 * channels]);
  }
  check_count(all.count, input);

  auto mean = at::zeros({channels}, at::kDouble);
  // Sums of the squared deviations from the mean.
  auto squares = at::zeros({channels}, at::kDouble);
  double* means = mean.data_ptr<double>();
  double* deviations = squares.data_ptr<double>();
  double before = 0;
  for (int rank = 0; rank < group->size(); ++rank) {
    const double* row = first + rank * stride;
    double count = row[2 * channels];
    if (count == 0) continue;
    double part = count / (before + count);
    for (int64_t c = 0; c < channels; ++c) {
      double delta = row[c] - means[c];
      means[c] += delta * part;
      deviations[c] +=
          count * row[channels + c] + delta * delta * before * part;
    }
    before += count;
  }
  auto options = statistics_options(input);
  auto count = static_cast<double>(all.count);
  all.mean = mean.to(options.dtype());
  auto variance = all.count == 0 ? squares : squares / count;
  all.variance = variance.to(options.dtype());
  all.invstd = (variance + eps).rsqrt_().to(options.dtype());
  if (all.count > 0) {
    update_running(running_mean, mean, momentum);
    update_running(running_var, squares / (count - 1), momentum);
  }
  return all;
}

// 16-bit inputs may be empty on one rank only: so this rank's row always has
// the dtype of the other ranks' statistics.
at::Tensor device_row(const at::Tensor& input, double eps) {
  int64_t channels = input.size(1);
  auto options = statistics_options(input);
  if (input.numel() == 0) return at::zeros({2 * channels + 1}, options);
  auto [mean, invstd] = at::batch_norm_stats(input, eps);
  auto count = at::full({1}, values_per_channel(input), mean.options());
  return at::cat({mean, invstd, count});
}

GroupStatistics on_device(const at::Tensor& input,
                          const at::Tensor& running_mean,
                          const at::Tensor& running_var, double momentum,
                          double eps, const ProcessGroupPtr& group) {
  int64_t channels = input.size(1);
  auto row = device_row(input, eps);
  auto rows = at::empty({group->size(), row.numel()}, row.options());
  all_gather_into_tensor(rows, row, {.group = group});

  // The kernel divides by each rank's count, so ranks without values are left
  // out.
  auto counts = rows.select(1, 2 * channels);
  auto present = counts.nonzero().squeeze(1);
  if (present.numel() < group->size()) {
    rows = rows.index_select(0, present);
    counts = rows.select(1, 2 * channels);
  }
  GroupStatistics all{.group = group, .eps = eps};
  all.counts = counts.to(at::kInt);
  all.count = counts.to(at::kLong).sum().item<int64_t>();
  check_count(all.count, input);
  if (all.count == 0) {
    all.mean = at::zeros({channels}, row.options());
    all.invstd = at::ones({channels}, row.options());
    return all;
  }
  if (running_mean.defined()) counts = counts.to(running_mean.scalar_type());
  std::tie(all.mean, all.invstd) = at::batch_norm_gather_stats_with_counts(
      input, rows.narrow(1, 0, channels).contiguous(),
      rows.narrow(1, channels, channels).contiguous(), running_mean,
      running_var, momentum, eps, counts.contiguous());
  return all;
}

}  // namespace

GroupStatistics group_statistics(const at::Tensor& input,
                                 const at::Tensor& running_mean,
                                 const at::Tensor& running_var, double momentum,
                                 double eps, const ProcessGroupPtr& group) {
  return (input.is_cpu() ? on_cpu : on_device)(input, running_mean, running_var,
                                               momentum, eps, group);
}

}  // namespace lockstep::nn
