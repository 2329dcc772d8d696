#include "lockstep/observe/histogram.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <optional>

namespace lockstep::internal {
namespace {

// Counts the edges that are not above a number. A binary search over all edges
// takes most of the time of a histogram; here the first 18 bits of a double
// (sign, exponent and 6 bits of the fraction), which are in the order of the
// numbers, mostly leave no edge to be compared.
class EdgeIndex {
 public:
  explicit EdgeIndex(const std::vector<double>& edges)
      : edges_(edges), below_((size_t{1} << kBits) + 1) {
    for (const double edge : edges) ++below_[key(edge) + 1];
    std::partial_sum(below_.begin(), below_.end(), below_.begin());
  }

  size_t not_above(double value) const {
    const size_t at = key(value);
    const double* const edges = edges_.data();
    return static_cast<size_t>(
        std::upper_bound(edges + below_[at], edges + below_[at + 1], value) -
        edges);
  }

 private:
  static constexpr int kBits = 18;

  static size_t key(double value) {
    // The sum makes 0 of -0.
    const auto bits = std::bit_cast<uint64_t>(value + 0.0);
    constexpr uint64_t kSign = uint64_t{1} << 63;
    return (bits & kSign ? ~bits : bits | kSign) >> (64 - kBits);
  }

  const std::vector<double>& edges_;
  std::vector<uint32_t> below_;  // edges with a smaller key
};

}  // namespace

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

  const size_t bins = edges.size() - 1;
  std::vector<int64_t> count(bins);
  // An index has a megabyte, so that of the default edges is kept.
  static const EdgeIndex index_of_default(default_bin_edges());
  std::optional<EdgeIndex> own;
  const EdgeIndex& index =
      &edges == &default_bin_edges() ? index_of_default : own.emplace(edges);
  bool any = false;
  const double* const data = all.const_data_ptr<double>();
  for (int64_t at = 0; at < all.numel(); ++at) {
    const double value = data[at];
    if (!(value >= edges.front() && value <= edges.back())) continue;
    any = true;
    ++count[std::min(index.not_above(value), bins) - 1];
  }
  if (!any) {
    result.limits = {edges.front(), edges.back()};
    result.counts = {0, 0};
    return result;
  }

  size_t first = 0;
  while (count[first] == 0) ++first;
  size_t last = bins - 1;
  while (count[last] == 0) --last;
  // Only right edges are written, so an empty bin before the first one gives
  // its left edge.
  result.limits.push_back(edges[first]);
  result.counts.push_back(0);
  for (size_t at = first; at <= last; ++at) {
    result.limits.push_back(edges[at + 1]);
    result.counts.push_back(static_cast<double>(count[at]));
  }
  return result;
}

}  // namespace lockstep::internal
