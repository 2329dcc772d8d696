#include "lockstep/comm/tensor_layout.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "lockstep/base/no_destructor.h"

namespace lockstep::internal {
namespace {

// The layouts of all tensors that have one. Set aside from the tensors, because
// Tensor::set_data() replaces whatever a TensorImpl carries.
class Layouts {
 public:
  void set(const at::Tensor& tensor, TensorLayout layout) {
    const std::lock_guard lock(mutex_);
    if (held_.size() >= purge_at_) {
      std::erase_if(held_,
                    [](const auto& entry) { return entry.second.expired(); });
      purge_at_ = 2 * held_.size() + 64;
    }
    held_.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        Held{WeakTensor(tensor.getIntrusivePtr()), std::move(layout)});
  }

  void drop(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    held_.erase(tensor.unsafeGetTensorImpl());
  }

  const TensorLayout* find(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = held_.find(tensor.unsafeGetTensorImpl());
    return found == held_.end() ? nullptr : &found->second.layout;
  }

 private:
  using WeakTensor =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Held {
    // Also keeps the address from being used again.
    WeakTensor tensor;
    TensorLayout layout;
    bool expired() const { return tensor.expired(); }
  };

  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Held> held_;
  size_t purge_at_ = 64;
};

Layouts& layouts() {
  // Never destroyed: tensors of static duration may ask at the very end.
  static NoDestructor<Layouts> all;
  return *all;
}

void require_fits(const at::Tensor& tensor, const TensorLayout& layout) {
  const Box& box = layout.box;
  if (intersection(box, whole_box(layout.shape)) != box && box.numel() > 0) {
    throw std::invalid_argument(c10::str(
        "a layout has the part ", text_of(box), " of a tensor of shape ",
        at::IntArrayRef(layout.shape), ", which does not contain it"));
  }
  if (layout.range &&
      (layout.range->begin < 0 || layout.range->end > box.numel())) {
    throw std::invalid_argument(
        c10::str("a layout has the elements ", layout.range->begin, " to ",
                 layout.range->end, " of a part with ", box.numel()));
  }
  if (layout.range ? tensor.numel() != layout.range->size()
                   : tensor.sizes() != at::IntArrayRef(box.sizes)) {
    throw std::invalid_argument(c10::str("a layout is for a tensor of shape ",
                                         at::IntArrayRef(sizes_of_part(layout)),
                                         ", but the tensor has the shape ",
                                         tensor.sizes()));
  }
}

}  // namespace

void set_layout(const at::Tensor& tensor, TensorLayout layout) {
  require_fits(tensor, layout);
  layouts().set(tensor, std::move(layout));
}

void drop_layout(const at::Tensor& tensor) { layouts().drop(tensor); }

const TensorLayout* layout_of(const at::Tensor& tensor) {
  return layouts().find(tensor);
}

Sizes sizes_of_part(const TensorLayout& layout) {
  Sizes sizes = layout.box.sizes;
  if (!layout.range) return sizes;
  const auto [begin, end] = *layout.range;
  if (sizes.empty()) return {end - begin};
  int64_t row = 1;
  for (size_t d = 1; d < sizes.size(); ++d) row *= sizes[d];
  if (row > 0 && begin % row == 0 && end % row == 0) {
    sizes.front() = (end - begin) / row;
  } else {
    sizes.assign(sizes.size(), 1);
    sizes.back() = end - begin;
  }
  return sizes;
}

bool is_divided_over(const at::Tensor& tensor, const ProcessGroup& group) {
  const TensorLayout* layout = layout_of(tensor);
  if (layout == nullptr) return false;
  const auto& ranks = group.global_ranks();
  return std::ranges::any_of(layout->groups, [&](const auto& divides) {
    return std::ranges::count_if(divides->global_ranks(), [&](int rank) {
             return std::ranges::find(ranks, rank) != ranks.end();
           }) > 1;
  });
}

void require_replica(const at::Tensor& tensor, const ProcessGroup& group,
                     const char* caller, const char* remedy,
                     const std::string& name) {
  if (!is_divided_over(tensor, group)) return;
  throw std::invalid_argument(c10::str(
      caller, ": ranks of the group have different parts of ",
      name.empty() ? c10::str("the tensor of ", tensor.sizes())
                   : "'" + name + "'",
      " (by tensor parallelism, a pipeline or set_placement()), which are not "
      "replicas; ",
      remedy));
}

at::Tensor part_of(const at::Tensor& whole, const TensorLayout& layout) {
  auto part = whole;
  for (int64_t d = 0; d < whole.dim(); ++d) {
    const auto dim = static_cast<size_t>(d);
    part = part.narrow(d, layout.box.offsets[dim], layout.box.sizes[dim]);
  }
  if (!layout.range) return part;
  return part.reshape({-1})
      .slice(0, layout.range->begin, layout.range->end)
      .view(sizes_of_part(layout));
}

}  // namespace lockstep::internal
