#include "lockstep/comm/shm/protocol/bucket_exchange.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/collective.h"
#include "lockstep/kernels/kernels.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal::shm {
namespace {

// If a bucket is no larger than this, nor than one_shot_bytes of the tuning,
// copying it and reducing all of it on every rank is quicker than a second
// wait.
constexpr size_t kOneShotBytes = size_t{4} << 10;

// Returns where the memory lies; region 0 if no peer could reach it.
RegisteredMemory::Place place_of(Core& core, const void* data, size_t bytes) {
  const RegisteredMemory::Place nowhere{.region = 0, .offset = 0};
  return core.registered.find(data, bytes).value_or(nowhere);
}

BucketLayout layout_of(Core& core, const std::vector<Bucket>& buckets,
                       BucketExchange::Arena arena, Results results) {
  BucketLayout layout{.results = results, .buckets = buckets};
  for (const auto& bucket : buckets) {
    // No rank reaches for an empty bucket, so any region but 0 will do.
    layout.places.push_back(
        bucket.count == 0
            ? RegisteredMemory::Place{.region = 1, .offset = 0}
            : place_of(core, bucket.data,
                       bucket.count * kernels::size_of(bucket.dtype)));
  }
  if (arena.data != nullptr) {
    layout.arena = place_of(core, arena.data, arena.bytes);
    layout.arena_bytes = arena.bytes;
  }
  return layout;
}

// Returns the layouts of all ranks. Throws CallMismatch if they disagree.
std::vector<BucketLayout> exchanged(Group& group, const BucketLayout& own,
                                    uint64_t call, const Deadline& deadline) {
  auto& core = group.core();
  auto left = [&] { return std::max(deadline.remaining(), milliseconds(1)); };
  const auto words = own.encode();
  const auto sizes = gather_all(core,
                                {.operation = CollectiveKind::reduce_buckets,
                                 .dtype = DType::uint8,
                                 .agreed = 0},
                                uint64_t{words.size()}, left());
  std::vector<std::vector<uint64_t>> given;
  std::vector<Bytes> outputs;
  for (const auto size : sizes) given.emplace_back(size);
  for (auto& one : given) {
    outputs.push_back({.data = one.data(), .size = one.size() * 8});
  }
  group.all_gather(outputs, {.data = words.data(), .size = words.size() * 8},
                   DType::int64, left());
  std::vector<BucketLayout> layouts;
  std::vector<std::string> names;
  for (int rank = 0; rank < core.size; ++rank) {
    layouts.push_back(BucketLayout::decode(given[rank]));
    names.push_back(core.waiting.name(rank));
  }
  if (const auto wrong = disagreement(layouts, names)) {
    throw CallMismatch("the ranks disagree about the buckets of call #" +
                       std::to_string(call) + " (" + *wrong +
                       "); all must have buckets of the same sizes and dtypes, "
                       "each element owned once, and the same options "
                       "(place_gradients, gradient_as_bucket_view)");
  }
  return layouts;
}

bool all_reachable(std::span<const BucketLayout> layouts) {
  return std::ranges::all_of(layouts, [](const BucketLayout& layout) {
    return std::ranges::all_of(
        layout.places, [](const auto& place) { return place.region != 0; });
  });
}

bool have_arenas(std::span<const BucketLayout> layouts) {
  return std::ranges::all_of(layouts, [](const BucketLayout& layout) {
    return layout.arena.region != 0;
  });
}

size_t rounded_to_lines(size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

bool has_owners(std::span<const BucketLayout> layouts, size_t bucket) {
  return std::ranges::any_of(layouts, [&](const BucketLayout& layout) {
    return std::ranges::any_of(
        layout.buckets[bucket].owned,
        [](const Range& range) { return range.begin != range.end; });
  });
}

}  // namespace

std::unique_ptr<BucketExchange> BucketExchange::make(
    Group& group, const std::vector<Bucket>& buckets, Results results,
    milliseconds timeout, Arena arena, std::optional<milliseconds> for_making) {
  auto& core = group.core();
  const auto deadline = Deadline::after(for_making.value_or(timeout));
  auto left = [&] { return std::max(deadline.remaining(), milliseconds(1)); };
  const Collective::What what{.operation = CollectiveKind::reduce_buckets,
                              .dtype = DType::uint8,
                              .agreed = 0};
  const uint64_t call = core.sequence + 1;
  try {
    core.registered.look();
  } catch (const std::exception&) {  // reach() finds what was missed
  }
  // Every rank has read its sockets just before, so after this gather the way
  // to every peer has room for loans, which layout_of() may send.
  gather_all(core, what, uint8_t{0}, left());
  const auto layouts = exchanged(
      group, layout_of(core, buckets, arena, results), call, deadline);
  if (!all_reachable(layouts)) return nullptr;

  std::unique_ptr<BucketExchange> made;
  constexpr uint8_t kBuckets = 1, kArenas = 2;  // what this rank reaches
  Mapped mapped;
  uint8_t reached = 0;
  try {
    mapped = map(core, buckets, results, layouts);
    reached = kBuckets;
    map_arenas(core, arena, layouts, mapped);
    reached |= kArenas;
  } catch (const std::exception&) {  // `reached` says how far this rank came
  }
  const auto all = gather_all(core, what, reached, left());
  uint8_t by_all = kBuckets | kArenas;
  for (const uint8_t one : all) by_all &= one;
  if (!(by_all & kBuckets)) return nullptr;
  if (!(by_all & kArenas)) mapped.arenas.clear();
  try {
    made.reset(
        new BucketExchange(group, std::move(mapped), results, timeout, left()));
  } catch (const Unavailable&) {  // on all ranks
  }
  return made;
}

BucketExchange::Mapped BucketExchange::map(
    Core& core, const std::vector<Bucket>& buckets, Results results,
    std::span<const BucketLayout> layouts) {
  Mapped mapped;
  for (size_t i = 0; i < buckets.size(); ++i) {
    MappedBucket bucket{buckets[i]};
    bucket.offset = mapped.copy_bytes;
    bucket.first_place = mapped.places;
    mapped.places += bucket.movable.size();
    const size_t count = bucket.count;
    const size_t element = kernels::size_of(bucket.dtype);
    const size_t bytes = count * element;
    if (results == Results::everywhere && core.size > 1 &&
        bucket.movable.empty() &&
        bytes <= std::min(kOneShotBytes, core.tuning.one_shot_bytes)) {
      bucket.one_shot = true;
      mapped.copy_bytes += rounded_to_lines(bytes);
    }
    if (!has_owners(layouts, i)) {
      bucket.owned = {equal_slice({0, static_cast<int64_t>(count)}, core.rank,
                                  core.size, element)};
    }
    std::erase_if(bucket.owned,
                  [](const Range& one) { return one.size() == 0; });
    bucket.parts = parts_of(bucket);
    for (int peer = 0; count != 0 && peer < core.size; ++peer) {
      if (peer == core.rank) {
        bucket.by_rank.push_back(static_cast<std::byte*>(bucket.data));
        continue;
      }
      bucket.held.push_back(
          core.registered.reach(peer, layouts[peer].places[i], bytes));
      bucket.by_rank.push_back(bucket.held.back().get());
    }
    mapped.buckets.push_back(std::move(bucket));
  }
  return mapped;
}

void BucketExchange::map_arenas(Core& core, Arena arena,
                                std::span<const BucketLayout> layouts,
                                Mapped& mapped) {
  if (!have_arenas(layouts)) return;
  for (int peer = 0; peer < core.size; ++peer) {
    if (peer == core.rank) {
      mapped.arenas.push_back(static_cast<std::byte*>(arena.data));
      continue;
    }
    mapped.held.push_back(core.registered.reach(peer, layouts[peer].arena,
                                                layouts[peer].arena_bytes));
    mapped.arenas.push_back(mapped.held.back().get());
  }
}

std::vector<BucketExchange::Part> BucketExchange::parts_of(
    const Bucket& bucket) {
  std::vector<Part> parts;
  for (const auto& [begin, end] : bucket.owned) {
    int64_t at = begin;
    for (size_t i = 0; i < bucket.movable.size(); ++i) {
      const auto& [first, last] = bucket.movable[i];
      if (last <= at || first >= end) continue;
      if (at < first) parts.push_back({{at, first}, kFixed});
      const int64_t until = std::min(last, end);
      parts.push_back({{std::max(at, first), until}, i});
      at = until;
    }
    if (at < end) parts.push_back({{at, end}, kFixed});
  }
  return parts;
}

BucketExchange::BucketExchange(Group& group, Mapped mapped, Results results,
                               milliseconds timeout, milliseconds for_making)
    : core_(group.core()),
      buckets_(std::move(mapped.buckets)),
      copy_bytes_(mapped.copy_bytes),
      places_(mapped.places),
      arenas_(std::move(mapped.arenas)),
      held_arenas_(std::move(mapped.held)),
      results_(results),
      timeout_(timeout),
      memory_(group,
              core_.size * (sizeof(Counters) + 2 * copy_bytes_ +
                            rounded_to_lines(places_ * sizeof(uint64_t))),
              for_making) {}

uint64_t* BucketExchange::places(int of) const {
  return reinterpret_cast<uint64_t*>(
      memory_.data() + core_.size * (sizeof(Counters) + 2 * copy_bytes_) +
      of * rounded_to_lines(places_ * sizeof(uint64_t)));
}

BucketExchange::Counters& BucketExchange::own() const {
  return counters(core_.rank);
}

void BucketExchange::begin(int64_t iteration, double divisor) {
  if (!(divisor > 0)) {
    throw std::invalid_argument("a reduction of buckets has the divisor " +
                                std::to_string(divisor) +
                                "; it must be more than 0");
  }
  core_.standstill.thread_comes();
  reclaim();
  base_ = rounds_++ * buckets_.size();
  iteration_ = iteration;
  divisor_ = divisor;
  // Released by publish(); compare_iterations() reads it.
  own().iterations[rounds_ % 2].store(iteration, std::memory_order_relaxed);
  published_ = next_ = complete_ = 0;
  open_ = true;
  core_.registered.look_if_told();
}

void BucketExchange::abandon() {
  if (!open_ || abandoned_) return;
  abandoned_ = true;
  // Releases what this rank has published and reduced. Pairs with the loads in
  // reclaim() and given_up().
  own().given_up.store(rounds_, std::memory_order_seq_cst);
  core_.waiting.wake_sleepers();
}

void BucketExchange::abandon_all() {
  abandoned_ = true;
  // Pairs with the loads in reclaim() and given_up(), as above.
  own().given_up.store(~uint64_t{0}, std::memory_order_seq_cst);
  core_.waiting.wake_sleepers();
}

void BucketExchange::reclaim() {
  core_.waiting.throw_if_broken();
  if (!open_) return;
  abandon();
  // A peer may still be reducing what this rank published, and writing the
  // results into this rank's buckets.
  Patience patience(timeout_);
  const auto not_ended = [this](std::memory_order order) {
    return below(&Counters::given_up, rounds_, order) &
           below(&Counters::finished, rounds_, order);
  };
  await(not_ended, patience, [this] {
    return "has neither finished nor given up reduction " +
           std::to_string(rounds_) + ", which this rank has given up";
  });
  open_ = abandoned_ = false;
  for (int peer = 0; peer < core_.size; ++peer) {
    if (counters(peer).finished.load(std::memory_order_acquire) < rounds_) {
      continue;
    }
    throw CallMismatch(
        core_.waiting.name(core_.rank) + " has given up " + begun() +
        " (an exception ended its backward), but " + core_.waiting.name(peer) +
        " had all of its gradients and has finished it, so the replicas differ "
        "by a step; load a snapshot on all ranks, or broadcast the parameters "
        "of one rank");
  }
}

void BucketExchange::publish(size_t bucket, std::span<const uint64_t> places) {
  if (!open_ || abandoned_ || bucket != published_ ||
      bucket >= buckets_.size()) {
    throw std::logic_error(
        bucket_name(bucket) + " was published " +
        (open_ && !abandoned_
             ? "after " + std::to_string(published_) + " others"
             : "outside a reduction"));
  }
  core_.standstill.thread_comes();
  const auto& one = buckets_[bucket];
  if (one.one_shot && one.count != 0) {
    // Two reductions ago a peer read this place. Since then it has published
    // the buckets of the reduction in between, and this rank has waited for
    // that.
    std::memcpy(copy_of(core_.rank, one), one.data,
                one.count * kernels::size_of(one.dtype));
  }
  auto* const said = this->places(core_.rank) + one.first_place;
  for (size_t i = 0; i < one.movable.size(); ++i) {
    said[i] = places.empty() ? kInBucket : places[i];
  }
  ++published_;
  // Releases this rank's contribution and its places. Pairs with the loads in
  // all_have().
  own().published.store(base_ + published_, std::memory_order_seq_cst);
  core_.waiting.wake_sleepers();
}

std::byte* BucketExchange::copy_of(int of, const MappedBucket& bucket) const {
  return memory_.data() + core_.size * sizeof(Counters) +
         (2 * of + rounds_ % 2) * copy_bytes_ + bucket.offset;
}

bool BucketExchange::all_have(std::atomic<uint64_t> Counters::*counter,
                              size_t bucket, uint64_t& known,
                              std::memory_order order) const {
  const uint64_t value = base_ + bucket + 1;
  if (known >= value) return true;
  uint64_t least = ~uint64_t{0};
  for (int peer = 0; peer < core_.size; ++peer) {
    const auto count = (counters(peer).*counter).load(order);
    if (count < value) return false;
    least = std::min(least, count);
  }
  known = least;
  return true;
}

size_t BucketExchange::advance(std::memory_order order) {
  if (abandoned_) return complete_;
  while (next_ < published_ &&
         all_have(&Counters::published, next_, known_published_, order)) {
    if (next_ == 0) compare_iterations();
    const auto& bucket = buckets_[next_];
    Span span("comm", "reduce_bucket",
              {{"bucket", static_cast<int64_t>(next_)},
               {"bytes", static_cast<int64_t>(
                             bucket.count * kernels::size_of(bucket.dtype))}});
    reduce(bucket);
    ++next_;
    // Releases the results, and says that this rank has read the others'
    // contributions. Pairs with the loads in all_have() and below().
    own().reduced.store(base_ + next_, std::memory_order_seq_cst);
    core_.waiting.wake_sleepers();
  }
  if (results_ == Results::owned) return complete_ = next_;
  while (complete_ < next_ &&
         (buckets_[complete_].one_shot ||
          all_have(&Counters::reduced, complete_, known_reduced_, order))) {
    ++complete_;
  }
  return complete_;
}

// Called when all ranks have published the first bucket of this reduction, and
// with it the iteration that it belongs to.
void BucketExchange::compare_iterations() const {
  for (int peer = 0; peer < core_.size; ++peer) {
    const auto theirs =
        counters(peer).iterations[rounds_ % 2].load(std::memory_order_relaxed);
    if (theirs == iteration_) continue;
    throw CallMismatch(
        words_.difference + ": " + core_.waiting.name(core_.rank) + " " +
        words_.described(iteration_) + ", " + core_.waiting.name(peer) + " " +
        words_.described(theirs) + "; " + words_.remedy);
  }
}

void BucketExchange::reduce(const MappedBucket& bucket) const {
  if (core_.size == 1 && divisor_ == 1) return;
  if (bucket.one_shot) return reduce_copies(bucket);
  const auto piece =
      static_cast<int64_t>(kPieceBytes / kernels::size_of(bucket.dtype));
  for (const auto& [elements, movable] : bucket.parts) {
    for (int64_t at = elements.begin; at < elements.end; at += piece) {
      reduce_piece(bucket, movable, {at, std::min(at + piece, elements.end)});
    }
  }
}

std::byte* BucketExchange::address(int of, const MappedBucket& bucket,
                                   size_t movable, int64_t begin) const {
  const auto element = static_cast<int64_t>(kernels::size_of(bucket.dtype));
  if (movable != kFixed) {
    const uint64_t place = places(of)[bucket.first_place + movable];
    if (place != kInBucket) {
      return arenas_[of] + place +
             (begin - bucket.movable[movable].begin) * element;
    }
  }
  return bucket.by_rank[of] + begin * element;
}

void BucketExchange::reduce_piece(const MappedBucket& bucket, size_t movable,
                                  Range elements) const {
  const int n = core_.size;
  std::array<const void*, kMaxRanks> sources;
  // This rank's place comes first.
  std::array<void*, kMaxRanks> results;
  auto* const own = address(core_.rank, bucket, movable, elements.begin);
  results[0] = own;
  size_t written = 1;
  for (int peer = 0; peer < n; ++peer) {
    if (peer == core_.rank) {
      sources[peer] = own;
      continue;
    }
    auto* const theirs = address(peer, bucket, movable, elements.begin);
    sources[peer] = theirs;
    if (results_ == Results::everywhere) results[written++] = theirs;
  }
  const std::span<const void* const> from(sources.data(), n);
  if (divisor_ == n || divisor_ == 1) {
    kernels::reduce({results.data(), written}, from, elements.size(),
                    bucket.dtype,
                    divisor_ == 1 ? ReduceOp::sum : ReduceOp::avg);
    return;
  }
  kernels::reduce({results.data(), 1}, from, elements.size(), bucket.dtype,
                  ReduceOp::sum);
  // The sum is scaled in place last, because the other results are made from
  // it.
  for (size_t to = written; to-- > 0;) {
    kernels::scale(results[to], results[0], elements.size(), bucket.dtype,
                   1 / divisor_);
  }
}

void BucketExchange::reduce_copies(const MappedBucket& bucket) const {
  if (bucket.count == 0) return;
  void* const result = bucket.data;
  std::array<const void*, kMaxRanks> sources;
  for (int peer = 0; peer < core_.size; ++peer) {
    sources[peer] = peer == core_.rank ? result : copy_of(peer, bucket);
  }
  const bool averages = divisor_ == core_.size;
  kernels::reduce(
      {&result, 1}, {sources.data(), static_cast<size_t>(core_.size)},
      bucket.count, bucket.dtype, averages ? ReduceOp::avg : ReduceOp::sum);
  if (!averages && divisor_ != 1) {
    kernels::scale(result, result, bucket.count, bucket.dtype, 1 / divisor_);
  }
}

void BucketExchange::finish() {
  if (!open_ || abandoned_ || published_ != buckets_.size()) {
    throw std::logic_error(
        open_ && !abandoned_
            ? "finish() was called, but " + bucket_name(published_) +
                  " was not published"
            : "finish() was called for a reduction that was not begun");
  }
  Patience patience(timeout_);
  while (advance() < buckets_.size()) await_progress(patience);
  // If results are owned, peers may still be reading this rank's contributions.
  if (results_ == Results::owned) {
    const auto reading = [this](std::memory_order order) {
      return below(&Counters::reduced, base_ + buckets_.size(), order);
    };
    // A rank that reduced its part and then gave up ends the wait, but not that
    // for the others.
    while (reading(std::memory_order_acquire) != 0) {
      await(reading, patience, [this] {
        return "has not reduced its part of all buckets of reduction " +
               std::to_string(rounds_);
      });
      throw_if_given_up(reading);
    }
  }
  open_ = false;
  // Pairs with the load in reclaim().
  own().finished.store(rounds_, std::memory_order_seq_cst);
  core_.waiting.wake_sleepers();
}

void BucketExchange::await_progress(Patience& patience) {
  const size_t before = progress();
  if (core_.waiting.spin([&](std::memory_order order) {
        advance(order);
        return progress() != before;
      })) {
    return;
  }
  const bool reduced = next_ == buckets_.size();
  const auto missing = [&](std::memory_order order) {
    return reduced ? below(&Counters::reduced, base_ + complete_ + 1, order)
                   : below(&Counters::published, base_ + next_ + 1, order);
  };
  throw_if_given_up(missing);
  core_.sleep(
      patience,
      [&](std::memory_order order) {
        const auto ranks = missing(order);
        return given_up(ranks, order) != 0 ? 0 : ranks;
      },
      [&](uint64_t ranks) {
        return core_.complain(ranks, [&](int) {
          return reduced
                     ? "has not reduced its part of " + bucket_name(complete_)
                     : "has not published " + bucket_name(next_);
        });
      },
      size_in_words());
}

uint64_t BucketExchange::below(std::atomic<uint64_t> Counters::*counter,
                               uint64_t value, std::memory_order order) const {
  uint64_t ranks = 0;
  for (int peer = 0; peer < core_.size; ++peer) {
    if ((counters(peer).*counter).load(order) < value) {
      ranks |= uint64_t{1} << peer;
    }
  }
  return ranks;
}

uint64_t BucketExchange::given_up(uint64_t missing,
                                  std::memory_order order) const {
  return missing & ~below(&Counters::given_up, rounds_, order);
}

std::string BucketExchange::begun() const { return words_.name(iteration_); }

void BucketExchange::throw_if_given_up(const Missing& missing) const {
  const auto order = std::memory_order_acquire;
  if (given_up(missing(order), order) == 0) return;
  // Now that the giving up is seen, everything that the rank did before is seen
  // too, so it may not be missing any more.
  const auto ranks = given_up(missing(order), order);
  if (ranks == 0) return;
  // A rank may have given up because the group is broken.
  for (const auto& departure : core_.waiting.departures()) {
    if (!departure.failed) continue;
    core_.waiting.fail(departure.words, RankState::kTold);
  }
  std::string names;
  for (int peer = 0; peer < core_.size; ++peer) {
    if ((ranks >> peer & 1) == 0) continue;
    names += (names.empty() ? "" : ", ") + core_.waiting.name(peer);
  }
  throw CallMismatch(names + " has given up " + begun() +
                     " (an exception ended its backward); catch this, and go "
                     "on with the next forward on all ranks");
}

void BucketExchange::await(
    const Missing& missing, Patience& patience,
    const std::function<std::string()>& complaint) const {
  const auto waited_for = [&](std::memory_order order) {
    const auto ranks = missing(order);
    return abandoned_ || given_up(ranks, order) == 0 ? ranks : 0;
  };
  if (core_.waiting.spin(
          [&](std::memory_order order) { return waited_for(order) == 0; })) {
    return;
  }
  core_.sleep(
      patience, waited_for,
      [&](uint64_t ranks) {
        return core_.complain(ranks, [&](int) { return complaint(); });
      },
      size_in_words());
}

std::string BucketExchange::size_in_words() const {
  size_t elements = 0;
  for (const auto& bucket : buckets_) elements += bucket.count;
  return " of " + std::to_string(elements) + " elements";
}

std::string BucketExchange::bucket_name(size_t bucket) const {
  return "bucket " + std::to_string(bucket + 1) + " of " +
         std::to_string(buckets_.size()) + " of reduction " +
         std::to_string(rounds_);
}

}  // namespace lockstep::internal::shm
