#include "tests/comm/shm/bucket_rounds.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm::testing {
namespace {

constexpr size_t kGuard = 64;
constexpr std::byte kGuarded{0xa5};

}  // namespace

BucketRank::BucketRank(Group& group, const Values& values, Rounds rounds)
    : group_(group), values_(values), rounds_(std::move(rounds)) {
  bytes_ = kGuard;
  std::vector<size_t> offsets;
  for (const auto& [count, dtype] : rounds_.buckets) {
    offsets.push_back(bytes_);
    const size_t bytes = count * kernels::size_of(dtype);
    bytes_ += (bytes + 63) / 64 * 64 + kGuard;
  }
  memory_ = static_cast<std::byte*>(group.allocate_registered(bytes_));
  std::memset(memory_, static_cast<int>(kGuarded), bytes_);
  std::vector<Bucket> buckets;
  for (size_t i = 0; i < offsets.size(); ++i) {
    data_.push_back(memory_ + offsets[i]);
    const auto& [count, dtype] = rounds_.buckets[i];
    std::vector<Range> owned;
    if (rounds_.uneven_owners) owned = owned_by(group.rank(), i);
    if (rounds_.empty_ranges) owned = {{.begin = 0, .end = 0}};
    buckets.push_back({.data = data_[i],
                       .count = count,
                       .dtype = dtype,
                       .owned = std::move(owned),
                       .movable = movable(i)});
    movable_.push_back(buckets.back().movable);
    places_.emplace_back(movable_.back().size(), kInBucket);
    for (const auto& range : movable_.back()) {
      arena_bytes_ += range.size() * kernels::size_of(dtype) + kGuard;
    }
  }
  BucketExchange::Arena arena;
  if (arena_bytes_ != 0) {
    arena_ = static_cast<std::byte*>(group.allocate_registered(arena_bytes_));
    arena = {arena_, arena_bytes_};
  }
  exchange_ = BucketExchange::make(group, buckets, rounds_.results,
                                   rounds_.timeout, arena);
  if (!exchange_) throw std::runtime_error("buckets cannot be reached");
}

BucketRank::~BucketRank() {
  exchange_.reset();
  group_.free_registered(memory_);
  group_.free_registered(arena_);
}

std::vector<Range> BucketRank::movable(size_t bucket) const {
  std::vector<Range> ranges;
  if (!rounds_.moving) return ranges;
  const auto count = static_cast<int64_t>(rounds_.buckets[bucket].count);
  int64_t begin = 0;
  for (uint64_t piece = 0; begin < count; ++piece) {
    const auto chance = mixed(bucket, piece, 99);
    const auto length = static_cast<int64_t>(1 + chance % (count / 4 + 2));
    const auto end = std::min(count, begin + length);
    if (chance / 64 % 3 != 0) ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

void BucketRank::choose_places(uint64_t step) {
  size_t all = 0;
  for (const auto& ranges : movable_) all += ranges.size();
  if (all == 0) return;
  std::memset(arena_, static_cast<int>(kGuarded), arena_bytes_);
  const size_t first = mixed(step, group_.rank(), 3) % all;
  size_t offset = 0;
  for (size_t i = 0; i < all; ++i) {
    size_t index = (first + i) % all, bucket = 0;
    while (index >= movable_[bucket].size()) {
      index -= movable_[bucket++].size();
    }
    const bool moves = mixed(step, index, group_.rank()) % 4 != 0;
    places_[bucket][index] = moves ? offset : kInBucket;
    offset += movable_[bucket][index].size() *
                  kernels::size_of(rounds_.buckets[bucket].dtype) +
              kGuard;
    offset = offset / 16 * 16;
  }
}

std::byte* BucketRank::element_at(size_t bucket, int64_t element) const {
  const auto bytes =
      static_cast<int64_t>(kernels::size_of(rounds_.buckets[bucket].dtype));
  for (size_t i = 0; i < movable_[bucket].size(); ++i) {
    const auto& [begin, end] = movable_[bucket][i];
    if (element < begin || element >= end) continue;
    if (places_[bucket][i] == kInBucket) break;
    return arena_ + places_[bucket][i] + (element - begin) * bytes;
  }
  return data_[bucket] + element * bytes;
}

std::vector<Range> BucketRank::owned_by(int rank, size_t bucket) const {
  const auto& [count, dtype] = rounds_.buckets[bucket];
  if (!rounds_.uneven_owners) {
    return {equal_slice({0, static_cast<int64_t>(count)}, rank, group_.size(),
                        kernels::size_of(dtype))};
  }
  std::vector<Range> owned;
  size_t begin = 0;
  for (uint64_t piece = 0; begin < count; ++piece) {
    const auto chance = mixed(bucket, piece, 77);
    const size_t end = std::min(count, begin + 1 + chance % (count / 3 + 2));
    // The last rank owns nothing of the buckets with odd numbers.
    const int owners =
        std::max<int>(1, group_.size() - static_cast<int>(bucket % 2));
    if (static_cast<int>(chance / 64 % owners) == rank) {
      owned.push_back({static_cast<int64_t>(begin), static_cast<int64_t>(end)});
    }
    begin = end;
  }
  return owned;
}

const std::byte* BucketRank::contribution(uint64_t step, size_t bucket,
                                          int rank) const {
  return values_.window(rounds_.buckets[bucket].dtype, step,
                        100 * bucket + rank);
}

void BucketRank::fill(uint64_t step, size_t bucket) {
  const auto& [count, dtype] = rounds_.buckets[bucket];
  if (count == 0) return;
  const auto* from = contribution(step, bucket, group_.rank());
  const size_t element = kernels::size_of(dtype);
  if (movable_[bucket].empty()) {
    std::memcpy(data_[bucket], from, count * element);
    return;
  }
  // The values in the bucket at a piece that was moved must not be used.
  std::memset(data_[bucket], 0x7e, count * element);
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(element_at(bucket, static_cast<int64_t>(i)), from + i * element,
                element);
  }
}

void BucketRank::compare(uint64_t step, size_t bucket) const {
  const auto& [count, dtype] = rounds_.buckets[bucket];
  const size_t element = kernels::size_of(dtype);
  if (count == 0) return;
  std::vector<const void*> sources;
  for (int rank = 0; rank < group_.size(); ++rank) {
    sources.push_back(contribution(step, bucket, rank));
  }
  std::vector<std::byte> expected(count * element);
  void* const result = expected.data();
  const double divisor = rounds_.divisor == 0 ? group_.size() : rounds_.divisor;
  const bool averages = divisor == group_.size();
  kernels::reduce_scalar({&result, 1}, sources, count, dtype,
                         averages ? ReduceOp::avg : ReduceOp::sum);
  if (!averages && divisor != 1) {
    kernels::scale_scalar(result, result, count, dtype, 1 / divisor);
  }
  const auto checked =
      rounds_.results == Results::everywhere
          ? std::vector<Range>{{0, static_cast<int64_t>(count)}}
          : owned_by(group_.rank(), bucket);
  for (const auto& [begin, end] : checked) {
    for (int64_t i = begin; i < end; ++i) {
      if (std::memcmp(element_at(bucket, i), expected.data() + i * element,
                      element) != 0) {
        throw std::runtime_error("step " + std::to_string(step) + ", bucket " +
                                 std::to_string(bucket) + ", element " +
                                 std::to_string(i) + " of " +
                                 std::to_string(count) + " is wrong");
      }
    }
  }
}

void BucketRank::compare_guards() const {
  const auto* at = memory_;
  for (size_t i = 0; i <= data_.size(); ++i) {
    const auto* end = i < data_.size() ? data_[i] : memory_ + bytes_;
    if (!std::all_of(at, end, [](std::byte b) { return b == kGuarded; })) {
      throw std::runtime_error("what lies before bucket " + std::to_string(i) +
                               " was written");
    }
    if (i == data_.size()) return;
    const auto& [count, dtype] = rounds_.buckets[i];
    at = end + count * kernels::size_of(dtype);
  }
}

void BucketRank::run(uint64_t step, const std::function<void()>& between) {
  exchange_->begin(static_cast<int64_t>(step),
                   rounds_.divisor == 0 ? group_.size() : rounds_.divisor);
  choose_places(step);
  for (size_t i = 0; i < data_.size(); ++i) {
    fill(step, i);
    if (between) between();
    exchange_->publish(i, places_[i]);
    if ((step + i) % 3 == 0) continue;
    const auto complete = exchange_->advance();
    if (complete > i + 1) throw std::runtime_error("complete too early");
    for (size_t done = 0; done < complete; ++done) compare(step, done);
  }
  exchange_->finish();
  for (size_t i = 0; i < data_.size(); ++i) compare(step, i);
  compare_guards();
}

void BucketRank::abandon(uint64_t step, size_t publishes) {
  exchange_->begin(static_cast<int64_t>(step), group_.size());
  choose_places(step);
  for (size_t i = 0; i < publishes && i < data_.size(); ++i) {
    fill(step, i);
    exchange_->publish(i, places_[i]);
    exchange_->advance();
  }
}

}  // namespace lockstep::internal::shm::testing
