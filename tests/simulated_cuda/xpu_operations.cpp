// Operations that LibTorch calls for types of devices other than CPU and CUDA.

#include <torch/library.h>

#include <cstdint>
#include <vector>

#include "tests/simulated_cuda/operations.h"

namespace lockstep::internal::simulated_cuda {
namespace {

c10::OperatorHandle operation_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle& /*operation*/,
                 torch::jit::Stack* stack) {
  run_on_cpu(operation_named("aten::convolution"), stack);
}

// The fourth argument of convolution_backward, the sizes of the bias, is
// missing.
void convolution_backward(const c10::OperatorHandle& operation,
                          torch::jit::Stack* stack) {
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(
                                        operation.schema().arguments().size());
  const int64_t channels = first->toTensor().size(1);
  stack->insert(first + 3, std::vector<int64_t>{channels});
  run_on_cpu(operation_named("aten::convolution_backward"), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, XPU, library) {
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace lockstep::internal::simulated_cuda
