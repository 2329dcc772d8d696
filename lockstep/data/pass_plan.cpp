#include "lockstep/data/pass_plan.h"

namespace lockstep::internal {

PassPlan::PassPlan(Sampler& sampler, int64_t batch_size, bool drop_last,
                   int64_t pass)
    : indices_(sampler.begin_pass()),
      places_(sampler.places()),
      epoch_(places_.epoch.value_or(pass)),
      batch_size_(static_cast<size_t>(batch_size)),
      batches_(batches_of(static_cast<int64_t>(indices_.size()), batch_size,
                          drop_last)) {}

PassPlan::PassPlan(SamplerOfBatches& sampler, int64_t pass) {
  BatchList list = sampler.begin_pass();
  indices_ = std::move(list.indices);
  ends_ = std::move(list.ends);
  places_of_indices_ = std::move(list.places);
  epoch_ = list.epoch.value_or(pass);
  batches_ = static_cast<int64_t>(ends_.size());
}

std::vector<SampleSeed> PassPlan::seeds(int64_t batch, int64_t seed) const {
  const auto [begin, end] = range(batch);
  std::vector<SampleSeed> seeds;
  seeds.reserve(end - begin);
  for (size_t i = begin; i < end; ++i) {
    const int64_t place =
        i < places_of_indices_.size()
            ? places_of_indices_[i]
            : places_.first + static_cast<int64_t>(i) * places_.stride;
    seeds.push_back(sample_seed(seed, epoch_, place, indices_[i]));
  }
  return seeds;
}

int64_t batches_of(int64_t samples, int64_t batch_size, bool drop_last) {
  return samples / batch_size +
         (!drop_last && samples % batch_size != 0 ? 1 : 0);
}

}  // namespace lockstep::internal
