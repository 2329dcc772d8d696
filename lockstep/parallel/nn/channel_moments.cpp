#include "lockstep/parallel/nn/channel_moments.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

namespace lockstep::nn {
namespace {

// The least number of elements that at::parallel_for gives to a thread.
constexpr int64_t kElementsPerThread = 32768;
// The number of sums that grow in parallel: a single sum would wait for each
// addition.
constexpr int64_t kLanes = 8;
// Channels that are processed together: a cache line of float32.
constexpr int64_t kBlock = 16;

struct Moments {  // [channels] each
  double* mean;
  double* variance;

  void set(int64_t channel, double shift, double sum, double squares,
           int64_t count) const {
    auto n = static_cast<double>(count);
    mean[channel] = shift + sum / n;
    double spread = (squares - sum * sum / n) / n;
    // Rounding must not make the variance of a constant channel negative; NaN
    // stays.
    variance[channel] = spread < 0 ? 0 : spread;
  }
};

// For the layout [samples, channels, length].
template <typename Scalar>
void of_planes(const Scalar* input, int64_t samples, int64_t channels,
               int64_t length, const Moments& out) {
  int64_t grain = std::max<int64_t>(1, kElementsPerThread / (samples * length));
  at::parallel_for(0, channels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const auto shift = static_cast<double>(input[c * length]);
      std::array<double, kLanes> sum{}, squares{};
      for (int64_t n = 0; n < samples; ++n) {
        const Scalar* plane = input + (n * channels + c) * length;
        int64_t i = 0;
        for (; i + kLanes <= length; i += kLanes) {
          for (size_t lane = 0; lane < kLanes; ++lane) {
            double x = static_cast<double>(plane[i + lane]) - shift;
            sum[lane] += x;
            squares[lane] += x * x;
          }
        }
        for (size_t lane = 0; i < length; ++i, ++lane) {
          double x = static_cast<double>(plane[i]) - shift;
          sum[lane] += x;
          squares[lane] += x * x;
        }
      }
      for (size_t lane = 1; lane < kLanes; ++lane) {
        sum[0] += sum[lane];
        squares[0] += squares[lane];
      }
      out.set(c, shift, sum[0], squares[0], samples * length);
    }
  });
}

// For the layout [rows, channels]: kBlock channels at a time, so that their
// sums stay in registers.
template <typename Scalar>
void of_rows(const Scalar* input, int64_t rows, int64_t channels,
             const Moments& out) {
  int64_t blocks = (channels + kBlock - 1) / kBlock;
  int64_t grain = std::max<int64_t>(1, kElementsPerThread / (rows * kBlock));
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      std::array<double, kBlock> shift{}, sum{}, squares{};
      auto add_up = [&](auto width) {
        for (size_t c = 0; c < width; ++c) {
          shift[c] = static_cast<double>(input[first + c]);
        }
        for (int64_t row = 1; row < rows; ++row) {
          const Scalar* values = input + row * channels + first;
          for (size_t c = 0; c < width; ++c) {
            double x = static_cast<double>(values[c]) - shift[c];
            sum[c] += x;
            squares[c] += x * x;
          }
        }
        for (size_t c = 0; c < width; ++c) {
          out.set(first + static_cast<int64_t>(c), shift[c], sum[c], squares[c],
                  rows);
        }
      };
      if (first + kBlock <= channels) {
        add_up(std::integral_constant<size_t, kBlock>());
      } else {
        add_up(static_cast<size_t>(channels - first));
      }
    }
  });
}

}  // namespace

at::Tensor channel_moments(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  auto result = at::zeros({2 * channels + 1}, at::kDouble);
  if (input.numel() == 0) return result;
  const int64_t count = input.numel() / channels;
  auto* numbers = result.mutable_data_ptr<double>();
  const Moments out{numbers, numbers + channels};
  numbers[2 * channels] = static_cast<double>(count);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "channel_moments", [&] {
        const auto* values = input.const_data_ptr<scalar_t>();
        if (input.is_contiguous() && input.size(0) < count) {
          of_planes(values, input.size(0), channels, count / input.size(0),
                    out);
        } else {
          of_rows(values, count, channels, out);
        }
      });
  return result;
}

}  // namespace lockstep::nn
