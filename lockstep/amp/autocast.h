#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace lockstep {

// While it lives, operations on `device` choose their dtype: matrix products,
// convolutions and the like run in `dtype`, what needs range or precision in
// float32. After torch.autocast as a context manager (PyTorch documentation,
// "Automatic Mixed Precision package"), whose tables say which operation does
// what. Parameters keep their dtype, and so do their gradients.
//
//   torch::Tensor loss;
//   {
//     lockstep::autocast mixed(at::kCPU);
//     loss = torch::mse_loss(model->forward(x), y);
//   }
//   loss.backward();
//
// Put forward and loss under it. Backward outside of it runs each operation in
// the dtype of its forward; under it is not recommended.
//
// `dtype`: none is the device's present one, which at first is bfloat16 on the
//   CPU and float16 on CUDA, and is the surrounding guard's under one that
//   named another. CPU: bfloat16 or float16; CUDA float32 too (nothing is
//   lowered).
// `enabled`: false makes a region without autocast within one with it; `dtype`
//   is not looked at, but stands for guards within.
// `cache_enabled`: whether a parameter that is used several times is cast once;
//   none: as it is around (at first: yes). The casts are dropped when the
//   outermost guard ends. So do not change parameters under it.
//
// Guards nest, for one device or several, and end in reverse order, also by an
// exception: then everything is as before. The state belongs to the thread: a
// thread started under a guard has none of it (backward's threads take over
// the one of the thread that called backward).
//
// On a CPU without AVX-512 (bfloat16) or its FP16 extension (float16) LibTorch
// has no fast kernels for these, and training is many times slower than in
// float32: the first such guard warns (TORCH_WARN_ONCE), as nothing else would
// tell.
//
// Throws std::invalid_argument for a device that LibTorch cannot autocast, and
// for a dtype that the device's autocast does not take, where Python warns and
// goes on without autocast. Where LibTorch sees no GPU, an enabled guard for
// CUDA does nothing, as in Python: what it is for is not on this machine.
class [[nodiscard]] autocast {
 public:
  explicit autocast(c10::DeviceType device,
                    std::optional<c10::ScalarType> dtype = {},
                    bool enabled = true,
                    std::optional<bool> cache_enabled = {});
  autocast(const autocast&) = delete;
  autocast& operator=(const autocast&) = delete;
  ~autocast();

 private:
  c10::DeviceType device_;
  bool enabled_before_;
  c10::ScalarType dtype_before_;
  bool cache_enabled_before_;
};

}  // namespace lockstep
