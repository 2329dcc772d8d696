#include "lockstep/parallel/ddp/ddp_state.h"

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <unordered_set>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/comm/version_of.h"
#include "lockstep/parallel/ddp/equal_replicas.h"
#include "lockstep/parallel/ddp/model_agreement.h"
#include "lockstep/parallel/ddp/reducer.h"
#include "lockstep/parallel/module/module_contents.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep::internal {
namespace {

struct ResultAlias : torch::autograd::Function<ResultAlias> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& result) {
    context->set_materialize_grads(false);
    return result.detach();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      torch::autograd::variable_list gradients) {
    return gradients;
  }
};

// Returns a tensor of the same memory and version counter whose node in the
// graph is new. It is not a view: if the caller of a forward changes it in
// place, autograd keeps the node, while it replaces the nodes of views.
at::Tensor result_alias(const at::Tensor& result) {
  return ResultAlias::apply(result);
}

std::invalid_argument mistake(const std::string& what) {
  return std::invalid_argument("DistributedDataParallel: " + what);
}

int64_t mebibytes(const char* option, double value) {
  if (!(value > 0) || value > 1 << 20) {
    throw mistake(
        c10::str(option, " is ", value, "; allowed is more than 0, in MiB"));
  }
  return static_cast<int64_t>(value * (1 << 20));
}

BucketLimits limits_of(const DistributedDataParallelOptions& options) {
  auto cap = mebibytes("bucket_cap_mb", options.bucket_cap_mb.value_or(25));
  auto first =
      mebibytes("first_bucket_mb", options.first_bucket_mb.value_or(1));
  const bool first_as_others =
      options.bucket_cap_mb && !options.first_bucket_mb;
  return {first_as_others ? cap : first, cap};
}

// Returns the limits for the first backward, as Python's ranks have them.
BucketLimits first_limits_of(const DistributedDataParallelOptions& options,
                             const BucketLimits& limits) {
  const bool in_one = options.static_graph || !options.find_unused_parameters;
  return in_one ? BucketLimits{} : limits;
}

// Names tied tensors once, by their first name.
std::vector<NamedParameter> unique(
    const torch::OrderedDict<std::string, at::Tensor>& tensors,
    const std::unordered_set<std::string>& ignored) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<NamedParameter> all;
  for (const auto& item : tensors) {
    if (!item.value().defined() || ignored.contains(item.key()) ||
        !seen.insert(item.value().unsafeGetTensorImpl()).second) {
      continue;
    }
    all.push_back({item.key(), item.value()});
  }
  return all;
}

std::unordered_set<std::string> ignored_names(
    const torch::nn::Module& module,
    const DistributedDataParallelOptions& options) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  for (const auto& name : options.params_and_buffers_to_ignore) {
    if (!parameters.contains(name) && !buffers.contains(name)) {
      throw mistake("params_and_buffers_to_ignore names '" + name +
                    "', but the module has no parameter or buffer of that "
                    "name; see named_parameters() and named_buffers()");
    }
  }
  return {options.params_and_buffers_to_ignore.begin(),
          options.params_and_buffers_to_ignore.end()};
}

void require_float(const char* name, std::optional<at::ScalarType> dtype) {
  if (dtype && !c10::isFloatingType(*dtype)) {
    throw mistake(
        c10::str("mixed_precision.", name, " is ", *dtype,
                 "; allowed are floating-point dtypes, such as at::kBFloat16"));
  }
}

bool makes_sparse_gradients(const torch::nn::Module& module) {
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) {
    return embedding->options.sparse();
  }
  if (const auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) {
    return bag->options.sparse();
  }
  return false;
}

}  // namespace

DdpState::DdpState(torch::nn::Module& module,
                   DistributedDataParallelOptions options)
    : module_(module), options_(std::move(options)) {
  const UserFunction function("DistributedDataParallel's constructor");
  limits_of(options_);  // its errors come first
  auto& group = options_.process_group;
  group = group_or_default(group);
  if (const auto& mixed = options_.mixed_precision) {
    require_float("param_dtype", mixed->param_dtype);
    require_float("reduce_dtype", mixed->reduce_dtype);
    require_float("buffer_dtype", mixed->buffer_dtype);
  }
  if (options_.check_replicas_every < 0) {
    throw mistake(c10::str("check_replicas_every is ",
                           options_.check_replicas_every,
                           "; allowed are iterations, or 0 for never"));
  }
  if (options_.skip_all_reduce_unused_params &&
      !options_.find_unused_parameters && !options_.static_graph) {
    throw mistake(
        "skip_all_reduce_unused_params needs find_unused_parameters or "
        "static_graph, which find out what is unused");
  }
  find_tensors();
  if (trained().empty()) {
    throw mistake(
        "the module has no parameter that requires grad; wrap modules that "
        "are trained, use the others as they are");
  }
  for (const auto& parameter : parameters_) {
    require_replica(parameter.tensor, *group, "DistributedDataParallel",
                    "give process_group the ranks that have the same part, or "
                    "name the parameter in params_and_buffers_to_ignore",
                    parameter.name);
  }
  if (options_.init_sync && group->size() > 1) {
    beside_python_ =
        !verify_same_model(options_, parameters_, buffers_, trained());
    broadcast_from(0, true,
                   options_.broadcast_buffers ||
                       options_.forward_sync_buffers.has_value());
  }
  if (const auto& mixed = options_.mixed_precision) {
    if (mixed->buffer_dtype) {
      for (const auto& buffer : buffers_) {
        auto& tensor = const_cast<at::Tensor&>(buffer.tensor);
        if (!tensor.is_floating_point()) continue;
        tensor.set_data(tensor.to(*mixed->buffer_dtype));
      }
    }
    if (mixed->param_dtype) low_ = make_low_precision();
  }
  reducers_.emplace_front(training_, make_reducer());
  reducer_ = reducers_.front().second.get();
  trained_at_first_ = training_.trained;
  if (job_heals()) {
    std::vector<at::Tensor> trained;
    for (const auto& parameter : parameters_) {
      trained.push_back(parameter.tensor);
    }
    on_reconfigured_.emplace(
        OnReconfigured::Object{.function = [this] { begin_again(); },
                               .parameters = std::move(trained),
                               .memory = &require_forward_buffer_sync_});
  }
}

// Makes everything that belonged to the ranks' last generation anew, as the
// constructor did: a new process has made it so, too. The ranks have the same
// parameters and buffers by now. A sharded optimizer divides the new reducer's
// gradients afterwards, as its constructor did. Collective.
void DdpState::begin_again() {
  const UserFunction function("HealedTraining");
  while (low_ && low_->is_low()) low_->restore();
  // The order of the buckets decides in which order Gloo adds, so a rank that
  // knows it tells the others.
  for (const auto& [training, reducer] : reducers_) {
    if (training.trained != trained_at_first_) continue;
    if (auto buckets = reducer->learnt_buckets()) learnt_ = std::move(buckets);
  }
  const nlohmann::json known = learnt_ ? nlohmann::json(*learnt_) : nullptr;
  const auto& group = options_.process_group;
  for (const auto& theirs : all_gather_object(known, {.group = group})) {
    if (theirs.is_null()) continue;
    theirs.get_to(learnt_.emplace());  // the first rank's, on all ranks
    break;
  }
  for (const auto& [training, reducer] : reducers_) reducer->drop_gradients();
  reducer_ = nullptr;
  reducers_.clear();
  // Parameters may have been frozen since, and the next forward sees to that.
  std::vector<std::pair<at::Tensor, bool>> trained_now;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& tensor = parameters_[i].tensor;
    trained_now.emplace_back(tensor, tensor.requires_grad());
    tensor.set_requires_grad(trained_at_first_[i]);
  }
  // Also if another rank dies here, and this begins again.
  const auto freezes = c10::make_scope_exit([&] {
    for (auto& [tensor, trained] : trained_now) {
      tensor.set_requires_grad(trained);
    }
  });
  find_tensors();
  beside_python_ = false;
  if (low_) low_ = make_low_precision();
  // The buckets are not made twice, since each time takes new memory.
  reducers_.emplace_front(training_, make_reducer(learnt_));
  learnt_.reset();
  reducer_ = reducers_.front().second.get();
  if (!optimizers_.empty()) step_in_backward();
  noted_.reset();
  foreign_pass_ = -1;
  shadowed_ = false;
  require_forward_buffer_sync_ = true;
}

LowPrecisionParameters DdpState::make_low_precision() const {
  std::vector<at::Tensor> all;
  for (const auto& parameter : parameters_) all.push_back(parameter.tensor);
  return {all, *options_.mixed_precision->param_dtype};
}

void DdpState::find_tensors() {
  const auto ignored = ignored_names(module_, options_);
  parameters_ = unique(module_.named_parameters(), ignored);
  buffers_ = unique(module_.named_buffers(), ignored);
  std::erase_if(buffers_, [this](const NamedParameter& buffer) {
    return is_divided_over(buffer.tensor, *options_.process_group);
  });
  registered_ = registered_parameters(module_);
  training_ = training_now();
  std::unordered_set<const c10::TensorImpl*> sparse;
  for (const auto& part : module_.modules()) {
    if (!makes_sparse_gradients(*part)) continue;
    for (const auto& parameter : part->parameters(/*recurse=*/false)) {
      sparse.insert(parameter.unsafeGetTensorImpl());
    }
  }
  sparse_.clear();
  const auto& group = *options_.process_group;
  for (const auto& [name, tensor] : parameters_) {
    sparse_.push_back(sparse.contains(tensor.unsafeGetTensorImpl()));
    const auto device = tensor.device().type();
    if (sparse_.back() && tensor.requires_grad() && group.size() > 1 &&
        inside(group).has_backend(device) &&
        !traits_of(inside(group).backend(device)).sums_sparse()) {
      throw mistake("the gradient of '" + name +
                    "' is sparse, and NCCL sums no sparse tensors; make its "
                    "module with sparse(false), or give a process_group over "
                    "gloo");
    }
  }
}

DdpState::Training DdpState::training_now() const {
  Training now;
  for (const auto& [name, tensor] : parameters_) {
    now.tensors.push_back(tensor.unsafeGetTensorImpl());
    now.trained.push_back(tensor.requires_grad());
    now.kinds.emplace_back(tensor.scalar_type(), tensor.device());
    now.sizes.push_back(tensor.sizes().vec());
  }
  return now;
}

std::vector<NamedParameter> DdpState::trained() const {
  std::vector<NamedParameter> trained;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (training_.trained[i]) trained.push_back(parameters_[i]);
  }
  return trained;
}

std::unique_ptr<Reducer> DdpState::make_reducer(
    std::optional<std::vector<std::vector<size_t>>> learnt) {
  const auto& group = options_.process_group;
  const auto limits = limits_of(options_);
  std::vector<TrainedParameter> reduced;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (training_.trained[i]) reduced.push_back({parameters_[i], sparse_[i]});
  }
  const auto& mixed = options_.mixed_precision;
  auto reducer = std::make_unique<Reducer>(
      std::move(reduced), group,
      ReducerOptions{
          .limits = limits,
          .first_limits = first_limits_of(options_, limits),
          .find_unused_parameters = options_.find_unused_parameters,
          .static_graph = options_.static_graph,
          .gradient_as_bucket_view = options_.gradient_as_bucket_view,
          .place_gradients = options_.place_gradients,
          .skip_all_reduce_unused_params =
              options_.skip_all_reduce_unused_params,
          .check_for_nan_in_grad = options_.check_for_nan_in_grad,
          .reduce_dtype = !mixed                ? std::nullopt
                          : mixed->reduce_dtype ? mixed->reduce_dtype
                                                : mixed->param_dtype,
          .beside_python = beside_python_,
          .learnt = std::move(learnt)},
      identity_);
  reducer->on_foreign_gradient([this, own = reducer.get()](size_t parameter) {
    warn_of_foreign_gradient(*own, parameter);
  });
  reducer->times().set_sample_rate(sample_rate_);
  if (hook_) reducer->register_comm_hook(hook_);
  if (low_) {
    // Nested backward passes (checkpointed parts) record their graphs now, with
    // the gradient accumulators that LibTorch makes for the new dtype.
    reducer->around_graphs(
        [this, &tracker = reducer->tracker()] {
          low_->lower_for_backward();
          tracker.watch();
        },
        [this] { low_->restore(); });
  }
  return reducer;
}

void DdpState::register_comm_hook(CommHook hook) {
  if (!hook) throw mistake("the communication hook is empty");
  if (!optimizers_.empty()) {
    throw std::logic_error(
        "register_comm_hook: optimizers step in backward, after the averaging "
        "all-reduce; use a hook or apply_optimizer_in_backward");
  }
  for (const auto& [training, reducer] : reducers_) {
    reducer->require_no_training();
  }
  for (const auto& [training, reducer] : reducers_) {
    reducer->register_comm_hook(hook);
  }
  hook_ = std::move(hook);
}

void DdpState::apply_optimizer_in_backward(const MakeOptimizer& make) {
  if (hook_ || has_optimizer()) {
    throw std::logic_error(
        "apply_optimizer_in_backward: there is a communication hook, a sharded "
        "optimizer or an optimizer in backward already");
  }
  if (low_) {
    throw std::logic_error(
        "apply_optimizer_in_backward: with mixed_precision.param_dtype "
        "parameters are low-precision copies during backward; call step() "
        "after backward()");
  }
  for (const auto& parameter : reducer_->parameters()) {
    optimizers_.push_back(make({parameter.tensor}));
  }
  step_in_backward();
}

void DdpState::step_in_backward() {
  reducer_->on_final([this](const std::vector<size_t>& parameters) {
    for (size_t i : parameters) {
      optimizers_[i]->step();
      reducer_->parameters()[i].tensor.mutable_grad().reset();
    }
  });
}

std::vector<torch::optim::Optimizer*> DdpState::get_in_backward_optimizers()
    const {
  std::vector<torch::optim::Optimizer*> optimizers;
  for (const auto& optimizer : optimizers_) {
    optimizers.push_back(optimizer.get());
  }
  return optimizers;
}

bool DdpState::trained_differ() const {
  if (low_ && low_->is_low()) return false;  // a forward within a backward
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_[i].tensor;
    const auto& [dtype, device] = training_.kinds[i];
    if (tensor.requires_grad() != training_.trained[i] ||
        tensor.scalar_type() != dtype || tensor.device() != device) {
      return true;
    }
  }
  return false;
}

// Throws if the module has other parameters than when it was wrapped, or
// parameters of other sizes: they would not be averaged.
void DdpState::require_same_parameters() const {
  require_registered(module_, registered_, "DistributedDataParallel",
                     "would not be averaged");
  if (low_ && low_->is_low()) return;  // a forward within a backward
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor] = parameters_[i];
    if (tensor.sizes() == training_.sizes[i]) continue;
    throw mistake(c10::str(
        "parameter '", name, "' has the sizes ", tensor.sizes(), ", but ",
        c10::IntArrayRef(training_.sizes[i]),
        " when it was wrapped, and so have its bucket and the optimizer's "
        "state; wrap the module, and make its optimizer, after resizing"));
  }
}

// Called when requires_grad, dtype or device has changed: selects the buckets
// for what is trained now, or makes them.
void DdpState::retrain() {
  if (has_optimizer()) {
    throw std::runtime_error(
        "DistributedDataParallel: requires_grad, dtype or device of a "
        "parameter was changed, but an optimizer (sharded, or in backward) "
        "holds slices of the parameters that were trained; make a new wrapper "
        "and a new optimizer");
  }
  const auto* join = current_join();
  if (join != nullptr && !join->options().throw_on_early_termination) {
    throw std::logic_error(
        "DistributedDataParallel: requires_grad, dtype or device of a "
        "parameter was changed under join(), where ranks without inputs "
        "cannot follow; change it before join()");
  }
  reducer_->settle();
  const auto before = training_;
  std::optional<LowPrecisionParameters> low;
  try {
    find_tensors();
    const auto known = std::ranges::find(
        reducers_, training_, &decltype(reducers_)::value_type::first);
    const auto& group = options_.process_group;
    if (group->size() > 1 && !same_on_all_ranks(known != reducers_.end())) {
      verify_same_model(options_, parameters_, buffers_, trained());
    }
    // All reducers share the copies, which include those of frozen parameters.
    if (low_ && (training_.tensors != before.tensors ||
                 training_.kinds != before.kinds)) {
      low = make_low_precision();
    }
    if (known != reducers_.end()) {
      reducers_.splice(reducers_.begin(), reducers_, known);
    } else {
      reducers_.emplace_front(training_, make_reducer());
    }
  } catch (...) {
    training_ = before;  // the next forward tries again
    throw;
  }
  if (low) low_ = std::move(low);
  auto& next = *reducers_.front().second;
  next.continue_from(*reducer_);
  reducer_ = &next;
  // Gradients of dropped buckets stay alive with their aliases.
  if (reducers_.size() > kMostReducers) reducers_.pop_back();
}

// Returns whether all ranks train the same parameters and already have buckets
// for them. Collective.
bool DdpState::same_on_all_ranks(bool known) const {
  Agreement agreement(options_.process_group);
  agreement.hold("known", known ? "yes" : "no");
  for (const auto& [name, tensor] : trained()) {
    agreement.hold(name, tensor.toString());
  }
  return agreement.is_same() && known;
}

// If only some ranks do this, the errors name the calls of all.
void DdpState::before_join() {
  if (!trained_differ()) return;
  const UserFunction function("join() after requires_grad or dtype changed");
  retrain();
}

void DdpState::before_forward() {
  if (gate_) gate_();
  const bool differs = at::GradMode::is_enabled() && trained_differ();
  const UserFunction function(
      differs ? "forward() after requires_grad or dtype changed" : "forward()");
  if (at::GradMode::is_enabled()) TrainingCounters::instance().count_step();
  const bool trains = at::GradMode::is_enabled() && require_backward_grad_sync;
  int source = 0;
  double divides_by = options_.process_group->size();
  if (auto* join = current_join()) {
    if (gate_ && join->joinables() == 1 &&
        !join->options().throw_on_early_termination) {
      throw std::logic_error(
          "DistributedDataParallel: join() was called without the wrapper's "
          "sharded optimizer, which communicates in step(); name both: "
          "lockstep::join({&model.joinable(), &optimizer}, body)");
    }
    const auto& iteration =
        join->begin_iteration(*this, trains, at::GradMode::is_enabled());
    source = iteration.active.back();
    divides_by = divisor(iteration, join->options());
  }
  if (at::GradMode::is_enabled()) {
    require_same_parameters();
    if (differs) retrain();
    reducer_->set_divisor(divides_by);
    reducer_->prepare();
    note_forward();
  }
  const auto every = options_.check_replicas_every;
  if (every > 0 && trains && current_join() == nullptr) {
    const auto steps = reducer_->steps();
    if (steps > 0 && steps % every == 0) {
      verify_replicas();
    }
  }
  if (require_forward_buffer_sync_) broadcast_buffers(source);
  require_forward_buffer_sync_ = trains;
  if (low_) low_->lower_for_forward();
  if (!at::GradMode::is_enabled()) return;
  try {
    // Ranks without inputs make no forwards under join().
    const bool counts = module_.is_training() && current_join() == nullptr;
    reducer_->tracker().begin_forward(trains, counts);
  } catch (...) {
    if (low_) low_->restore();
    throw;
  }
}

DdpState::Noted DdpState::noted_now() const {
  Noted now{.averages = reducer_->steps()};
  const auto& parameters = reducer_->parameters();
  for (const auto& parameter : parameters) {
    now.versions += version_of(parameter.tensor);
  }
  if (parameters.empty()) return now;  // all are frozen
  const auto& last = parameters.back().tensor;
  if (last.is_cpu()) {
    std::memcpy(now.bytes.data(), last.const_data_ptr(),
                std::min(now.bytes.size(),
                         last.storage().nbytes() -
                             static_cast<size_t>(last.storage_offset()) *
                                 last.element_size()));
  }
  return now;
}

void DdpState::note_forward() { noted_ = noted_now(); }

// Called in backward, for each gradient, of which the first of each pass is
// looked at.
void DdpState::warn_of_foreign_gradient(const Reducer& reducer,
                                        size_t parameter) {
  if (warned_of_foreign_ || &reducer != reducer_) return;
  const int pass = torch::autograd::get_current_graph_task_id();
  if (std::exchange(foreign_pass_, pass) == pass || noted_ == noted_now()) {
    return;
  }
  warned_of_foreign_ = true;
  TORCH_WARN("lockstep: DistributedDataParallel of ", module_.name(),
             ": a backward puts a gradient into parameter '",
             reducer.parameters()[parameter].name,
             "', but no forward of the wrapper was made since the last average "
             "or step, so this gradient is not averaged over the ranks. Call "
             "model->forward(x) or model(x); model.module()->forward(x) is "
             "the plain module");
}

// Empty if a forward may write parameters: alone, with parameters that stay.
std::vector<uint32_t> DdpState::versions() const {
  std::vector<uint32_t> versions;
  if (!low_ && options_.process_group->size() == 1) return versions;
  versions.reserve(parameters_.size());
  for (const auto& parameter : parameters_) {
    versions.push_back(version_of(parameter.tensor));
  }
  return versions;
}

void DdpState::require_unwritten(const std::vector<uint32_t>& versions) const {
  for (size_t i = 0; i < versions.size(); ++i) {
    const auto& [name, tensor] = parameters_[i];
    if (version_of(tensor) == versions[i]) continue;
    throw std::logic_error(c10::str(
        "DistributedDataParallel: forward has written parameter '", name, "', ",
        low_
            ? "which is a copy in mixed_precision.param_dtype then, so that "
              "what was written is lost"
            : "so the ranks may have different ones now: each has written from "
              "its own data",
        ". Write parameters after step(), on all ranks alike (as the max_norm "
        "of an Embedding, by renorm_()), or before the wrapper is made (first "
        "values from data); what forward itself must write can be a buffer"));
  }
}

void DdpState::verify_replicas() const {
  auto quoted = parameters_;
  for (auto& parameter : quoted) parameter.name = "'" + parameter.name + "'";
  const auto difference = replica_difference(quoted, options_.process_group);
  if (difference.empty()) return;
  throw std::runtime_error(
      "the replicas have drifted apart: " + difference +
      "; something changed it on one rank only (a step that was left out "
      "there, other options of the optimizer, faulty memory): load a snapshot "
      "on all ranks");
}

void DdpState::ForwardPass::take(at::Tensor& tensor) {
  auto& tracker = state_.reducer_->tracker();
  const bool older = tracker.has_older_graph(tensor);
  if (older && tensor.is_leaf()) {
    tensor = at::alias(tensor);  // the caller may not change it either
  } else if (older) {
    tensor = result_alias(tensor);
  }
  tracker.result(tensor);
}

void DdpState::ForwardPass::take(const at::Tensor& tensor) {
  auto& tracker = state_.reducer_->tracker();
  if (tracker.has_older_graph(tensor)) {
    throw mistake(
        "forward returns, by reference or through a shared_ptr, a parameter "
        "itself or a tensor that was computed from parameters before, so the "
        "wrapper cannot tell which backward passes are its own; return the "
        "tensor by value");
  }
  tracker.result(tensor);
}

void DdpState::after_forward(bool threw) {
  reducer_->tracker().end_forward(threw);
  if (low_) low_->restore();
}

double DdpState::divisor(const JoinIteration& iteration,
                         const JoinOptions& options) const {
  return options.divide_by_initial_world_size
             ? options_.process_group->size()
             : static_cast<double>(iteration.active.size());
}

void DdpState::broadcast_buffers(int rank) {
  if (!sends_buffers() || buffers_.empty() ||
      options_.process_group->size() == 1) {
    return;
  }
  broadcast_from(rank, false, true);
}

// `rank`: of the group.
void DdpState::broadcast_from(int rank, bool parameters, bool buffers) {
  std::vector<at::Tensor> data;
  // An older graph may hold these tensors and still be needed. As in Python,
  // autograd is not told of this change: variable_data() has a version counter
  // of its own.
  if (parameters) {
    for (const auto& one : parameters_) {
      data.push_back(one.tensor.variable_data());
    }
  }
  if (buffers) {
    for (const auto& one : buffers_) data.push_back(one.tensor.variable_data());
  }
  at::NoGradGuard no_grad;
  const auto& group = options_.process_group;
  broadcast_coalesced(data, group->global_rank(rank), group);
}

void DdpState::shadow(const JoinIteration& iteration,
                      const JoinOptions& options) {
  if (gate_) gate_();
  if (iteration.trains) reducer_->prepare();
  if (require_forward_buffer_sync_) broadcast_buffers(iteration.active.back());
  require_forward_buffer_sync_ = iteration.synchronizes;
  if (!iteration.synchronizes) return;
  reducer_->set_divisor(divisor(iteration, options));
  reducer_->shadow_backward();
  shadowed_ = true;
}

void DdpState::after_join(int last_joiner) {
  if (gate_) gate_();
  if (std::exchange(shadowed_, false)) reducer_->drop_gradients();
  if (options_.process_group->size() == 1) return;
  broadcast_from(last_joiner, true, sends_buffers());
}

DdpState::~DdpState() = default;

std::vector<std::vector<std::string>> DdpState::bucket_names() const {
  return reducer_->bucket_names();
}

DDPLoggingData DdpState::logging_data() const {
  DDPLoggingData data;
  const auto& group = options_.process_group;
  data.world_size = group->size();
  data.rank = group->rank();
  data.module_name = module_.name();
  data.backend_name = group->backend_config();
  data.broadcast_buffers = sends_buffers();
  data.mixed_precision = options_.mixed_precision.has_value();
  reducer_->describe(data);
  return data;
}

void DdpState::set_sample_rate(int64_t rate) {
  if (rate < 1) {
    throw mistake(c10::str("the runtime logging sample rate is ", rate,
                           "; allowed is 1 or more"));
  }
  sample_rate_ = rate;
  for (auto& [training, reducer] : reducers_) {
    reducer->times().set_sample_rate(rate);
  }
}

LowPrecisionParameters::LowPrecisionParameters(
    const std::vector<at::Tensor>& parameters, at::ScalarType dtype) {
  for (const auto& parameter : parameters) {
    if (!parameter.is_floating_point() || parameter.scalar_type() == dtype) {
      continue;
    }
    parameters_.push_back(
        {parameter, {}, at::empty_like(parameter.variable_data(), dtype)});
  }
}

void LowPrecisionParameters::lower(bool casts) {
  if (depth_ == 0) {
    const at::NoGradGuard no_grad;
    for (auto& [parameter, master, low] : parameters_) {
      master = parameter.variable_data();
      if (casts) low.copy_(master);
      parameter.set_data(low);
    }
  }
  ++depth_;
}

void LowPrecisionParameters::restore() {
  if (--depth_ > 0) return;
  for (auto& [parameter, master, low] : parameters_) parameter.set_data(master);
}

at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype)
                                                        : tensor;
}

}  // namespace lockstep::internal
