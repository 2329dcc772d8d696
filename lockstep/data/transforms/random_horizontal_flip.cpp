#include "lockstep/data/transforms/random_horizontal_flip.h"

#include <stdexcept>
#include <string>

#include "lockstep/data/transforms/image_size.h"

namespace lockstep {

RandomHorizontalFlip::RandomHorizontalFlip(double probability)
    : probability_(probability) {
  if (!(probability >= 0 && probability <= 1)) {
    throw std::invalid_argument("RandomHorizontalFlip: the probability is " +
                                std::to_string(probability) +
                                "; it must be in [0, 1]");
  }
}

at::Tensor RandomHorizontalFlip::operator()(const at::Tensor& image,
                                            SampleRandom& random) const {
  internal::image_size(image, "RandomHorizontalFlip");
  return random.chance(probability_) ? image.flip({-1}) : image;
}

}  // namespace lockstep
