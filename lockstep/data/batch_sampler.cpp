#include "lockstep/data/batch_sampler.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "lockstep/data/pass_plan.h"

namespace lockstep {

BatchSampler::BatchSampler(Sampler& sampler, int64_t batch_size, bool drop_last)
    : sampler_(sampler), batch_size_(batch_size), drop_last_(drop_last) {
  if (batch_size < 1) {
    throw std::invalid_argument("BatchSampler: batch_size is " +
                                std::to_string(batch_size) +
                                "; it must be 1 or more");
  }
}

BatchList BatchSampler::begin_pass() {
  BatchList list;
  list.indices = sampler_.begin_pass();
  const PassPlaces places = sampler_.places();
  list.epoch = places.epoch;
  const auto size = static_cast<size_t>(batch_size_);
  if (drop_last_) {
    list.indices.resize(list.indices.size() / size * size);
  }
  const size_t count = list.indices.size();
  list.places.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    list.places.push_back(places.first +
                          static_cast<int64_t>(i) * places.stride);
  }
  for (size_t begin = 0; begin < count; begin += size) {
    list.ends.push_back(std::min(begin + size, count));
  }
  batches_left_ = static_cast<int64_t>(list.ends.size());
  if (drop_last_ && batches_left_ == 0) sampler_.rest_left_out();
  return list;
}

void BatchSampler::consumed_batch() {
  sampler_.consumed(batch_size_);
  --batches_left_;
  if (drop_last_ && batches_left_ == 0) sampler_.rest_left_out();
}

int64_t BatchSampler::size() const {
  return internal::batches_of(sampler_.size(), batch_size_, drop_last_);
}

}  // namespace lockstep
