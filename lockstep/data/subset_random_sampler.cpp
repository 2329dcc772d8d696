#include "lockstep/data/subset_random_sampler.h"

#include <algorithm>

#include "lockstep/state/digest.h"

namespace lockstep {
namespace {

int64_t digest_of_indices(const std::vector<size_t>& indices) {
  internal::Digest digest;
  for (const size_t index : indices) digest.add(uint64_t{index});
  return static_cast<int64_t>(digest.value());
}

int64_t size_for(const std::vector<size_t>& indices) {
  return indices.empty()
             ? 0
             : static_cast<int64_t>(*std::ranges::max_element(indices)) + 1;
}

}  // namespace

SubsetRandomSampler::SubsetRandomSampler(
    std::vector<size_t> indices, const SubsetRandomSamplerOptions& options)
    : ResumableSampler("SubsetRandomSampler",
                       static_cast<int64_t>(indices.size()), size_for(indices),
                       options.seed, internal::Share{}, NextPass::next_epoch),
      indices_(std::move(indices)),
      digest_(digest_of_indices(indices_)) {}

at::Tensor SubsetRandomSampler::order(uint64_t generator_seed) const {
  at::Tensor order = internal::random_order(
      static_cast<int64_t>(indices_.size()), generator_seed);
  int64_t* values = order.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < indices_.size(); ++i) {
    values[i] = static_cast<int64_t>(indices_[values[i]]);
  }
  return order;
}

std::vector<internal::EpochState::Fixed> SubsetRandomSampler::order_entries()
    const {
  return {{.name = "indices",
           .value = digest_,
           .kind = internal::EpochState::Fixed::Kind::digest}};
}

}  // namespace lockstep
