// Runs every operation that has no kernel of its own here by the kernel of the
// CPU, as a task of the current stream. Structured operations arrive in their
// out= form, with results that exist already.

#include "tests/simulated_cuda/operations.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "tests/simulated_cuda/device_interface.h"
#include "tests/simulated_cuda/device_memory.h"
#include "tests/simulated_cuda/generator.h"
#include "tests/simulated_cuda/scheduler.h"
#include "tests/simulated_cuda/settings.h"
#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal::simulated_cuda {
namespace {

using c10::IValue;
using Values = std::vector<IValue>;
using Replace = std::function<at::Tensor(const at::Tensor&)>;

class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};
NoWarnings no_warnings;

// Kernels see no autograd and no autocast: both have been applied before. What
// they warn of is how the simulation calls them.
struct KernelConditions {
  c10::WarningUtils::WarningHandlerGuard silent{&no_warnings};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

void for_each_tensor(const IValue& value,
                     const std::function<void(const at::Tensor&)>& use) {
  with_tensors(value, [&](const at::Tensor& tensor) {
    use(tensor);
    return tensor;
  });
}

// Runs the kernel that `key` has for the operation.
Values run(const c10::OperatorHandle& operation, Values arguments,
           c10::DispatchKey key) {
  const KernelConditions conditions;
  operation.redispatchBoxed(c10::DispatchKeySet(key), &arguments);
  return arguments;
}

// One call of an operation.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, Values arguments);

  // Enqueues it, and returns its results.
  Values enqueue();

 private:
  const c10::FunctionSchema& schema() const { return operation_.schema(); }
  const c10::Argument& declared(size_t argument) const {
    return schema().arguments()[argument];
  }
  bool is_written(size_t argument) const;
  bool is_new(size_t result) const {
    return schema().returns()[result].alias_info() == nullptr;
  }

  void find_device();
  void choose_generator();
  // Whether the shapes of results, or results that are not tensors, depend on
  // values.
  bool must_wait() const;
  bool has_masks() const;
  bool has_new_results() const;
  bool has_out_arguments() const;
  std::string signature() const;

  Values arguments_for(c10::Device device, const Replace& replace) const;
  Values arguments_on_cpu() const;
  // Runs the operation on tensors that stand for the arguments; returns its new
  // results as meta tensors, and then all out= arguments as they have become.
  Values outline() const;
  Values outline_by(c10::DispatchKey key) const;
  void resize_outputs(const Values& outline);
  // The results that are arguments.
  Values arguments_returned(Values results) const;
  Values results_of(Values computed);

  c10::OperatorHandle operation_;
  Values arguments_;
  c10::Device device_{kDeviceType, current_device()};
};

Call::Call(const c10::OperatorHandle& operation, Values arguments)
    : operation_(operation), arguments_(std::move(arguments)) {
  for (const c10::Argument& result : schema().returns()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !result.alias_info() || result.alias_info()->isWrite(),
        "simulated device: the view ", schema().name(), " is missing");
  }
  find_device();
  choose_generator();
}

bool Call::is_written(size_t argument) const {
  const auto* const alias = declared(argument).alias_info();
  return alias && alias->isWrite();
}

// As CUDA's operations do, refuses tensors of several devices. A CPU tensor may
// be a number, or indices.
void Call::find_device() {
  std::optional<c10::Device> device;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      if (!is_on_device(tensor)) return;
      TORCH_CHECK(tensor.layout() == at::kStrided,
                  "simulated device: ", schema().name(),
                  " of a tensor that is not dense");
      if (!device) device = tensor.device();
      TORCH_CHECK(tensor.device() == *device,
                  "Expected all tensors to be on the same device, but found at "
                  "least two devices, ",
                  *device, " and ", tensor.device(), "! (argument ",
                  declared(i).name(), " of ", schema().name(), ")");
    });
    if (!device && arguments_[i].isDevice() &&
        arguments_[i].toDevice().has_index()) {
      device = arguments_[i].toDevice();
    }
  }
  if (device) device_ = *device;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const bool may_be_number = !is_written(i) && !arguments_[i].isTensorList();
    for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(is_on_device(tensor) ||
                      arguments_[i].isOptionalTensorList() ||
                      (may_be_number && tensor.dim() == 0),
                  "Expected all tensors to be on the same device, but found at "
                  "least two devices, ",
                  device_, " and ", tensor.device(), "! (argument ",
                  declared(i).name(), " of ", schema().name(), ")");
    });
  }
}

void Call::choose_generator() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!declared(i).type()->isSubtypeOf(
            *c10::OptionalType::create(c10::GeneratorType::get()))) {
      continue;
    }
    arguments_[i] = generator_for_operation(
        arguments_[i].isNone() ? default_generator(device_.index())
                               : arguments_[i].toGenerator());
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !operation_.hasTag(at::Tag::nondeterministic_seeded),
      "simulated device: ", schema().name(),
      " has no argument for the generator");
}

bool Call::must_wait() const {
  if (operation_.hasTag(at::Tag::dynamic_output_shape) ||
      operation_.hasTag(at::Tag::data_dependent_output) ||
      (has_masks() && has_new_results())) {
    return true;
  }
  const auto& results = schema().returns();
  return std::any_of(results.begin(), results.end(), [](const auto& result) {
    return !result.type()->isSubtypeOf(*c10::TensorType::get()) &&
           !result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

// Masks as indices choose as many elements as they have ones. The out= form
// comes from the structured operation, which has counted them.
bool Call::has_masks() const {
  bool has = false;
  for (const IValue& argument : arguments_) {
    if (!argument.isOptionalTensorList()) continue;
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      has = has || tensor.scalar_type() == at::kBool ||
            tensor.scalar_type() == at::kByte;
    });
  }
  return has;
}

bool Call::has_new_results() const {
  for (size_t i = 0; i < schema().returns().size(); ++i) {
    if (is_new(i)) return true;
  }
  return false;
}

bool Call::has_out_arguments() const {
  const auto& all = schema().arguments();
  return std::any_of(all.begin(), all.end(),
                     [](const auto& argument) { return argument.is_out(); });
}

Values Call::arguments_for(c10::Device device, const Replace& replace) const {
  Values replaced;
  for (const IValue& argument : arguments_) {
    replaced.push_back(argument.isDevice() ? IValue(device)
                                           : with_tensors(argument, replace));
  }
  return replaced;
}

Values Call::arguments_on_cpu() const {
  MemoryViews views;
  return arguments_for(c10::kCPU, [&](const at::Tensor& tensor) {
    if (is_on_device(tensor)) return views.of(tensor);
    // The host may change it before the kernel runs.
    at::Tensor copy = tensor.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(
        tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  });
}

at::Tensor like(const at::Tensor& tensor, c10::Device device) {
  at::Tensor made =
      at::empty_strided(tensor.sizes(), tensor.strides(),
                        tensor.options().device(device).pinned_memory(false));
  if (device.is_cpu()) made.zero_();
  return made;
}

Values Call::outline_by(c10::DispatchKey key) const {
  const KernelConditions conditions;
  const c10::Device device =
      key == c10::DispatchKey::Meta ? c10::kMeta : c10::kCPU;
  std::unordered_map<c10::TensorImpl*, at::Tensor> twins;
  Values arguments = arguments_for(device, [&](const at::Tensor& tensor) {
    if (!is_on_device(tensor)) return tensor;
    at::Tensor& twin = twins[tensor.unsafeGetTensorImpl()];
    if (!twin.defined()) twin = like(tensor, device);
    return twin;
  });
  for (IValue& argument : arguments) {
    if (!argument.isGenerator()) continue;
    argument = argument.toGenerator().clone();  // takes no number from ours
  }
  Values results = run(operation_, arguments, key);
  Values outlines;
  const auto add = [&](const IValue& value) {
    outlines.push_back(with_tensors(value, [](const at::Tensor& tensor) {
      return like(tensor, c10::kMeta);
    }));
  };
  for (size_t i = 0; i < results.size(); ++i) {
    if (is_new(i)) add(results[i]);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (declared(i).is_out()) add(arguments[i]);
  }
  return outlines;
}

std::string Call::signature() const {
  std::ostringstream text;
  text << schema().name() << '.' << schema().overload_name();
  for (const IValue& argument : arguments_) {
    if (argument.isGenerator()) continue;
    bool has_tensors = false;
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      has_tensors = true;
      text << '|' << tensor.device().type() << tensor.scalar_type()
           << tensor.sizes() << tensor.strides();
    });
    text << '|';
    if (!has_tensors) text << argument;
  }
  return text.str();
}

Values Call::outline() const {
  if (operation_.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
    try {
      return outline_by(c10::DispatchKey::Meta);
    } catch (const c10::Error&) {
      // Some meta kernels know less than those of the CPU. If the arguments are
      // wrong, the CPU's throws the same.
    }
  }
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::unordered_map<std::string, Values>;
  const std::string call = signature();
  {
    const std::lock_guard lock(*mutex);
    if (const auto found = known->find(call); found != known->end()) {
      return found->second;
    }
  }
  Values outlines = outline_by(c10::DispatchKey::CPU);
  const std::lock_guard lock(*mutex);
  return known->emplace(call, std::move(outlines)).first->second;
}

// Gives out= arguments the sizes that the kernel wants.
void Call::resize_outputs(const Values& outline) {
  size_t next = outline.size();
  for (size_t i = arguments_.size(); i-- > 0;) {
    if (!declared(i).is_out()) continue;
    std::vector<at::Tensor> wanted;
    for_each_tensor(outline[--next], [&](const at::Tensor& tensor) {
      wanted.push_back(tensor);
    });
    size_t position = 0;
    for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      at::native::resize_output(tensor, wanted[position++].sizes());
    });
  }
}

Values Call::arguments_returned(Values results) const {
  for (size_t i = 0; i < results.size(); ++i) {
    if (is_new(i)) continue;
    for (size_t k = 0; k < arguments_.size(); ++k) {
      if (declared(k).alias_info() &&
          *declared(k).alias_info() == *schema().returns()[i].alias_info()) {
        results[i] = arguments_[k];
      }
    }
  }
  return results;
}

Values Call::enqueue() {
  const c10::DeviceGuard guard(device_);
  const c10::Stream stream = current_stream(device_.index());
  const bool waits = must_wait();
  Values results(schema().returns().size());
  std::vector<at::Tensor> outputs;  // contents of the new results
  if (!waits && !has_masks() && (has_new_results() || has_out_arguments())) {
    const Values shapes = outline();
    MemoryViews views;
    for (size_t i = 0, next = 0; i < results.size(); ++i) {
      if (!is_new(i)) continue;
      results[i] = with_tensors(shapes[next++], [&](const at::Tensor& shape) {
        at::Tensor made = like(shape, device_);
        outputs.push_back(views.of(made));
        return made;
      });
    }
    resize_outputs(shapes);
  }
  auto computed = std::make_shared<Values>();
  std::vector<bool> are_new;
  for (size_t i = 0; i < results.size(); ++i) are_new.push_back(is_new(i));
  enqueue_kernel(stream, [operation = operation_, waits, are_new,
                          arguments = arguments_on_cpu(),
                          outputs = std::move(outputs), computed]() mutable {
    Values made = run(operation, std::move(arguments), c10::DispatchKey::CPU);
    if (waits) {
      *computed = std::move(made);
      return;
    }
    size_t next = 0;
    for (size_t i = 0; i < made.size(); ++i) {
      if (!are_new[i]) continue;
      for_each_tensor(made[i], [&](const at::Tensor& tensor) {
        at::Tensor& output = outputs[next++];
        TORCH_CHECK(output.sizes() == tensor.sizes(),
                    "simulated device: ", operation.schema().name(), " gave ",
                    tensor.sizes(), " where the call expected ",
                    output.sizes());
        output.copy_(tensor);
      });
    }
  });
  if (waits) {
    Scheduler::get().wait_for(Scheduler::get().end_of(stream));
    for (size_t i = 0; i < results.size(); ++i) {
      if (!is_new(i)) continue;
      results[i] = with_tensors((*computed)[i], [&](const at::Tensor& tensor) {
        at::Tensor made = like(tensor, device_);
        MemoryViews views;
        enqueue_kernel(stream, [output = views.of(made), tensor] {
          output.copy_(tensor);
        });
        return made;
      });
    }
  }
  return arguments_returned(std::move(results));
}

}  // namespace

void run_on_cpu(const c10::OperatorHandle& operation,
                torch::jit::Stack* stack) {
  const size_t count = operation.schema().arguments().size();
  Values arguments(stack->end() - static_cast<std::ptrdiff_t>(count),
                   stack->end());
  torch::jit::drop(*stack, count);
  for (IValue& result : Call(operation, std::move(arguments)).enqueue()) {
    stack->push_back(std::move(result));
  }
}

IValue with_tensors(
    const IValue& value,
    const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? replace(value.toTensor()) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? replace(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor :
         value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined()
                         ? std::optional(replace(*tensor))
                         : tensor);
    }
    return list;
  }
  return value;
}

at::Tensor MemoryViews::of(const at::Tensor& tensor) {
  at::Tensor& view = tensors_[tensor.unsafeGetTensorImpl()];
  if (view.defined()) return view;
  c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
  if (!storage) {
    storage = c10::Storage(
        c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(),
        c10::DataPtr(host_address(tensor.storage().data()), c10::kCPU),
        /*allocator=*/nullptr, /*resizable=*/false);
  }
  view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  auto* const impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                              tensor.storage_offset());
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  if (tensor.dim() == 0) {
    impl->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  }
  return view;
}

void enqueue_kernel(const c10::Stream& stream, std::function<void()> kernel) {
  Scheduler::get().enqueue(stream, [kernel = std::move(kernel)] {
    const KernelConditions conditions;
    kernel();
  });
}

at::Tensor memory_of(const at::Tensor& tensor) {
  TORCH_CHECK(is_on_device(tensor) && tensor.layout() == at::kStrided,
              "memory_of() needs a dense tensor of a device");
  MemoryViews views;
  return views.of(tensor);
}

TORCH_LIBRARY_IMPL(_, SIMULATED_DEVICE_TYPE, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace lockstep::internal::simulated_cuda
