#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// Elements [begin, end) of a flat tensor. A range that was read from a file, or
// that a user gave, may be anything; in all others 0 <= begin <= end.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

using Sizes = std::vector<int64_t>;

// A rectangular part of a tensor: the elements whose index in each dimension d
// lies in [offsets[d], offsets[d] + sizes[d]). PyTorch's distributed checkpoint
// calls it a chunk (torch.distributed.checkpoint.metadata,
// ChunkStorageMetadata). A tensor without dimensions has one box, without
// offsets.
struct Box {
  Sizes offsets{};
  Sizes sizes{};

  int64_t numel() const;
  auto operator<=>(const Box&) const = default;
};

// Returns the product of the sizes; 1 if there are none.
int64_t numel_of(const Sizes& sizes);

// Returns the box of all elements.
Box whole_box(const Sizes& shape);

// Returns the box of the elements that both have; none if there are none. The
// boxes must have the same number of dimensions.
std::optional<Box> intersection(const Box& a, const Box& b);

// Returns the elements `range` of a tensor of that shape, counted in row-major
// order, as boxes: in the order of their elements, each element once. A tensor
// of k dimensions needs at most 2k - 1 of them: a part of a row, whole rows, a
// part of a row. An empty range has none.
std::vector<Box> boxes_of_range(const Sizes& shape, Range range);

// Returns the box that part `index` of `count` has if dimension `dim` is
// divided as torch.chunk() and c10d's Shard(dim) do it: all parts but the last
// ones have ceil(size / count) indices. The sizes of the last parts may be 0.
Box chunk_box(const Sizes& shape, size_t dim, int64_t index, int64_t count);

// Says what is wrong if `boxes` do not hold each element of the tensor once:
// "[0:2, 1:3] lies outside", "two parts overlap at [0:1]", "it has 5 elements
// of 6". Returns an empty text if nothing is.
std::string cover_problem(const Sizes& shape, std::vector<Box> boxes);

// Returns the box as Python writes slices: "[0:2, 3:4]".
std::string text_of(const Box& box);

}  // namespace lockstep::internal
