#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/data/mapped.h"
#include "lockstep/data/sample_random.h"

namespace lockstep::internal {

struct ImageSize {
  int64_t height = 0;
  int64_t width = 0;
};

// Returns the last two sizes. Throws std::invalid_argument that names
// `transform` if the tensor has fewer than two dimensions, or no pixel.
ImageSize image_size(const at::Tensor& image, const char* transform);

// Throws std::invalid_argument unless both are 1 or more.
void check_target_size(int64_t height, int64_t width, const char* transform);

// Returns a view of a part of the image. Requires that it lies inside.
at::Tensor crop(const at::Tensor& image, int64_t top, int64_t left,
                ImageSize size);

// Adds pixels of `value` on the left and right, and above and below.
at::Tensor pad(const at::Tensor& image, int64_t horizontal, int64_t vertical,
               double value);

}  // namespace lockstep::internal

namespace lockstep {

// Several transforms as one, applied in their order, as torchvision's Compose:
//
//   MapDataset train(files, Compose(RandomResizedCrop(224),
//                                   RandomHorizontalFlip(), ToFloat()));
//
// Each is called as MapDataset calls its transform: with the sample, or with
// its data alone if it takes a tensor; with the random numbers of the sample,
// one after another, if it takes them. Several threads may call it if they may
// call each transform.
template <class... Transforms>
class Compose {
 public:
  explicit Compose(Transforms... transforms)
      : transforms_(std::move(transforms)...) {}

  template <class Sample>
  auto operator()(Sample sample, SampleRandom& random) const {
    return apply<0>(std::move(sample), random);
  }

 private:
  template <size_t I, class Sample>
  auto apply(Sample sample, SampleRandom& random) const {
    if constexpr (I == sizeof...(Transforms)) {
      return sample;
    } else {
      return apply<I + 1>(internal::apply_transform(std::get<I>(transforms_),
                                                    std::move(sample), random),
                          random);
    }
  }

  std::tuple<Transforms...> transforms_;
};

// Converts to float32: uint8 from [0, 255] to [0, 1], as torchvision's ToTensor
// does; floating-point numbers keep their value. Any shape, any thread.
class ToFloat {
 public:
  // Throws std::invalid_argument for other integers and bools: their range is
  // not known.
  at::Tensor operator()(const at::Tensor& tensor) const;
};

// Subtracts a mean from each channel of images [..., C, H, W] and divides by a
// standard deviation, in the image's floating-point dtype: torchvision's
// Normalize. The input is not changed. Any thread may call.
class Normalize {
 public:
  // One number for each channel, or one for all. Throws std::invalid_argument
  // if there are none, if the two lists differ in length, or if a deviation
  // is 0.
  Normalize(const std::vector<double>& mean,
            const std::vector<double>& deviation);

  // Throws std::invalid_argument if the image is not floating-point (use
  // ToFloat before), or has another number of channels.
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  at::Tensor mean_;       // float64 [C, 1, 1]
  at::Tensor deviation_;  // the same
};

struct ResizeOptions {
  // Whether to average over all pixels that become one when an image gets
  // smaller, as Pillow does.
  bool antialias{true};
};

// Resizes images [H, W], [C, H, W] or [B, C, H, W], uint8 or floating-point, by
// bilinear interpolation: torch.nn.functional.interpolate(mode="bilinear",
// align_corners=False), with the same result for the same dtype. The input is
// not changed. Any thread may call.
class Resize {
 public:
  // Makes the shorter side this long and keeps the proportions; the longer side
  // is rounded down (torchvision's Resize with one number). Throws
  // std::invalid_argument if it is less than 1.
  explicit Resize(int64_t shorter_side, ResizeOptions options = {});

  // Makes the image exactly this large.
  Resize(int64_t height, int64_t width, ResizeOptions options = {});

  // Throws std::invalid_argument if it is not an image of these kinds.
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  int64_t height_;  // or the shorter side, if width_ is 0
  int64_t width_;
  ResizeOptions options_;
};

// Cuts out the middle of images [..., H, W] of any dtype, as torchvision's
// CenterCrop: an image that is smaller gets a border of zeros before. The
// result may share the input's memory, which is not changed. Any thread may
// call.
class CenterCrop {
 public:
  // Throws std::invalid_argument if a size is less than 1.
  explicit CenterCrop(int64_t size) : CenterCrop(size, size) {}
  CenterCrop(int64_t height, int64_t width);

  at::Tensor operator()(const at::Tensor& image) const;

 private:
  int64_t height_;
  int64_t width_;
};

struct RandomCropOptions {
  // Pixels that are added on each of the four sides before.
  int64_t padding{0};

  // Whether to add pixels to an image that is still too small: as many as it
  // lacks, on both sides. If not, such an image is an error.
  bool pad_if_needed{false};

  // The value of added pixels.
  double fill{0};
};

// Cuts a part out of images [..., H, W] of any dtype at a random place, each
// place equally likely, as torchvision's RandomCrop. The result may share the
// input's memory, which is not changed. Any thread may call.
class RandomCrop {
 public:
  // Throws std::invalid_argument if a size is less than 1, or padding less
  // than 0.
  explicit RandomCrop(int64_t size, RandomCropOptions options = {})
      : RandomCrop(size, size, options) {}
  RandomCrop(int64_t height, int64_t width, RandomCropOptions options = {});

  // Throws std::invalid_argument if the image is too small.
  at::Tensor operator()(const at::Tensor& image, SampleRandom& random) const;

 private:
  int64_t height_;
  int64_t width_;
  RandomCropOptions options_;
};

struct RandomResizedCropOptions {
  // The least and the largest part of the image's area that is cut out.
  std::array<double, 2> scale{0.08, 1.0};

  // The least and the largest width divided by height of what is cut out.
  std::array<double, 2> ratio{3.0 / 4, 4.0 / 3};

  // As in Resize.
  bool antialias{true};
};

// Cuts a part of random size and shape out of an image at a random place, and
// resizes it: torchvision's RandomResizedCrop (from Szegedy et al., "Going
// deeper with convolutions", 2014), with the same distribution. The images are
// those that Resize takes; the input is not changed. Any thread may call.
class RandomResizedCrop {
 public:
  // Throws std::invalid_argument if a size is less than 1, or a range is not
  // two numbers above 0 in their order.
  explicit RandomResizedCrop(int64_t size,
                             RandomResizedCropOptions options = {})
      : RandomResizedCrop(size, size, options) {}
  RandomResizedCrop(int64_t height, int64_t width,
                    RandomResizedCropOptions options = {});

  at::Tensor operator()(const at::Tensor& image, SampleRandom& random) const;

 private:
  RandomResizedCropOptions options_;
  Resize resize_;
};

// Mirrors images [..., H, W] of any dtype, left to right, with a probability:
// torchvision's RandomHorizontalFlip. The input is not changed. Any thread may
// call.
class RandomHorizontalFlip {
 public:
  // Throws std::invalid_argument if the probability is not in [0, 1].
  explicit RandomHorizontalFlip(double probability = 0.5);

  at::Tensor operator()(const at::Tensor& image, SampleRandom& random) const;

 private:
  double probability_;
};

}  // namespace lockstep
