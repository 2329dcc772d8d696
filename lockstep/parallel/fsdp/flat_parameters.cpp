#include "lockstep/parallel/fsdp/flat_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/collective_work.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"

namespace lockstep::internal {
namespace {

constexpr int64_t kFlatAlignment = 64;  // bytes: a cache line

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The object that the DataPtr of a storage of a unit owns. By it unit_of()
// recognises the unit's tensors.
struct UnitMemory {
  at::Tensor memory;  // undefined if the parameters are not gathered
  std::weak_ptr<ShardedUnit> unit;
};

void delete_unit_memory(void* memory) {
  delete static_cast<UnitMemory*>(memory);
}

at::DataPtr data_of(const at::Tensor& memory,
                    const std::weak_ptr<ShardedUnit>& unit,
                    c10::Device device) {
  void* const data = memory.defined() ? memory.mutable_data_ptr() : nullptr;
  return {data, new UnitMemory{memory, unit}, &delete_unit_memory, device};
}

// `bytes`: also of memory that is not mapped yet, so that tensors may be made.
c10::Storage storage_over(const at::Tensor& memory, size_t bytes,
                          const std::weak_ptr<ShardedUnit>& unit,
                          c10::Device device) {
  return {c10::Storage::use_byte_size_t(), bytes, data_of(memory, unit, device),
          nullptr, false};
}

// The .grad of a shard.
class ShardGradient final : public c10::TensorImpl {
 public:
  ShardGradient(c10::Storage&& storage, c10::DispatchKeySet keys,
                caffe2::TypeMeta dtype, std::shared_ptr<GradientDataUse> use)
      : c10::TensorImpl(std::move(storage), keys, dtype),
        use_(std::move(use)) {}
  using c10::TensorImpl::shallow_copy_and_detach;
  // Called by data(), with a version counter of its own.
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool changes) const override {
    auto data =
        c10::TensorImpl::shallow_copy_and_detach(std::move(version), changes);
    if (use_->written.current_version() == 0) ++use_->reads;
    data->set_version_counter(use_->written);
    return data;
  }

 private:
  const std::shared_ptr<GradientDataUse> use_;
};

// Returns a tensor over `storage`, which may have no memory yet. It is not a
// view as autograd knows it.
template <typename Impl = c10::TensorImpl, typename... More>
at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType dtype,
                       int64_t offset, at::IntArrayRef sizes,
                       const at::Tensor& like, const More&... more) {
  auto tensor =
      at::detail::make_tensor<Impl>(c10::Storage(storage), like.key_set(),
                                    c10::scalarTypeToTypeMeta(dtype), more...);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  impl->set_storage_offset(offset);
  return tensor;
}

// LibTorch's dictionary of a module's parameters is protected, and
// register_parameter() refuses a name that is taken.
struct OpenModule : torch::nn::Module {
  static at::Tensor& parameter(torch::nn::Module& module,
                               const std::string& key) {
    return (module.*(&OpenModule::parameters_))[key];
  }
};

TensorLayout layout_of_shard(const at::Tensor& whole, Range range,
                             const ProcessGroupPtr& group) {
  TensorLayout layout{.shape = whole.sizes().vec(),
                      .box = whole_box(whole.sizes().vec())};
  if (const auto* given = layout_of(whole)) layout = *given;
  layout.range = range;
  layout.groups.push_back(group);
  return layout;
}

constexpr const char* kReleased =
    "FullyShard: this rank has only its shard of this parameter at the moment; "
    "use the full parameter in the unit's forward, or between unshard() and "
    "reshard(). If this happened in a backward, it came to the unit past the "
    "results of the unit's forward: return from there what a loss needs";
constexpr const char* kBarred =
    "FullyShard: a full parameter has no gradient now; gradients are in the "
    "shards, which are the module's parameters() since it was sharded. Make "
    "the "
    "optimizer from those, after the last unit is constructed, and let a "
    "backward come to a unit through the results of its forward";

}  // namespace

at::Tensor BufferPool::take(int64_t count, const at::TensorOptions& options) {
  const auto found = std::ranges::find_if(idle_, [&](const at::Tensor& one) {
    return one.numel() == count && one.dtype() == options.dtype() &&
           one.device() == options.device();
  });
  if (found == idle_.end()) {
    // Kept for training, if the first forward is one in inference mode.
    const c10::InferenceMode normal(false);
    return empty_shared({count}, options, group_);
  }
  auto buffer = std::move(*found);
  idle_.erase(found);
  return buffer;
}

void BufferPool::give_back(at::Tensor buffer) {
  idle_.push_back(std::move(buffer));
  if (idle_.size() > kMostIdle) idle_.erase(idle_.begin());
}

std::shared_ptr<ShardedUnit> unit_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const auto& data =
      tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &delete_unit_memory) return nullptr;
  return static_cast<UnitMemory*>(data.get_context())->unit.lock();
}

FlatParameters::FlatParameters(std::vector<FoundParameter> found,
                               const FullyShardOptions& options,
                               const std::weak_ptr<ShardedUnit>& unit)
    : group_(options.group),
      unit_(unit),
      rank_(group_->rank()),
      size_(group_->size()),
      may_share_(options.shared_memory) {
  const at::NoGradGuard no_grad;
  const at::Tensor first = found.front().tensor;
  options_ = first.options().requires_grad(false);
  const auto dtype = first.scalar_type();
  const bool floating = at::isFloatingType(dtype);
  const auto& policy = options.mp_policy;
  compute_dtype_ = floating ? policy.param_dtype.value_or(dtype) : dtype;
  reduce_dtype_ =
      floating ? policy.reduce_dtype.value_or(compute_dtype_) : dtype;

  // Every parameter begins on a cache line in each dtype.
  const auto line =
      kFlatAlignment /
      static_cast<int64_t>(std::min(c10::elementSize(dtype),
                                    std::min(c10::elementSize(compute_dtype_),
                                             c10::elementSize(reduce_dtype_))));
  int64_t count = 0;
  for (const auto& [name, tensor, places] : found) {
    parameters_.push_back({.name = name,
                           .compute = tensor,
                           .shard = {},
                           .offset = count,
                           .range = {0, 0}});
    count += round_up(tensor.numel(), line);
  }
  slice_ = round_up((count + size_ - 1) / size_, line);
  const auto storage_of = [&](int64_t elements, at::ScalarType type) {
    return storage_over({},
                        static_cast<size_t>(elements) * c10::elementSize(type),
                        unit_, options_.device());
  };
  compute_storage_ = storage_of(padded(), compute_dtype_);
  shard_storage_ = storage_of(slice_, dtype);
  take_memory();

  const int64_t begin = rank_ * slice_;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    const at::Tensor whole = parameter.compute;
    const bool trained = whole.requires_grad();
    const auto within = [&](int64_t element) {
      return std::clamp(element - parameter.offset, int64_t{0}, whole.numel());
    };
    parameter.range = {within(begin), within(begin + slice_)};
    const auto [from, to] = parameter.range;
    auto layout = layout_of_shard(whole, parameter.range, group_);
    parameter.shard = tensor_over(
        shard_storage_, dtype, to > from ? parameter.offset + from - begin : 0,
        sizes_of_part(layout), first);
    if (to > from) {
      parameter.shard.view({-1}).copy_(
          whole.detach().contiguous().view({-1}).slice(0, from, to));
    }
    set_layout(parameter.shard, std::move(layout));
    parameter.shard.set_requires_grad(trained);
    whole.mutable_grad().reset();
    // Frees the memory that the parameter had; its tensor object stays, because
    // it is the module's member.
    whole.set_data(tensor_over(compute_storage_, compute_dtype_,
                               parameter.offset, whole.sizes(), first));
    for (const auto& [module, key] : found[i].places) {
      OpenModule::parameter(*module, key) = parameter.shard;
    }
    found[i].tensor.reset();
  }
  refresh();
  note_versions();
}

FlatParameters::~FlatParameters() { end_gather(); }

void FlatParameters::end_gather() noexcept {
  if (!work_) return;
  try {
    std::exchange(work_, nullptr)->wait();
  } catch (const std::exception&) {  // the group failed; nothing is read
  }
}

at::Tensor FlatParameters::make_common() const {
  const auto options = options_.dtype(compute_dtype_);
  if (size_ == 1) return at::zeros({padded()}, options);
  auto* sharing =
      may_share_ && options_.device().is_cpu() && !group_->checks_calls()
          ? host_sharing(group_)
          : nullptr;
  at::Tensor flat;
  if (sharing == nullptr) return flat;
  run_step(Call("zeros_in_common", group_, group_->timeout()), [&] {
    flat = sharing->zeros_in_common(padded(), options, group_->timeout());
  });
  return flat;
}

void FlatParameters::take_memory() {
  auto flat = make_common();
  const bool aliased = shards_alias();
  flat_ = std::move(flat);
  in_common_ = flat_.defined();
  auto* full = compute_storage_.unsafeGetStorageImpl();
  full->set_data_ptr_noswap(data_of(flat_, unit_, options_.device()));
  if (in_common_) {
    full->clear_data_ptr_access_error_msg_();
  } else {
    full->release_data_and_set_meta_custom_data_ptr_error_msg_(kReleased);
  }
  if (shards_.defined() && !aliased && !shards_alias()) return;
  auto shards = shards_alias() ? own_slice() : at::zeros({slice_}, options_);
  if (shards_.defined()) shards.copy_(shards_);
  shards_ = std::move(shards);
  shard_storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
      data_of(shards_, unit_, options_.device()));
}

void FlatParameters::begin_again() {
  const at::NoGradGuard no_grad;
  end_gather();
  for (auto* tensor : {&sent_, &part_, &buffer_}) tensor->reset();
  neighbours_.reset();
  drop_gradients();
  for (auto& parameter : parameters_) parameter.shard.mutable_grad().reset();
  take_clipped();
  if (size_ > 1) take_memory();
  refresh();
  note_versions();
  bar_gradients();
}

at::Tensor FlatParameters::own_slice() const {
  return flat_.slice(0, rank_ * slice_, (rank_ + 1) * slice_);
}

void FlatParameters::refresh() {
  if (!in_common_ || flat_.dtype() == shards_.dtype()) return;
  const at::NoGradGuard no_grad;
  own_slice().copy_(shards_);
}

std::string FlatParameters::unit_name() const {
  const auto unit = unit_.lock();
  return unit ? unit->name() : "a unit that is gone";
}

bool FlatParameters::start_gather(BufferPool& pool) {
  if (in_common_ || buffer_.defined()) return false;
  const at::NoGradGuard no_grad;
  buffer_ = pool.take(padded(), options_.dtype(compute_dtype_));
  const bool in_part = part_.defined();
  sent_ =
      in_part ? std::exchange(part_, at::Tensor()) : shards_.to(compute_dtype_);
  work_ = all_gather_into_tensor(
      buffer_, sent_,
      {.group = in_part ? std::exchange(neighbours_, nullptr) : group_,
       .async_op = true});
  return true;
}

void FlatParameters::gather(BufferPool& pool) {
  if (in_common_) return;
  start_gather(pool);
  if (!work_) return;
  std::exchange(work_, nullptr)->wait();
  sent_.reset();
  // Saved tensors and the compute tensors share this storage, so they all have
  // the data again; their version counters do not change.
  auto* storage = compute_storage_.unsafeGetStorageImpl();
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(data_of(buffer_, unit_, options_.device()));
}

void FlatParameters::keep_part(const ProcessGroupPtr& neighbours,
                               BufferPool& pool) {
  if (in_common_ || !buffer_.defined()) return;
  const at::NoGradGuard no_grad;
  gather(pool);
  const int64_t count = padded() / neighbours->size();
  const int64_t begin = neighbours->rank() * count;
  auto part = buffer_.slice(0, begin, begin + count).clone();
  release(pool);
  part_ = std::move(part);
  neighbours_ = neighbours;
}

void FlatParameters::release(BufferPool& pool) {
  part_.reset();
  neighbours_.reset();
  if (in_common_ || !buffer_.defined()) return;
  if (work_) std::exchange(work_, nullptr)->wait();
  sent_.reset();
  auto* storage = compute_storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(data_of({}, unit_, options_.device()));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(kReleased);
  pool.give_back(std::exchange(buffer_, at::Tensor()));
}

bool FlatParameters::trains() const {
  return std::ranges::any_of(parameters_, [](const Parameter& parameter) {
    return parameter.shard.requires_grad();
  });
}

std::string FlatParameters::trained() const {
  std::string bits;
  for (const auto& parameter : parameters_) {
    bits += parameter.compute.requires_grad() ? '1' : '0';
  }
  return bits.find('0') == bits.npos ? std::string() : bits;
}

void FlatParameters::follow_requires_grad() {
  for (auto& parameter : parameters_) {
    const bool trained = parameter.shard.requires_grad();
    if (parameter.compute.requires_grad() == trained) continue;
    parameter.compute.set_requires_grad(trained);
    if (trained) continue;
    // The gradients that no_sync() has kept.
    parameter.accumulated.reset();
    parameter.compute.mutable_grad().reset();
  }
}

at::Tensor& FlatParameters::full_gradient(size_t index) {
  auto& parameter = parameters_[index];
  if (reduce_dtype_ != compute_dtype_) return parameter.accumulated;
  auto& grad = parameter.compute.mutable_grad();
  if (grad.defined() && grad.is_same(parameter.barred)) grad.reset();
  return grad;
}

const FlatParameters::Parameter* FlatParameters::with_gradient() const {
  const auto found =
      std::ranges::find_if(parameters_, [](const Parameter& parameter) {
        const auto& grad = parameter.compute.grad();
        return (grad.defined() && !grad.is_same(parameter.barred)) ||
               parameter.accumulated.defined();
      });
  return found == parameters_.end() ? nullptr : &*found;
}

void FlatParameters::take_gradients(const at::Tensor& flat, double factor,
                                    const LeftGradients& left) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) {
    auto& grad = parameter.compute.mutable_grad();
    const bool stays = left.contains(&parameter);
    parameter.used |=
        stays || grad.defined() || parameter.accumulated.defined();
    if (stays) continue;
    const auto place = tensor_over(flat.storage(), flat.scalar_type(),
                                   flat.storage_offset() + parameter.offset,
                                   parameter.compute.sizes(), flat);
    if (!grad.defined() && !parameter.accumulated.defined()) {
      place.zero_();
      continue;
    }
    if (grad.defined() && grad.layout() != at::kStrided) {
      throw std::invalid_argument(c10::str(
          "FullyShard: parameter ", parameter.name,
          " got a sparse gradient, which cannot be divided into shards; "
          "construct its module with sparse(false)"));
    }
    if (parameter.accumulated.defined()) {
      place.copy_(parameter.accumulated);
      if (grad.defined()) place.add_(grad);
      parameter.accumulated.reset();
    } else {
      place.copy_(grad);
    }
    grad.reset();
  }
  if (factor != 1) flat.mul_(factor);
}

at::Tensor FlatParameters::own_slice_of(const at::Tensor& flat,
                                        const LeftGradients& left) const {
  const at::NoGradGuard no_grad;
  const int64_t begin = rank_ * slice_;
  if (left.empty()) return flat.slice(0, begin, begin + slice_).clone();
  auto own = at::empty({slice_}, flat.options());
  for (const auto& parameter : parameters_) {
    const auto [from, to] = parameter.range;
    if (from == to) continue;
    const auto found = left.find(&parameter);
    const int64_t first = parameter.offset + from;
    own.slice(0, first - begin, first - begin + to - from)
        .copy_(found == left.end()
                   ? flat.slice(0, first, first + to - from)
                   : found->second.view({-1}).slice(0, from, to));
  }
  return own;
}

void FlatParameters::keep_gradients() {
  if (reduce_dtype_ == compute_dtype_) return;  // they stay in .grad
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) {
    auto& grad = parameter.compute.mutable_grad();
    if (!grad.defined()) continue;
    if (parameter.accumulated.defined()) {
      parameter.accumulated.add_(grad);
    } else {
      parameter.accumulated = grad.to(reduce_dtype_);
    }
    grad.reset();
  }
}

void FlatParameters::drop_gradients() {
  for (auto& parameter : parameters_) {
    parameter.compute.mutable_grad().reset();
    parameter.accumulated.reset();
    parameter.used = parameter.received = false;
    parameter.fresh_version.reset();
  }
}

void FlatParameters::zero_gradients(bool set_to_none) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& grad = full_gradient(i);
    if (set_to_none) {
      grad.reset();
    } else if (grad.defined()) {
      grad.zero_();
    }
  }
}

void FlatParameters::add_to_shards(const at::Tensor& reduced) {
  const at::NoGradGuard no_grad;
  const auto gradients = reduced.to(options_.dtype());
  const int64_t begin = rank_ * slice_;
  for (auto& parameter : parameters_) {
    if (!parameter.shard.requires_grad()) continue;
    const auto [from, to] = parameter.range;
    auto own = tensor_over<ShardGradient>(
        gradients.storage(), gradients.scalar_type(),
        gradients.storage_offset() +
            (to > from ? parameter.offset + from - begin : 0),
        parameter.shard.sizes(), gradients, parameter.data_use);
    for (const auto& hook : torch::autograd::impl::hooks(parameter.shard)) {
      own = (*hook)({own}).front();
    }
    auto& grad = parameter.shard.mutable_grad();
    const bool fresh =
        !grad.defined() || parameter.fresh_version == grad._version();
    if (grad.defined()) {
      grad.add_(own);
    } else {
      grad = std::move(own);
    }
    parameter.received = true;
    parameter.fresh_version.reset();
    if (fresh) parameter.fresh_version = grad._version();
  }
}

void FlatParameters::settle_gradients(const std::function<bool()>& is_used) {
  for (auto& parameter : parameters_) {
    const bool used = is_used();
    const bool received = std::exchange(parameter.received, false);
    const auto fresh = std::exchange(parameter.fresh_version, std::nullopt);
    parameter.used = false;
    auto& grad = parameter.shard.mutable_grad();
    if (!used) {
      if (fresh && grad.defined() && grad._version() == *fresh) grad.reset();
    } else if (received) {
      const auto& hook =
          torch::autograd::impl::post_acc_grad_hooks(parameter.shard);
      if (hook) (*hook)(parameter.shard);
    }
  }
}

void FlatParameters::bar_gradients() {
  for (auto& parameter : parameters_) {
    auto& grad = parameter.compute.mutable_grad();
    if (grad.defined() || !parameter.compute.requires_grad()) continue;
    if (!parameter.barred.defined()) {
      if (!barred_storage_) {
        barred_storage_ = storage_over({}, compute_storage_.nbytes(), unit_,
                                       options_.device());
        barred_storage_.unsafeGetStorageImpl()
            ->release_data_and_set_meta_custom_data_ptr_error_msg_(kBarred);
      }
      parameter.barred =
          tensor_over(barred_storage_, compute_dtype_, parameter.offset,
                      parameter.compute.sizes(), parameter.compute);
    }
    grad = parameter.barred;
  }
}

void FlatParameters::open_gradients() {
  for (auto& parameter : parameters_) {
    auto& grad = parameter.compute.mutable_grad();
    if (grad.defined() && grad.is_same(parameter.barred)) grad.reset();
  }
}

void FlatParameters::note_versions() {
  for (auto& parameter : parameters_) {
    parameter.version = parameter.shard._version();
    parameter.full_version = parameter.compute._version();
  }
}

const FlatParameters::Parameter* FlatParameters::written() const {
  const auto found =
      std::ranges::find_if(parameters_, [](const Parameter& parameter) {
        return parameter.version != parameter.shard._version();
      });
  return found == parameters_.end() ? nullptr : &*found;
}

const FlatParameters::Parameter* FlatParameters::full_written() const {
  if (size_ == 1 && flat_.dtype() == shards_.dtype()) return nullptr;
  const auto found =
      std::ranges::find_if(parameters_, [](const Parameter& parameter) {
        return parameter.full_version != parameter.compute._version();
      });
  return found == parameters_.end() ? nullptr : &*found;
}

const FlatParameters::Parameter* FlatParameters::take_clipped() {
  const Parameter* clipped = nullptr;
  for (auto& parameter : parameters_) {
    auto& use = *parameter.data_use;
    if (use.written.current_version() > 0) {
      // Once for the norm, and once to write; clip_grad_value_ is right.
      if (use.reads > 1 && size_ > 1) clipped = &parameter;
      use.written.set_version(0);
    }
    use.reads = 0;
  }
  return clipped;
}

void FlatParameters::require_own_memory() const {
  for (const auto& parameter : parameters_) {
    const auto& shard = parameter.shard;
    if (shard.dtype() == options_.dtype() && shard.has_storage() &&
        shard.storage().unsafeGetStorageImpl() ==
            shard_storage_.unsafeGetStorageImpl()) {
      continue;
    }
    throw std::logic_error(c10::str(
        "FullyShard: the shard of parameter ", parameter.name,
        " has got other memory (", shard.toString(),
        "), by to(), set_data() or a load that replaces tensors; move the "
        "module before sharding it, and copy values into the shard in place"));
  }
}

}  // namespace lockstep::internal
