#include "lockstep/parallel/context/context_chunks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/narrow.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace lockstep::internal {
namespace {

Range context_chunk(int64_t sequence_length, int64_t chunks, int64_t index) {
  const int64_t size = sequence_length / chunks;
  const int64_t longer = sequence_length % chunks;
  const int64_t begin = index * size + std::min(index, longer);
  return {begin, begin + size + (index < longer ? 1 : 0)};
}

}  // namespace

std::vector<Range> context_chunks(ContextOrder order, int64_t sequence_length,
                                  int ranks, int rank) {
  if (order == ContextOrder::plain) {
    return {context_chunk(sequence_length, ranks, rank)};
  }
  const int64_t chunks = 2 * int64_t{ranks};
  return {context_chunk(sequence_length, chunks, rank),
          context_chunk(sequence_length, chunks, chunks - 1 - rank)};
}

int64_t context_tokens(ContextOrder order, int64_t sequence_length, int ranks,
                       int rank) {
  int64_t tokens = 0;
  for (const auto& chunk :
       context_chunks(order, sequence_length, ranks, rank)) {
    tokens += chunk.size();
  }
  return tokens;
}

void require_context_lengths(const char* name, ContextOrder order,
                             const std::vector<int64_t>& lengths) {
  if (order == ContextOrder::plain) return;
  const auto ranks = static_cast<int>(lengths.size());
  const int64_t whole =
      std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t have = lengths[static_cast<size_t>(rank)];
    const int64_t want = context_tokens(order, whole, ranks, rank);
    if (have == want) continue;
    throw std::invalid_argument(c10::str(
        name, ": rank ", rank, " of the group has ", have, " of ", whole,
        " tokens, but in zigzag order it must have ", want,
        "; cut sequences with context_shard(), or use the plain order"));
  }
}

at::Tensor join_context(const std::vector<at::Tensor>& parts, int64_t dim,
                        ContextOrder order) {
  if (order == ContextOrder::plain) return at::cat(parts, dim);
  // Chunks 0 to p - 1 are the first halves of the ranks in their order, chunks
  // p to 2 p - 1 the second halves in reverse.
  const auto ranks = static_cast<int>(parts.size());
  int64_t whole = 0;
  for (const auto& part : parts) whole += part.size(dim);
  std::vector<at::Tensor> chunks(2 * parts.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& part = parts[static_cast<size_t>(rank)];
    const int64_t first = context_chunks(order, whole, ranks, rank)[0].size();
    const auto early = static_cast<size_t>(rank);
    chunks[early] = part.narrow(dim, 0, first);
    chunks[chunks.size() - 1 - early] =
        part.narrow(dim, first, part.size(dim) - first);
  }
  return at::cat(chunks, dim);
}

at::Tensor part_of_context(const at::Tensor& whole, int64_t dim,
                           ContextOrder order,
                           const std::vector<int64_t>& lengths, int rank) {
  if (order == ContextOrder::plain) {
    const int64_t begin =
        std::accumulate(lengths.begin(), lengths.begin() + rank, int64_t{0});
    return whole.narrow(dim, begin, lengths[static_cast<size_t>(rank)]);
  }
  std::vector<at::Tensor> chunks;
  for (const auto& chunk : context_chunks(
           order, whole.size(dim), static_cast<int>(lengths.size()), rank)) {
    chunks.push_back(whole.narrow(dim, chunk.begin, chunk.size()));
  }
  return at::cat(chunks, dim);
}

RingPlan::RingPlan(AttentionLengths lengths, ContextOrder order, bool is_causal)
    : lengths_(std::move(lengths)), order_(order), is_causal_(is_causal) {
  const auto whole =
      std::accumulate(lengths_.keys.begin(), lengths_.keys.end(), int64_t{0});
  for (int rank = 0; rank < ranks(); ++rank) {
    first_chunks_.push_back(
        context_chunks(order, whole, ranks(), rank)[0].size());
  }
  for (int source = 0; source < ranks(); ++source) {
    int hops = ranks() - 1;
    while (hops > 0 && !block((source + hops) % ranks(), source)) --hops;
    hops_.push_back(hops);
  }
}

std::optional<AttentionBlock> RingPlan::block(int rank, int source) const {
  Range queries{0, lengths_.queries[static_cast<size_t>(rank)]};
  Range keys{0, this->keys(source)};
  if (queries.size() == 0) return std::nullopt;  // also of an empty batch
  if (is_causal_ && rank != source) {
    const bool later = source > rank;
    if (order_ == ContextOrder::plain) {
      if (later) return std::nullopt;
    } else if (later) {
      // The first chunk of `rank` is before both chunks of `source`, its second
      // chunk after both.
      queries.begin = first_chunks_[static_cast<size_t>(rank)];
    } else {
      // Both chunks of `rank` are after the first chunk of `source`, and before
      // its second.
      keys.end = first_chunks_[static_cast<size_t>(source)];
    }
  }
  if (queries.size() == 0 || keys.size() == 0) return std::nullopt;
  // A rank's own tokens ascend in either order, so the mask between its own
  // keys and queries is the ordinary one.
  return AttentionBlock{queries, keys, is_causal_ && rank == source};
}

}  // namespace lockstep::internal
