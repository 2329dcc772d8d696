#include "lockstep/parallel/nn/input_gradient.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>

namespace lockstep::nn {
namespace {

// The least number of elements that at::parallel_for gives to a thread.
constexpr int64_t kElementsPerThread = 32768;

template <typename Scalar>
struct Terms {  // [channels] each
  using Math = at::opmath_type<Scalar>;
  const Math* mean;
  const Math* shift;
  const Math* slope;
  const Math* scale;
};

template <typename Scalar, typename Math>
Scalar gradient(Scalar grad, Scalar value, Math mean, Math shift, Math slope,
                Math scale) {
  auto deviation = static_cast<Math>(value) - mean;
  return static_cast<Scalar>(
      (static_cast<Math>(grad) - shift - deviation * slope) * scale);
}

// For planes of one channel each, [planes, length]; the channels repeat.
template <typename Scalar>
void by_planes(const Scalar* grad, const Scalar* input, Scalar* out,
               int64_t planes, int64_t length, int64_t channels,
               const Terms<Scalar>& terms) {
  int64_t grain = std::max<int64_t>(1, kElementsPerThread / length);
  at::parallel_for(0, planes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const int64_t c = plane % channels;
      // These are copies, because the compiler must assume that a store to
      // `out` changes what the pointers point to.
      const auto mean = terms.mean[c], shift = terms.shift[c];
      const auto slope = terms.slope[c], scale = terms.scale[c];
      const int64_t stop = (plane + 1) * length;
      for (int64_t i = plane * length; i < stop; ++i) {
        out[i] = gradient(grad[i], input[i], mean, shift, slope, scale);
      }
    }
  });
}

// For rows with one value per channel: [rows, channels].
template <typename Scalar>
void by_rows(const Scalar* grad, const Scalar* input, Scalar* out, int64_t rows,
             int64_t channels, const Terms<Scalar>& terms) {
  int64_t grain = std::max<int64_t>(1, kElementsPerThread / channels);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row * channels;
      for (int64_t c = 0; c < channels; ++c) {
        out[i + c] = gradient(grad[i + c], input[i + c], terms.mean[c],
                              terms.shift[c], terms.slope[c], terms.scale[c]);
      }
    }
  });
}

}  // namespace

at::Tensor input_gradient(const at::Tensor& grad_output,
                          const at::Tensor& input, const at::Tensor& mean,
                          const at::Tensor& shift, const at::Tensor& slope,
                          const at::Tensor& scale) {
  auto result = at::empty_like(input);
  const int64_t channels = input.size(1);
  if (input.numel() == 0) return result;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "input_gradient", [&] {
        using Math = at::opmath_type<scalar_t>;
        Terms<scalar_t> terms{
            mean.const_data_ptr<Math>(), shift.const_data_ptr<Math>(),
            slope.const_data_ptr<Math>(), scale.const_data_ptr<Math>()};
        const auto* g = grad_output.const_data_ptr<scalar_t>();
        const auto* x = input.const_data_ptr<scalar_t>();
        auto* y = result.mutable_data_ptr<scalar_t>();
        const int64_t planes = input.size(0) * channels;
        if (input.is_contiguous() && planes < input.numel()) {
          by_planes(g, x, y, planes, input.numel() / planes, channels, terms);
        } else {
          by_rows(g, x, y, input.numel() / channels, channels, terms);
        }
      });
  return result;
}

}  // namespace lockstep::nn
