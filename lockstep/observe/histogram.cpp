#include "lockstep/observe/histogram.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep::internal {

const std::vector<double>& default_bin_edges() {
  static const std::vector<double> edges = [] {
    std::vector<double> positive;
    for (double edge = 1e-12; edge < 1e20; edge *= 1.1) {
      positive.push_back(edge);
    }
    std::vector<double> all;
    for (auto edge = positive.rbegin(); edge != positive.rend(); ++edge) {
      all.push_back(-*edge);
    }
    all.push_back(0);
    all.insert(all.end(), positive.begin(), positive.end());
    return all;
  }();
  return edges;
}

HistogramData count_histogram(const at::Tensor& values,
                              const std::vector<double>& edges) {
  const at::NoGradGuard no_grad;
  const at::Tensor all =
      values.detach().to(at::kCPU, at::kDouble).reshape({-1}).contiguous();
  HistogramData result{.min = all.min().item<double>(),
                       .max = all.max().item<double>(),
                       .num = static_cast<double>(all.numel()),
                       .sum = all.sum().item<double>(),
                       .sum_squares = all.dot(all).item<double>(),
                       .limits = {},
                       .counts = {}};

  const at::Tensor inside = all.masked_select(
      all.ge(edges.front()).logical_and_(all.le(edges.back())));
  if (inside.numel() == 0) {
    result.limits = {edges.front(), edges.back()};
    result.counts = {0, 0};
    return result;
  }
  const auto bins = static_cast<int64_t>(edges.size()) - 1;
  const at::Tensor boundaries =
      at::from_blob(const_cast<double*>(edges.data()), {bins + 1}, at::kDouble);
  // With `right`, the number of edges that are not above the value.
  const at::Tensor bin = at::bucketize(inside, boundaries, /*out_int32=*/false,
                                       /*right=*/true)
                             .sub_(1)
                             .clamp_max_(bins - 1);
  const at::Tensor counts = at::bincount(bin, {}, bins).contiguous();
  const int64_t* const count = counts.const_data_ptr<int64_t>();

  int64_t first = 0;
  while (count[first] == 0) ++first;
  int64_t last = bins - 1;
  while (count[last] == 0) --last;
  // Only right edges are written, so an empty bin before the first one gives
  // its left edge.
  result.limits.push_back(edges[static_cast<size_t>(first)]);
  result.counts.push_back(0);
  for (int64_t at = first; at <= last; ++at) {
    result.limits.push_back(edges[static_cast<size_t>(at) + 1]);
    result.counts.push_back(static_cast<double>(count[at]));
  }
  return result;
}

}  // namespace lockstep::internal
