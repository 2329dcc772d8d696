#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/comm/shm/protocol/bucket_layout.h"
#include "lockstep/comm/shm/protocol/collective.h"
#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm {
namespace {

std::byte* bytes_at(void* data, size_t offset) {
  return static_cast<std::byte*>(data) + offset;
}
const std::byte* bytes_at(const void* data, size_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

// The ranks' data for one kernel, in rank order.
struct Sources {
  std::array<const void*, kMaxRanks> data;
  std::span<const void* const> of(int ranks) const {
    return {data.data(), static_cast<size_t>(ranks)};
  }
};

// One reduction of `count` elements, which each rank has at `data`.
struct Reduction {
  Core& core;
  Collective& call;
  std::byte* data;
  size_t count;
  DType dtype;
  ReduceOp op;
  int root;  // the rank that gets the result; -1 means all

  size_t element() const { return kernels::size_of(dtype); }
  bool has_result(int rank) const { return root < 0 || root == rank; }
};

void reduce_one_shot(const Reduction& r) {
  const size_t bytes = r.count * r.element();
  if (bytes != 0) std::memcpy(r.call.room(bytes), r.data, bytes);
  r.call.announce(bytes);
  r.call.wait_for_all();
  if (!r.has_result(r.core.rank)) return;
  Sources sources;
  for (int peer = 0; peer < r.core.size; ++peer) {
    sources.data[peer] = peer == r.core.rank ? r.data : r.call.data(peer);
  }
  void* const destination = r.data;
  kernels::reduce({&destination, 1}, sources.of(r.core.size), r.count, r.dtype,
                  r.op);
}

// Reduces memory that every rank reaches: each rank reduces its slice of all
// ranks' data, and writes the result to all ranks that get it.
void reduce_in_place(const Reduction& r,
                     const std::array<std::byte*, kMaxRanks>& data) {
  const int n = r.core.size;
  const auto own = equal_slice({0, static_cast<int64_t>(r.count)}, r.core.rank,
                               n, r.element());
  const auto piece = static_cast<int64_t>(kPieceBytes / r.element());
  for (int64_t at = own.begin; at < own.end; at += piece) {
    Sources sources;
    std::array<void*, kMaxRanks> destinations;
    size_t results = 0;
    for (int peer = 0; peer < n; ++peer) {
      auto* place = bytes_at(data[peer], at * r.element());
      sources.data[peer] = place;
      if (r.has_result(peer)) destinations[results++] = place;
    }
    kernels::reduce({destinations.data(), results}, sources.of(n),
                    std::min(piece, own.end - at), r.dtype, r.op);
  }
  const uint64_t done = ++r.core.chunks;
  r.call.publish(r.core.own().reduced, done);
  r.call.await_all(&RankState::reduced, done);
}

// Reduces in chunks (`round` counts them). For each chunk, a rank copies to its
// staging memory what the others will reduce. It reduces its slice of the
// chunk, from its own data and the others' staging memory, and puts the result
// where its own contribution would have been staged. Then it copies out what
// the others reduced. Copying in is one chunk ahead.
class StagedReduction {
 public:
  explicit StagedReduction(const Reduction& r)
      : r_(r),
        by_(r.core.segment.chunking(r.count * r.element())),
        rounds_(divided_up(r.count * r.element(), by_.bytes)),
        chunk_(chunk_of(r, rounds_)),
        first_(r.core.chunks) {
    r.core.chunks += rounds_;
  }

  void run() {
    stage(0);
    for (uint64_t round = 0; round < rounds_; ++round) {
      if (round + 1 < rounds_) stage(round + 1);
      reduce(round);
      if (r_.has_result(r_.core.rank)) copy_out(round);
    }
    // The root may read this rank's results later: before a rank writes there
    // again, all ranks have announced the next operation.
  }

 private:
  // Divides all elements equally into chunks of whole cache lines: a short last
  // chunk would cost as many waits as a long one.
  static int64_t chunk_of(const Reduction& r, uint64_t rounds) {
    const size_t line = kCacheLine / r.element();
    return static_cast<int64_t>(divided_up(divided_up(r.count, rounds), line) *
                                line);
  }
  Range clipped(Range whole) const {
    const auto count = static_cast<int64_t>(r_.count);
    return {std::min(whole.begin, count), std::min(whole.end, count)};
  }
  Range chunk(uint64_t round) const {
    const auto begin = static_cast<int64_t>(round) * chunk_;
    return {begin, begin + chunk_};
  }
  // The slice of `rank` in a chunk. In the last, shorter chunk too it has the
  // borders of a whole chunk: stage() must leave out everything that a peer may
  // still be copying from the chunk that was in this slot before.
  Range slice_of(int rank, uint64_t round) const {
    return clipped(equal_slice(chunk(round), rank, r_.core.size, r_.element()));
  }
  // Returns where element `at` of a chunk lies in `rank`'s staging memory.
  std::byte* staged(int rank, uint64_t round, int64_t at) const {
    return r_.core.segment.staging(rank, first_ + round, by_) +
           (at - chunk(round).begin) * r_.element();
  }

  void stage(uint64_t round) {
    if (round >= by_.slots) {
      r_.call.await_all(&RankState::reduced, first_ + round - by_.slots + 1);
    }
    const auto all = clipped(chunk(round));
    const auto own = slice_of(r_.core.rank, round);
    for (const auto part :
         {Range{all.begin, own.begin}, Range{own.end, all.end}}) {
      kernels::copy(staged(r_.core.rank, round, part.begin),
                    r_.data + part.begin * r_.element(),
                    part.size() * r_.element(), r_.call.stores());
    }
    r_.call.publish(r_.core.own().staged, first_ + round + 1);
  }

  void reduce(uint64_t round) {
    r_.call.await_all(&RankState::staged, first_ + round + 1);
    const int rank = r_.core.rank;
    const auto own = slice_of(rank, round);
    auto* here = r_.data + own.begin * r_.element();
    auto* there = staged(rank, round, own.begin);
    Sources sources;
    for (int peer = 0; peer < r_.core.size; ++peer) {
      sources.data[peer] = peer == rank ? here : staged(peer, round, own.begin);
    }
    const bool keeps = r_.has_result(rank);
    const bool gives = r_.root != rank;
    const auto stores = r_.call.stores();
    // Past the caches goes a copy of what is kept in them.
    const bool copies = keeps && gives && stores == kernels::Stores::streaming;
    std::array<void*, 2> destinations;
    size_t results = 0;
    if (keeps) destinations[results++] = here;
    if (gives && !copies) destinations[results++] = there;
    kernels::reduce({destinations.data(), results}, sources.of(r_.core.size),
                    own.size(), r_.dtype, r_.op,
                    keeps ? kernels::Stores::cached : stores);
    if (copies) {
      kernels::copy(there, here, own.size() * r_.element(), stores);
    }
    r_.call.publish(r_.core.own().reduced, first_ + round + 1);
  }

  void copy_out(uint64_t round) {
    // Each rank begins with the next rank, so that not all read from the same
    // one.
    for (int step = 1; step < r_.core.size; ++step) {
      const int peer = (r_.core.rank + step) % r_.core.size;
      r_.call.await(peer, r_.core.segment.state(peer).reduced,
                    first_ + round + 1);
      const auto part = slice_of(peer, round);
      kernels::copy(r_.data + part.begin * r_.element(),
                    staged(peer, round, part.begin),
                    part.size() * r_.element());
    }
  }

  const Reduction& r_;
  const Chunking by_;
  const uint64_t rounds_;
  const int64_t chunk_;  // elements
  const uint64_t first_;
};

// Returns whether every rank reaches the memory of all others. `lacking` are
// the ranks, as bits, whose memory this one does not reach. Waits for all
// ranks; needed only if a region is new to some rank.
bool all_reach_all(const Reduction& r, RegisteredMemory::Place own,
                   uint64_t lacking) {
  const int n = r.core.size;
  r.call.sizes()[0] = lacking;  // unused otherwise: all counts are equal
  const uint64_t said = ++r.core.chunks;
  r.call.publish(r.core.own().staged, said);
  for (int peer = 0; peer < n; ++peer) {
    r.call.await(peer, r.core.segment.state(peer).staged, said);
    lacking |= r.call.sizes(peer)[0];
  }
  r.core.registered.settle(own, (lacking >> r.core.rank & 1) == 0);
  return lacking == 0;
}

void reduce_large(const Reduction& r) {
  const size_t bytes = r.count * r.element();
  const auto place = r.core.registered.find(r.data, bytes);
  if (place) {
    r.call.announce(*place);
  } else {
    r.call.announce(0, r.has_result(r.core.rank) ? bytes : 0);
  }
  r.call.wait_for_all();
  std::array<std::byte*, kMaxRanks> data;
  std::array<std::shared_ptr<std::byte>, kMaxRanks> held;
  // All ranks see the same announcements, so all of them decide alike.
  bool all_registered = true;
  bool all_reached = true;
  for (int peer = 0; peer < r.core.size; ++peer) {
    const auto given = r.call.place(peer);
    all_registered &= given.has_value();
    all_reached &= given && given->reached;
  }
  if (!all_registered) {
    StagedReduction(r).run();
    return;
  }
  uint64_t lacking = 0;
  std::string why;
  for (int peer = 0; peer < r.core.size; ++peer) {
    data[peer] = r.data;
    if (peer == r.core.rank) continue;
    try {
      held[peer] = r.core.registered.reach(peer, *r.call.place(peer), bytes);
      data[peer] = held[peer].get();
    } catch (const std::exception& error) {
      lacking |= uint64_t{1} << peer;
      why = "the memory of " + r.core.waiting.name(peer) +
            " cannot be reached: " + error.what();
    }
  }
  if (all_reached) {
    // The peers will wait for this rank's slice, so the group cannot go on.
    if (lacking != 0) r.core.waiting.fail(why);
  } else if (!all_reach_all(r, *place, lacking)) {
    StagedReduction(r).run();
    return;
  }
  reduce_in_place(r, data);
}

void reduce_any(const Reduction& r) {
  if (r.count * r.element() <= r.core.tuning.one_shot_bytes) {
    reduce_one_shot(r);
  } else if (r.core.size == 1) {
    r.call.announce(0);
    void* const data = r.data;
    const void* const source = data;
    kernels::reduce({&data, 1}, {&source, 1}, r.count, r.dtype, r.op);
  } else {
    reduce_large(r);
  }
}

// The parts of a reduce_scatter, one for each rank.
struct Parts {
  std::byte* output;
  std::span<const void* const> inputs;
  std::span<const size_t> counts;
  DType dtype;
  ReduceOp op;
  size_t element() const { return kernels::size_of(dtype); }
};

void scatter_one_shot(Core& core, Collective& call, const Parts& parts,
                      size_t total) {
  auto* room = call.room(total * parts.element());
  size_t offset = 0;
  size_t own_offset = 0;
  for (int peer = 0; peer < core.size; ++peer) {
    const size_t bytes = parts.counts[peer] * parts.element();
    if (bytes != 0) std::memcpy(room + offset, parts.inputs[peer], bytes);
    if (peer == core.rank) own_offset = offset;
    offset += bytes;
  }
  call.announce(offset);
  call.wait_for_all();
  Sources sources;
  for (int peer = 0; peer < core.size; ++peer) {
    sources.data[peer] = peer == core.rank ? parts.inputs[core.rank]
                                           : call.data(peer) + own_offset;
  }
  void* const output = parts.output;
  kernels::reduce({&output, 1}, sources.of(core.size), parts.counts[core.rank],
                  parts.dtype, parts.op);
}

// Reduces one piece for each rank at a time (a `round`); copying in is one
// round ahead.
void scatter_staged(Core& core, Collective& call, const Parts& parts) {
  const int n = core.size;
  const size_t element = parts.element();
  size_t total = 0;
  for (const size_t count : parts.counts) total += count * element;
  const auto by = core.segment.chunking(total);
  const size_t piece_bytes = by.bytes / n / kCacheLine * kCacheLine;
  const size_t piece = piece_bytes / element;
  const size_t longest = *std::ranges::max_element(parts.counts);
  const uint64_t rounds = divided_up(longest, piece);
  const uint64_t first = core.chunks;
  core.chunks += rounds;
  auto range = [&](int of, uint64_t round) -> Range {
    const size_t count = parts.counts[of];
    return {static_cast<int64_t>(std::min(count, round * piece)),
            static_cast<int64_t>(std::min(count, (round + 1) * piece))};
  };
  auto stage = [&](uint64_t round) {
    if (round >= by.slots) {
      call.await_all(&RankState::reduced, first + round - by.slots + 1);
    }
    auto* slot = core.segment.staging(core.rank, first + round, by);
    for (int peer = 0; peer < n; ++peer) {
      const auto part = range(peer, round);
      if (peer == core.rank || part.size() == 0) continue;
      kernels::copy(slot + peer * piece_bytes,
                    bytes_at(parts.inputs[peer], part.begin * element),
                    part.size() * element, call.stores());
    }
    call.publish(core.own().staged, first + round + 1);
  };
  stage(0);
  for (uint64_t round = 0; round < rounds; ++round) {
    if (round + 1 < rounds) stage(round + 1);
    call.await_all(&RankState::staged, first + round + 1);
    const auto own = range(core.rank, round);
    if (own.size() != 0) {
      Sources sources;
      for (int peer = 0; peer < n; ++peer) {
        sources.data[peer] =
            peer == core.rank
                ? bytes_at(parts.inputs[peer], own.begin * element)
                : core.segment.staging(peer, first + round, by) +
                      core.rank * piece_bytes;
      }
      void* const output = bytes_at(parts.output, own.begin * element);
      kernels::reduce({&output, 1}, sources.of(n), own.size(), parts.dtype,
                      parts.op);
    }
    call.publish(core.own().reduced, first + round + 1);
  }
}

}  // namespace

void Group::all_reduce(void* data, size_t count, DType dtype, ReduceOp op,
                       milliseconds timeout) {
  Collective call(*core_,
                  {.operation = CollectiveKind::all_reduce,
                   .dtype = dtype,
                   .reduce_op = op,
                   .agreed = count},
                  timeout);
  reduce_any({.core = *core_,
              .call = call,
              .data = static_cast<std::byte*>(data),
              .count = count,
              .dtype = dtype,
              .op = op,
              .root = -1});
}

void Group::reduce(void* data, size_t count, DType dtype, ReduceOp op, int root,
                   milliseconds timeout) {
  Collective call(*core_,
                  {.operation = CollectiveKind::reduce,
                   .dtype = dtype,
                   .reduce_op = op,
                   .root = root,
                   .agreed = count},
                  timeout);
  reduce_any({.core = *core_,
              .call = call,
              .data = static_cast<std::byte*>(data),
              .count = count,
              .dtype = dtype,
              .op = op,
              .root = root});
}

void Group::reduce_scatter(void* output, std::span<const void* const> inputs,
                           std::span<const size_t> counts, DType dtype,
                           ReduceOp op, milliseconds timeout) {
  const int n = core_->size;
  const bool even = std::ranges::all_of(
      counts, [&](size_t count) { return count == counts[0]; });
  Collective call(*core_,
                  {.operation = CollectiveKind::reduce_scatter,
                   .dtype = dtype,
                   .reduce_op = op,
                   .agreed = even ? counts[0] : kSizesDiffer},
                  timeout);
  const Parts parts{.output = static_cast<std::byte*>(output),
                    .inputs = inputs,
                    .counts = counts,
                    .dtype = dtype,
                    .op = op};
  size_t total = 0;
  auto sizes = call.sizes();
  for (int peer = 0; peer < n; ++peer) {
    total += counts[peer];
    if (even) continue;
    sizes[peer] = counts[peer] * parts.element();
    sizes[n + peer] = counts[core_->rank] * parts.element();
  }
  if (even && total * parts.element() <= core_->tuning.one_shot_bytes) {
    scatter_one_shot(*core_, call, parts, total);
    return;
  }
  call.announce(0, total * parts.element());
  call.wait_for_all();
  if (!even) call.compare_sizes();
  scatter_staged(*core_, call, parts);
}

}  // namespace lockstep::internal::shm
