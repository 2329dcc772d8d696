#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace lockstep {

// While this guard lives, operations on `device` choose their dtype: matrix
// products, convolutions and the like run in `dtype`; operations that need
// range or precision run in float32. It follows torch.autocast as a context
// manager (PyTorch documentation, "Automatic Mixed Precision package"), whose
// tables list which operation does what. Parameters keep their dtype, and so do
// their gradients.
//
//   torch::Tensor loss;
//   {
//     lockstep::Autocast mixed(at::kCPU);
//     loss = torch::mse_loss(model->forward(x), y);
//   }
//   loss.backward();
//
// Put forward and loss under the guard. Backward outside of it runs each
// operation in the dtype of its forward; calling backward under the guard is
// not recommended.
//
// `dtype`: none keeps the device's current autocast dtype: that of the
//   surrounding guard if it named one, else bfloat16 on the CPU and float16 on
//   CUDA. Allowed on the CPU: bfloat16 and float16; on CUDA also float32
//   (nothing is lowered then).
// `enabled`: false makes a region without autocast inside a region with it.
//   `dtype` is not checked then, but inner guards take it over as their
//   default.
// `cache_enabled`: whether a parameter that is used several times is cast only
//   once; none keeps the surrounding setting (at first: yes). The casts are
//   dropped when the outermost guard ends. So do not change parameters while a
//   guard lives.
//
// Guards nest, for one device or several, and must end in reverse order; an
// exception ends them, too. The end of a guard restores the earlier state. The
// state belongs to the thread: a thread that was started under a guard does not
// inherit its state (backward's threads take over the state of the thread that
// called backward).
//
// On a CPU without AVX-512 (bfloat16) or its FP16 extension (float16) LibTorch
// has no fast kernels for these dtypes, and training is many times slower than
// in float32. The first such guard warns (TORCH_WARN_ONCE), because nothing
// else would show the reason.
//
// Throws std::invalid_argument for a device that LibTorch cannot autocast, and
// for a dtype that the device's autocast does not support (Python warns and
// continues without autocast). If LibTorch sees no GPU, an enabled guard for
// CUDA does nothing, as in Python.
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(c10::DeviceType device,
                    std::optional<c10::ScalarType> dtype = {},
                    bool enabled = true,
                    std::optional<bool> cache_enabled = {});
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  c10::DeviceType device_;
  bool enabled_before_;
  c10::ScalarType dtype_before_;
  bool cache_enabled_before_;
};

}  // namespace lockstep
