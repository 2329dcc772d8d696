#include <algorithm>
#include <cstring>
#include <vector>

#include "lockstep/comm/shm/protocol/collective.h"
#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm {
namespace {

// One piece that this rank takes: bytes of the stream of rank `from`, from
// `offset` on.
struct Take {
  int from;
  size_t offset;
  Bytes to;
};

size_t total(std::span<const ConstBytes> pieces) {
  size_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size;
  return bytes;
}

// Copies [offset, offset + size) of `pieces` laid end to end.
void copy_range(std::byte* to, std::span<const ConstBytes> pieces,
                size_t offset, size_t size,
                kernels::Stores stores = kernels::Stores::cached) {
  for (const auto& piece : pieces) {
    if (size == 0) return;
    if (offset >= piece.size) {
      offset -= piece.size;
      continue;
    }
    const size_t part = std::min(piece.size - offset, size);
    kernels::copy(to, static_cast<const std::byte*>(piece.data) + offset, part,
                  stores);
    to += part;
    size -= part;
    offset = 0;
  }
}

void copy_own(const Bytes& to, const ConstBytes& from) {
  if (to.size != 0 && to.data != from.data) {
    kernels::copy(to.data, from.data, to.size);
  }
}

// The algorithm of all operations that only move data. Each rank has a stream
// of bytes (its pieces laid end to end, perhaps none), of which other ranks
// take ranges. A stream of up to tuning.one_shot_bytes travels with the
// announcement. A longer one goes through staging memory a chunk at a time
// (`round` counts the chunks), copied in one chunk ahead.
class Movement {
 public:
  Movement(Core& core, Collective& call, std::span<const ConstBytes> stream)
      : core_(core), call_(call), stream_(stream), bytes_(total(stream)) {}

  // `all_take`: every rank takes from all others, so that the time of one tells
  // that of all.
  void announce(bool all_take = false) {
    if (bytes_ != 0 && is_short(bytes_)) {
      copy_range(call_.room(bytes_), stream_, 0, bytes_);
    }
    call_.announce(bytes_, all_take && !is_short(bytes_) ? bytes_ : 0);
    call_.wait_for_all();
  }

  void run(std::span<const Take> takes) {
    for (const auto& take : takes) {
      if (take.to.size != 0 && is_short(bytes_of(take.from))) {
        kernels::copy(take.to.data, call_.data(take.from) + take.offset,
                      take.to.size);
      }
    }
    size_t longest = 0;
    for (int peer = 0; peer < core_.size; ++peer) {
      if (!is_short(bytes_of(peer))) {
        longest = std::max(longest, bytes_of(peer));
      }
    }
    by_ = core_.segment.chunking(longest);
    const uint64_t rounds = (longest + chunk() - 1) / chunk();
    if (rounds == 0) return;
    first_ = core_.chunks;
    core_.chunks += rounds;
    stage(0);
    for (uint64_t round = 0; round < rounds; ++round) {
      if (round + 1 < rounds) stage(round + 1);
      for (const auto& take : takes) take_part(take, round);
      call_.publish(core_.own().taken, first_ + round + 1);
    }
  }

 private:
  size_t chunk() const { return by_.bytes; }
  bool is_short(size_t bytes) const {
    return bytes <= core_.tuning.one_shot_bytes;
  }
  size_t bytes_of(int peer) const { return call_.announcement(peer).bytes; }

  void stage(uint64_t round) {
    const size_t begin = round * chunk();
    if (is_short(bytes_) || begin >= bytes_) return;
    if (round >= by_.slots) {
      call_.await_all(&RankState::taken, first_ + round - by_.slots + 1);
    }
    copy_range(core_.segment.staging(core_.rank, first_ + round, by_), stream_,
               begin, std::min(chunk(), bytes_ - begin), call_.stores());
    call_.publish(core_.own().staged, first_ + round + 1);
  }

  void take_part(const Take& take, uint64_t round) {
    if (is_short(bytes_of(take.from))) return;
    const size_t begin = std::max(take.offset, round * chunk());
    const size_t end =
        std::min(take.offset + take.to.size, (round + 1) * chunk());
    if (begin >= end) return;
    call_.await(take.from, core_.segment.state(take.from).staged,
                first_ + round + 1);
    const bool streaming = take.to.size >= core_.tuning.streaming_bytes;
    kernels::copy(
        static_cast<std::byte*>(take.to.data) + (begin - take.offset),
        core_.segment.staging(take.from, first_ + round, by_) +
            (begin - round * chunk()),
        end - begin,
        streaming ? kernels::Stores::streaming : kernels::Stores::cached);
  }

  Core& core_;
  Collective& call_;
  std::span<const ConstBytes> stream_;
  size_t bytes_;
  Chunking by_{.bytes = 0, .slots = 0};
  uint64_t first_ = 0;
};

}  // namespace

void Group::broadcast(Bytes data, int root, DType dtype, milliseconds timeout) {
  Collective call(*core_,
                  {.operation = CollectiveKind::broadcast,
                   .dtype = dtype,
                   .root = root,
                   .agreed = data.size / kernels::size_of(dtype)},
                  timeout);
  const ConstBytes source{data.data, data.size};
  const Take take{.from = root, .offset = 0, .to = data};
  const bool is_root = core_->rank == root;
  Movement movement(*core_, call, {&source, is_root ? 1u : 0u});
  movement.announce();
  movement.run({&take, is_root ? 0u : 1u});
}

void Group::all_gather(std::span<const Bytes> outputs, ConstBytes input,
                       DType dtype, milliseconds timeout) {
  const int n = core_->size;
  const bool even = std::ranges::all_of(
      outputs, [&](const Bytes& output) { return output.size == input.size; });
  Collective call(
      *core_,
      {.operation = CollectiveKind::all_gather,
       .dtype = dtype,
       .agreed = even ? input.size / kernels::size_of(dtype) : kSizesDiffer},
      timeout);
  std::vector<Take> takes;
  auto sizes = call.sizes();
  for (int step = 1; step < n; ++step) {
    const int peer = (core_->rank + step) % n;
    takes.push_back({.from = peer, .offset = 0, .to = outputs[peer]});
  }
  if (!even) {
    for (int peer = 0; peer < n; ++peer) {
      sizes[peer] = input.size;
      sizes[n + peer] = outputs[peer].size;
    }
  }
  Movement movement(*core_, call, {&input, 1});
  movement.announce(/*all_take=*/true);
  if (!even) call.compare_sizes();
  copy_own(outputs[core_->rank], input);
  movement.run(takes);
}

void Group::gather(std::span<const Bytes> outputs, ConstBytes input, int root,
                   DType dtype, milliseconds timeout) {
  const int n = core_->size;
  const bool is_root = core_->rank == root;
  Collective call(*core_,
                  {.operation = CollectiveKind::gather,
                   .dtype = dtype,
                   .root = root,
                   .agreed = kSizesDiffer},
                  timeout);
  std::vector<Take> takes;
  auto sizes = call.sizes();
  for (int peer = 0; peer < n; ++peer) {
    sizes[peer] = peer == root ? input.size : 0;
    sizes[n + peer] = is_root ? outputs[peer].size : 0;
    if (is_root && peer != root) {
      takes.push_back({.from = peer, .offset = 0, .to = outputs[peer]});
    }
  }
  Movement movement(*core_, call, {&input, is_root ? 0u : 1u});
  movement.announce();
  call.compare_sizes();
  if (is_root) copy_own(outputs[root], input);
  movement.run(takes);
}

void Group::scatter(Bytes output, std::span<const ConstBytes> inputs, int root,
                    DType dtype, milliseconds timeout) {
  const int n = core_->size;
  const bool is_root = core_->rank == root;
  Collective call(*core_,
                  {.operation = CollectiveKind::scatter,
                   .dtype = dtype,
                   .root = root,
                   .agreed = kSizesDiffer},
                  timeout);
  std::vector<ConstBytes> stream;
  auto sizes = call.sizes();
  for (int peer = 0; peer < n; ++peer) {
    sizes[peer] = is_root ? inputs[peer].size : 0;
    sizes[n + peer] = peer == root ? output.size : 0;
    if (is_root && peer != root) stream.push_back(inputs[peer]);
  }
  Movement movement(*core_, call, stream);
  movement.announce();
  call.compare_sizes();
  if (is_root) {
    copy_own(output, inputs[root]);
    movement.run({});
    return;
  }
  // The root's stream is what the other ranks get, in rank order.
  Take take{.from = root, .offset = 0, .to = output};
  for (int before = 0; before < core_->rank; ++before) {
    if (before != root) take.offset += call.sizes(root)[before];
  }
  movement.run({&take, 1});
}

void Group::all_to_all(std::span<const Bytes> outputs,
                       std::span<const ConstBytes> inputs, DType dtype,
                       milliseconds timeout) {
  const int n = core_->size;
  const int rank = core_->rank;
  Collective call(*core_,
                  {.operation = CollectiveKind::all_to_all,
                   .dtype = dtype,
                   .agreed = kSizesDiffer},
                  timeout);
  // Each rank's stream begins with what the next rank gets, so that at any time
  // different ranks read different streams.
  std::vector<ConstBytes> stream;
  for (int step = 1; step < n; ++step)
    stream.push_back(inputs[(rank + step) % n]);
  auto sizes = call.sizes();
  for (int peer = 0; peer < n; ++peer) {
    sizes[peer] = inputs[peer].size;
    sizes[n + peer] = outputs[peer].size;
  }
  Movement movement(*core_, call, stream);
  movement.announce(/*all_take=*/true);
  call.compare_sizes();
  std::vector<Take> takes;
  for (int step = 1; step < n; ++step) {
    const int from = (rank + n - step) % n;
    Take take{.from = from, .offset = 0, .to = outputs[from]};
    for (int before = 1; before < step; ++before) {
      take.offset += call.sizes(from)[(from + before) % n];
    }
    takes.push_back(take);
  }
  copy_own(outputs[rank], inputs[rank]);
  movement.run(takes);
}

}  // namespace lockstep::internal::shm
