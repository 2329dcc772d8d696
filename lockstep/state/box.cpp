#include "lockstep/state/box.h"

#include <algorithm>

namespace lockstep::internal {
namespace {

// Appends the boxes of [begin, end), counted within the part of the tensor that
// the first `dim` offsets choose; `box` has these offsets, with sizes of 1.
void add_boxes(const Sizes& shape, size_t dim, Range range, Box box,
               std::vector<Box>& boxes) {
  if (range.size() <= 0) return;
  if (dim == shape.size()) {
    boxes.push_back(std::move(box));
    return;
  }
  int64_t row = 1;
  for (size_t d = dim + 1; d < shape.size(); ++d) row *= shape[d];
  const int64_t first = range.begin / row;
  const int64_t last = range.end / row;
  const Range in_first{range.begin % row,
                       first == last ? range.end % row : row};
  const auto add_part_of_row = [&](int64_t index, Range part) {
    Box inner = box;
    inner.offsets[dim] = index;
    inner.sizes[dim] = 1;
    add_boxes(shape, dim + 1, part, std::move(inner), boxes);
  };
  if (in_first.size() < row) add_part_of_row(first, in_first);
  if (first == last) return;
  const int64_t whole = in_first.size() < row ? first + 1 : first;
  if (whole < last) {
    Box rows = box;
    rows.offsets[dim] = whole;
    rows.sizes[dim] = last - whole;
    for (size_t d = dim + 1; d < shape.size(); ++d) {
      rows.offsets[d] = 0;
      rows.sizes[d] = shape[d];
    }
    boxes.push_back(std::move(rows));
  }
  if (range.end % row > 0) add_part_of_row(last, {0, range.end % row});
}

}  // namespace

int64_t numel_of(const Sizes& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return numel;
}

int64_t Box::numel() const { return numel_of(sizes); }

Box whole_box(const Sizes& shape) { return {Sizes(shape.size(), 0), shape}; }

std::optional<Box> intersection(const Box& a, const Box& b) {
  Box common;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end =
        std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    common.offsets.push_back(begin);
    common.sizes.push_back(end - begin);
  }
  return common;
}

std::vector<Box> boxes_of_range(const Sizes& shape, Range range) {
  std::vector<Box> boxes;
  add_boxes(shape, 0, range, {Sizes(shape.size(), 0), Sizes(shape.size(), 1)},
            boxes);
  return boxes;
}

Box chunk_box(const Sizes& shape, size_t dim, int64_t index, int64_t count) {
  Box box = whole_box(shape);
  const int64_t size = shape.at(dim);
  const int64_t chunk = (size + count - 1) / count;
  box.offsets[dim] = std::min(index * chunk, size);
  box.sizes[dim] = std::min((index + 1) * chunk, size) - box.offsets[dim];
  return box;
}

std::string text_of(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(box.offsets[d]) + ":" +
            std::to_string(box.offsets[d] + box.sizes[d]);
  }
  return text + "]";
}

std::string cover_problem(const Sizes& shape, std::vector<Box> boxes) {
  const Box whole = whole_box(shape);
  int64_t elements = 0;
  for (const Box& box : boxes) {
    for (size_t d = 0; d < shape.size(); ++d) {
      // Written so that numbers from a file cannot overflow.
      if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.sizes[d] > shape[d] ||
          box.offsets[d] > shape[d] - box.sizes[d]) {
        return text_of(box) + " lies outside";
      }
    }
    elements += box.numel();
    if (elements > whole.numel()) break;  // so two of them overlap
  }
  std::erase_if(boxes, [](const Box& box) { return box.numel() == 0; });
  // Boxes are compared with those that begin before they end along the longest
  // dimension. Along it, parts of large tensors are usually apart.
  const size_t dim = static_cast<size_t>(
      std::max_element(shape.begin(), shape.end()) - shape.begin());
  if (!shape.empty()) {
    std::sort(boxes.begin(), boxes.end(), [&](const Box& a, const Box& b) {
      return a.offsets[dim] < b.offsets[dim];
    });
  }
  std::vector<const Box*> open;
  for (const Box& box : boxes) {
    std::erase_if(open, [&](const Box* other) {
      return !shape.empty() &&
             other->offsets[dim] + other->sizes[dim] <= box.offsets[dim];
    });
    for (const Box* other : open) {
      if (const auto common = intersection(*other, box)) {
        return "two parts overlap at " + text_of(*common);
      }
    }
    open.push_back(&box);
  }
  if (elements != whole.numel()) {
    return "its parts have " + std::to_string(elements) + " of " +
           std::to_string(whole.numel()) + " elements";
  }
  return "";
}

}  // namespace lockstep::internal
