#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::internal::python {

// Memory of a group that tensors have given back, for later tensors of the same
// size. FSDP asks for the same sizes in each step, and new memory is dear: the
// system clears it, and every rank maps it.
//
// Keeps memory of a size if that size was asked for after memory of the size
// was given back, and keeps no more than was once in use at the same time. So
// the first buckets of DistributedDataParallel, which are used once, are not
// kept.
//
// Threads: any. Tensors may outlive the pool's owner.
class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  // Returns `size` elements, at least one, in memory that was kept or that
  // allocate(size, options) returns.
  template <typename Allocate>
  at::Tensor get(int64_t size, const at::TensorOptions& options,
                 const Allocate& allocate) {
    const size_t bytes = size * options.dtype().itemsize();
    auto block = kept(bytes);
    if (!block.defined()) block = allocate(size, options);
    {
      const std::lock_guard lock(mutex_);
      used_ += bytes;
      most_used_ = std::max(most_used_, used_);
    }
    auto* const data = block.data_ptr();
    return at::from_blob(
        data, {size},
        [self = shared_from_this(), block = std::move(block)](void*) mutable {
          self->give_back(std::move(block));
        },
        options);
  }
  // Frees what is kept, and keeps nothing from now on.
  void close() {
    std::deque<at::Tensor> freed;
    const std::lock_guard lock(mutex_);
    closed_ = true;
    freed.swap(kept_);
    kept_bytes_ = 0;
  }

 private:
  // Returns memory of that many bytes, or an undefined tensor.
  at::Tensor kept(size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (given_back_.contains(bytes)) recurring_.insert(bytes);
    const auto found = std::find_if(
        kept_.begin(), kept_.end(),
        [&](const at::Tensor& block) { return block.nbytes() == bytes; });
    if (found == kept_.end()) return {};
    auto block = std::move(*found);
    kept_.erase(found);
    kept_bytes_ -= bytes;
    return block;
  }
  void give_back(at::Tensor block) {
    std::vector<at::Tensor> freed;  // after the lock
    const size_t bytes = block.nbytes();
    const std::lock_guard lock(mutex_);
    used_ -= bytes;
    if (closed_ || !recurring_.contains(bytes)) {
      if (given_back_.size() == kSizes) given_back_.clear();
      given_back_.insert(bytes);
      freed.push_back(std::move(block));
      return;
    }
    kept_.push_back(std::move(block));
    kept_bytes_ += bytes;
    while (kept_bytes_ > most_used_) {
      kept_bytes_ -= kept_.front().nbytes();
      freed.push_back(std::move(kept_.front()));
      kept_.pop_front();
    }
  }

  static constexpr size_t kSizes = 1000;

  std::mutex mutex_;
  std::deque<at::Tensor> kept_;  // the oldest first
  size_t kept_bytes_ = 0;
  size_t used_ = 0;
  size_t most_used_ = 0;
  std::set<size_t> given_back_;
  std::set<size_t> recurring_;
  bool closed_ = false;
};

}  // namespace lockstep::internal::python
