// Sparse tensors on simulated devices: dense tensors of indices and values,
// whose contents are as late as those of others. Operations that compute wait
// for the device and use copies on the CPU, as CUDA's do where they sort.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "tests/simulated_cuda/operations.h"
#include "tests/simulated_cuda/settings.h"

namespace lockstep::internal::simulated_cuda {
namespace {

// These treat a sparse tensor as what it consists of, so the functions of the
// CPU serve all devices.
constexpr auto kOfParts = std::to_array<std::string_view>({
    "_coalesced_",
    "_dimI",
    "_dimV",
    "_indices",
    "_nnz",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_values",
    "ccol_indices",
    "clone",
    "col_indices",
    "copy_",
    "copy_sparse_to_sparse_",
    "crow_indices",
    "dense_dim",
    "empty",
    "empty_like",
    "indices",
    "is_coalesced",
    "resize_",
    "resize_as_sparse_",
    "row_indices",
    "sparse_dim",
    "sparse_resize_",
    "sparse_resize_and_clear_",
    "values",
    "zero_",
});

bool is_of_parts(const c10::OperatorHandle& operation) {
  std::string_view name = operation.schema().name();
  name.remove_prefix(std::string_view("aten::").size());
  return std::find(kOfParts.begin(), kOfParts.end(), name) != kOfParts.end();
}

void run_on_copies(const c10::OperatorHandle& operation,
                   torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const std::vector<c10::IValue> arguments =
      torch::jit::pop(*stack, schema.arguments().size());
  c10::Device device(kDeviceType);
  std::vector<c10::IValue> copies;
  for (const c10::IValue& argument : arguments) {
    copies.push_back(
        argument.isDevice()
            ? c10::IValue(c10::Device(c10::kCPU))
            : with_tensors(argument, [&](const at::Tensor& tensor) {
                if (!tensor.is_cpu()) device = tensor.device();
                return tensor.cpu();
              }));
  }
  const c10::OptionalDeviceGuard guard(device);
  std::vector<c10::IValue> results = copies;
  operation.callBoxed(&results);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor()) {
      arguments[i].toTensor().copy_(copies[i].toTensor());
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* const alias = schema.returns()[i].alias_info();
    const auto returned =
        std::find_if(schema.arguments().begin(), schema.arguments().end(),
                     [&](const c10::Argument& argument) {
                       return alias && argument.alias_info() &&
                              *argument.alias_info() == *alias;
                     });
    stack->push_back(
        returned != schema.arguments().end()
            ? arguments[static_cast<size_t>(returned -
                                            schema.arguments().begin())]
            : with_tensors(results[i], [&](const at::Tensor& tensor) {
                return tensor.to(device);
              }));
  }
}

template <c10::DispatchKey key>
void run_sparse(const c10::OperatorHandle& operation,
                torch::jit::Stack* stack) {
  if (is_of_parts(operation)) {
    operation.redispatchBoxed(c10::DispatchKeySet(key), stack);
  } else {
    run_on_copies(operation, stack);
  }
}

// Takes each operation that sparse tensors of the CPU have, as LibTorch would
// choose a general kernel before a fallback.
template <c10::DispatchKey key>
void take_operations(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto operation = dispatcher.findOp(name);
    if (operation && operation->hasKernelForDispatchKey(key) &&
        name.getNamespace() == "aten") {
      library.impl(
          c10::toString(name).c_str(),
          torch::CppFunction::makeFromBoxedFunction<&run_sparse<key>>());
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SIMULATED_DEVICE_TYPE, library) {
  for (const char* const name :
       {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_bsc",
        "_to_sparse_bsr", "_to_sparse_csc", "_to_sparse_csr"}) {
    library.impl(name,
                 torch::CppFunction::makeFromBoxedFunction<&run_on_copies>());
  }
}

TORCH_LIBRARY_IMPL(aten, C10_CONCATENATE(Sparse, SIMULATED_DEVICE_TYPE),
                   library) {
  take_operations<c10::DispatchKey::SparseCPU>(library);
}

TORCH_LIBRARY_IMPL(aten, C10_CONCATENATE(SparseCsr, SIMULATED_DEVICE_TYPE),
                   library) {
  take_operations<c10::DispatchKey::SparseCsrCPU>(library);
}

}  // namespace lockstep::internal::simulated_cuda
