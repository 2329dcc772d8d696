#pragma once

namespace lockstep::internal {

// The interface of an optimizer that has the option `maximize` of torch.optim,
// which LibTorch's optimizers lack, so that snapshots can hold it.
class MaximizeOption {
 public:
  virtual bool maximize() const = 0;

 protected:
  MaximizeOption() = default;
  MaximizeOption(const MaximizeOption&) = default;
  MaximizeOption& operator=(const MaximizeOption&) = default;
  ~MaximizeOption() = default;
};

}  // namespace lockstep::internal
