#include "lockstep/parallel/zero/sharded_optimizer.h"

#include <c10/util/StringUtil.h>

#include <exception>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/ddp/ddp_state.h"
#include "lockstep/parallel/ddp/reducer.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep::internal {
namespace {

ProcessGroupPtr group_of(const ZeroRedundancyOptions& options, DdpState* ddp) {
  if (!ddp) return group_or_default(options.process_group);
  if (options.process_group.require_member() &&
      options.process_group != ddp->process_group()) {
    throw std::invalid_argument(
        "ZeroRedundancyOptimizer: process_group is not the group of the "
        "DistributedDataParallel; leave the option out");
  }
  return ddp->process_group();
}

void check_options(const ZeroRedundancyOptions& options, bool has_ddp) {
  if (options.shared_parameters && options.step_in_backward) {
    throw std::invalid_argument(
        "ZeroRedundancyOptimizer: step_in_backward cannot be used with "
        "shared_parameters, because a parameter that all ranks share cannot be "
        "written while another rank still computes with it; use one of the "
        "two");
  }
  if (has_ddp) return;
  if (options.shared_parameters || options.step_in_backward) {
    throw std::invalid_argument(c10::str(
        "ZeroRedundancyOptimizer: ",
        options.shared_parameters ? "shared_parameters" : "step_in_backward",
        " needs a DistributedDataParallel, but parameters were given; give the "
        "DistributedDataParallel instead, or leave the option out"));
  }
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(Make make, bool element_wise,
                                   std::optional<ParamGroups> groups,
                                   ZeroRedundancyOptions options, DdpState* ddp)
    : torch::optim::Optimizer(ParamGroups(), make({})->defaults().clone()),
      make_(std::move(make)),
      options_(std::move(options)),
      group_(group_of(options_, ddp)),
      has_ddp_(ddp != nullptr),
      cut_(options_.cut_parameters.value_or(element_wise)),
      partition_(group_->size(), cut_),
      self_(std::make_shared<ShardedOptimizer*>(this)) {
  check_options(options_, has_ddp_);
  if (ddp) {
    if (ddp->reducer().has_comm_hook()) {
      throw std::invalid_argument(
          "ZeroRedundancyOptimizer: the DistributedDataParallel has a "
          "communication hook, which reduces whole buckets; construct the "
          "optimizer from the parameters instead");
    }
    if (ddp->has_optimizer()) {
      throw std::invalid_argument(
          "ZeroRedundancyOptimizer: the DistributedDataParallel has a sharded "
          "optimizer or optimizers in backward already; give one optimizer "
          "several parameter groups instead");
    }
    if (ddp->lowers_parameters() &&
        (options_.shared_parameters || options_.step_in_backward)) {
      throw std::invalid_argument(
          "ZeroRedundancyOptimizer: with mixed_precision.param_dtype the "
          "parameters are low-precision copies during backward, so they can be "
          "neither shared nor stepped there; use private parameters");
    }
    if (ddp->trained_differ()) {
      throw std::invalid_argument(
          "ZeroRedundancyOptimizer: requires_grad, dtype or device of a "
          "parameter was changed since the DistributedDataParallel was "
          "constructed or last called; make the optimizer from a wrapper that "
          "is constructed after such changes");
    }
    names_ = std::make_shared<ParameterNames>(ddp->module());
    std::vector<at::Tensor> trained;
    const auto& reducer = ddp->reducer();
    for (size_t i = 0; i < reducer.parameters().size(); ++i) {
      const auto& parameter = reducer.parameters()[i];
      trained.push_back(parameter.tensor);
      if (!reducer.is_sparse(i)) sharded_.push_back(parameter);
    }
    register_parameters(trained);
    if (!groups) groups.emplace({torch::optim::OptimizerParamGroup(trained)});
  }
  for (const auto& group : *groups) take_group(group);
  adopt_groups();
  if (options_.shared_parameters) share_parameters();
  if (ddp) bind(*ddp);
  if (job_heals()) on_reconfigured_.emplace([this] { begin_again(); });
}

// Makes what belonged to the ranks' last generation again. The wrapper has made
// its reducer again before, because it is older. Collective.
void ShardedOptimizer::begin_again() {
  const UserFunction function("HealedTraining");
  gather_.reset();
  for (const auto& piece : pieces_) {
    if (piece) piece->drop_gradient();
  }
  if (shared_) share_parameters();
  if (const auto ddp = ddp_.lock()) bind(**ddp);
}

void ShardedOptimizer::bind(DdpState& ddp) {
  std::vector<Range> owned;
  for (const Ranges& ranges : ranges_) {
    owned.push_back(ranges[static_cast<size_t>(group_->rank())]);
  }
  const std::weak_ptr<ShardedOptimizer*> self = self_;
  ddp.reducer().shard(std::move(owned), [self](size_t parameter) {
    const auto alive = self.lock();
    return alive && (*alive)->grouped_[parameter];
  });
  // A gate also keeps the set of trained parameters, and with it the partition,
  // as it is.
  auto wrapper = std::make_shared<DdpState*>(&ddp);
  ddp_ = wrapper;
  ddp.set_forward_gate([shared = shared_, wrapper = std::move(wrapper)] {
    if (shared) shared->wait();
  });
  if (options_.step_in_backward) {
    ddp.reducer().on_final([self](const std::vector<size_t>& parameters) {
      if (const auto alive = self.lock()) (*alive)->step_final(parameters);
    });
  }
}

void ShardedOptimizer::share_parameters() {
  shared_ = std::make_shared<SharedParameters>(of_grouped(parameters_), group_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    memory_[i].address = parameters_[i].const_data_ptr();
    if (pieces_[i]) pieces_[i]->refresh();
  }
}

void ShardedOptimizer::register_parameters(
    const std::vector<at::Tensor>& parameters) {
  auto ranges = partition_.add(parameters);
  const auto rank = static_cast<size_t>(group_->rank());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    index_.emplace(parameter.unsafeGetTensorImpl(), parameters_.size());
    const Range mine = ranges[i][rank];
    // The first rank keeps the state of parameters without elements.
    const bool owns = parameter.numel() > 0 ? mine.size() > 0 : rank == 0;
    pieces_.push_back(
        owns ? std::make_unique<ParameterPiece>(parameter, mine, !cut_)
             : nullptr);
    parameters_.push_back(parameter);
    memory_.push_back({parameter.const_data_ptr(), parameter.sizes().vec(),
                       parameter.strides().vec()});
    ranges_.push_back(std::move(ranges[i]));
    grouped_.push_back(false);
  }
  gather_.reset();
}

void ShardedOptimizer::check_new_groups() const {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t g = adopted_; g < param_groups_.size(); ++g) {
    for (const at::Tensor& parameter : param_groups_[g].params()) {
      require_replica(
          parameter, *group_, "ZeroRedundancyOptimizer",
          "give process_group the ranks that have the same part, or give the "
          "parameter to an optimizer that is not sharded");
      const auto* impl = parameter.unsafeGetTensorImpl();
      const auto found = index_.find(impl);
      if (!seen.insert(impl).second ||
          (found != index_.end() && grouped_[found->second])) {
        throw std::invalid_argument(
            "ZeroRedundancyOptimizer: some parameters appear in more than one "
            "parameter group; name each parameter in one group");
      }
      if (has_ddp_ && found == index_.end()) {
        throw std::invalid_argument(c10::str(
            "ZeroRedundancyOptimizer: a parameter of sizes ", parameter.sizes(),
            " is not trained by the DistributedDataParallel; leave it out of "
            "the groups if it is frozen, and give it to an optimizer of its "
            "own if it belongs to another module"));
      }
    }
  }
  for (const auto& [name, parameter] : sharded_) {
    const auto* impl = parameter.unsafeGetTensorImpl();
    if (grouped_[index_.at(impl)] || seen.contains(impl)) continue;
    throw std::invalid_argument(c10::str(
        "ZeroRedundancyOptimizer: '", name,
        "' is in no parameter group, but the DistributedDataParallel trains "
        "it, and each rank would get a part of its gradient only; name all "
        "trained parameters in the groups (those with sparse gradients may "
        "have another optimizer), or freeze it before constructing "
        "DistributedDataParallel"));
  }
}

// Throws if the ranks' new groups differ; they would otherwise overwrite each
// other's parameters. `mistake`: why this rank refuses its own groups, or null.
void ShardedOptimizer::agree_on_new_groups(std::exception_ptr mistake) const {
  Agreement agreement(group_);
  if (!mistake) {
    agreement.hold(
        "what was given",
        c10::str(has_ddp_ ? "a DistributedDataParallel" : "parameters",
                 cut_ ? ", cut" : ", whole",
                 options_.shared_parameters ? ", shared_parameters" : "",
                 options_.step_in_backward ? ", step_in_backward" : ""));
    agreement.hold("the number of parameter groups",
                   std::to_string(param_groups_.size()));
    for (size_t g = adopted_; g < param_groups_.size(); ++g) {
      agreement.hold(c10::str("the learning rate of group ", g),
                     c10::str(param_groups_[g].options().get_lr()));
      size_t number = 0;
      for (const at::Tensor& parameter : param_groups_[g].params()) {
        agreement.hold(c10::str("parameter ", number++, " of group ", g),
                       c10::str(parameter.scalar_type(), parameter.sizes(),
                                " with strides ", parameter.strides()));
      }
    }
  }
  agreement.fail(std::move(mistake));
  const auto difference = agreement.compare();
  if (!difference) return;
  throw std::invalid_argument(
      "ZeroRedundancyOptimizer: " + difference->words() +
      "; all ranks must make the same optimizer, of "
      "the same parameters in the same groups");
}

void ShardedOptimizer::adopt_groups() {
  if (inner_ && adopted_ == param_groups_.size()) return;
  for (size_t g = adopted_; g < param_groups_.size(); ++g) {
    auto& parameters = param_groups_[g].params();
    parameters = distinct(std::move(parameters));
  }
  try {
    std::exception_ptr mistake;
    try {
      check_new_groups();
    } catch (const std::exception&) {
      mistake = std::current_exception();
    }
    agree_on_new_groups(std::move(mistake));
  } catch (...) {
    while (param_groups_.size() > adopted_) param_groups_.pop_back();
    throw;
  }
  std::vector<at::Tensor> unknown;
  for (size_t g = adopted_; g < param_groups_.size(); ++g) {
    for (const at::Tensor& parameter : param_groups_[g].params()) {
      if (!index_.contains(parameter.unsafeGetTensorImpl())) {
        unknown.push_back(parameter);
      }
    }
  }
  if (!unknown.empty()) register_parameters(unknown);
  ParamGroups groups;
  for (; adopted_ < param_groups_.size(); ++adopted_) {
    const auto& group = param_groups_[adopted_];
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& parameter : group.params()) {
      const size_t index = index_.at(parameter.unsafeGetTensorImpl());
      grouped_[index] = true;
      if (pieces_[index]) pieces.push_back(pieces_[index]->tensor());
    }
    groups.emplace_back(std::move(pieces), group.options().clone());
  }
  gather_.reset();
  OptimizerPtr added = make_(groups);
  if (!inner_) {
    inner_ = std::move(added);
    return;
  }
  // Some kinds of optimizers make their state only in the constructor.
  for (auto& group : added->param_groups()) {
    inner_->param_groups().push_back(std::move(group));
  }
  for (auto& [piece, state] : added->state()) {
    inner_->state()[piece] = std::move(state);
  }
}

void ShardedOptimizer::add_param_group(
    const torch::optim::OptimizerParamGroup& group) {
  take_group(group);
  adopt_groups();
}

// Adds a group with the options that the real optimizer gives it, which are not
// always those of LibTorch's base class.
void ShardedOptimizer::take_group(
    const torch::optim::OptimizerParamGroup& group) {
  torch::optim::Optimizer::add_param_group(group);
  if (!group.has_options()) return;
  ParamGroups alone;
  alone.emplace_back(std::vector<at::Tensor>(), group.options().clone());
  param_groups_.back().set_options(
      make_(alone)->param_groups().back().options().clone());
}

// Throws if the parts that the ranks step, and the state that they have for
// them, would be those of other elements now.
void ShardedOptimizer::check_layout(size_t parameter) const {
  const at::Tensor& now = parameters_[parameter];
  const auto& [address, sizes, strides] = memory_[parameter];
  bool same = now.sizes() == at::IntArrayRef(sizes);
  for (size_t d = 0; same && cut_ && d < sizes.size(); ++d) {
    // The stride of a dimension of size 1 says nothing.
    same = sizes[d] == 1 || now.strides()[d] == strides[d];
  }
  if (same) return;
  throw std::invalid_argument(c10::str(
      "ZeroRedundancyOptimizer: a parameter has sizes ", now.sizes(),
      " and strides ", now.strides(), ", but had ", at::IntArrayRef(sizes),
      " and ", at::IntArrayRef(strides),
      " when it was divided over the ranks; convert the module before the "
      "optimizer is made"));
}

// Module::to() and similar functions give parameters other memory.
void ShardedOptimizer::follow_memory() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!grouped_[i]) continue;
    const void* now = parameters_[i].const_data_ptr();
    if (now == memory_[i].address) continue;
    check_layout(i);
    if (shared_ && group_->size() > 1) {
      throw std::logic_error(
          "ZeroRedundancyOptimizer: a parameter was moved out of the memory "
          "that all ranks share; convert the module before the optimizer is "
          "made, and write values in place");
    }
    if (pieces_[i]) pieces_[i]->refresh();
    memory_[i].address = now;
    gather_.reset();
  }
  if (!shared_ && !gather_) {
    gather_.emplace(of_grouped(parameters_), of_grouped(ranges_), group_);
  }
}

// Schedulers and users write to the outer groups, so the inner ones take their
// options from there.
void ShardedOptimizer::copy_options() {
  for (size_t g = 0; g < adopted_; ++g) {
    inner_->param_groups()[g].set_options(param_groups_[g].options().clone());
  }
}

// Takes the hyperparameters of an optimizer over the same groups.
void ShardedOptimizer::set_options(const torch::optim::Optimizer& plain) {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    param_groups_[g].set_options(plain.param_groups()[g].options().clone());
  }
  copy_options();
}

// So that autograd notices the change if a graph still holds the parameter, as
// with any optimizer. It must be called before the first write: a snapshot
// whose copy ends while the parameters are written must notice it, too.
void ShardedOptimizer::raise_version(size_t parameter) const {
  parameters_[parameter].unsafeGetTensorImpl()->bump_version();
}

// Throws on every rank alike, also on those that own nothing of the parameter,
// which would otherwise wait for its owner.
void ShardedOptimizer::require_dense_gradients() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (grouped_[i]) require_dense_gradient(parameters_[i]);
  }
}

void ShardedOptimizer::step_pieces() {
  const Span span("zero", "step");
  inner_->step();
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i]) pieces_[i]->drop_gradient();
  }
}

at::Tensor ShardedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  if (Join* join = current_join()) join->begin_iteration(*this, true);
  take_part_in_step();
  return loss;
}

void ShardedOptimizer::take_part_in_step() {
  const UserFunction function("ZeroRedundancyOptimizer::step()");
  const at::NoGradGuard no_grad;
  adopt_groups();
  follow_memory();
  copy_options();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (grouped_[i]) raise_version(i);
  }
  if (!options_.step_in_backward) {
    // Everything that may fail on this rank alone comes before the ranks meet.
    require_dense_gradients();
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (pieces_[i] && grouped_[i]) pieces_[i]->take_gradient();
    }
    if (shared_) shared_->begin_step();
    try {
      step_pieces();
    } catch (...) {
      // The other ranks' forward waits for this rank in any case.
      if (shared_) shared_->end_step();
      throw;
    }
  }
  if (shared_) {
    shared_->end_step();
  } else {
    const Span span("zero", "gather");
    gather_->run();
  }
}

// Called after the wrapper has shadowed backward, which leaves the averages in
// .grad.
void ShardedOptimizer::shadow(const JoinIteration& iteration,
                              const JoinOptions&) {
  if (iteration.synchronizes) take_part_in_step();
}

void ShardedOptimizer::after_join(int) { synchronize(); }

void ShardedOptimizer::step_final(const std::vector<size_t>& parameters) {
  const at::NoGradGuard no_grad;
  for (size_t index : parameters) {
    if (grouped_[index]) require_dense_gradient(parameters_[index]);
  }
  follow_memory();
  copy_options();
  bool any = false;
  for (size_t index : parameters) {
    if (!pieces_[index] || !grouped_[index]) continue;
    pieces_[index]->take_gradient();
    raise_version(index);
    any = true;
  }
  if (any) step_pieces();
}

void ShardedOptimizer::synchronize() {
  if (shared_) shared_->wait();
}

std::vector<at::Tensor> ShardedOptimizer::gradient_shards() {
  if (options_.step_in_backward) {
    throw std::logic_error(
        "ZeroRedundancyOptimizer: with step_in_backward the gradients have "
        "been used when backward() returns, so they cannot be clipped or "
        "unscaled; use step_in_backward = false");
  }
  const Join* join = current_join();
  if (join && !join->options().throw_on_early_termination) {
    throw std::logic_error(
        "ZeroRedundancyOptimizer: its gradients cannot be clipped or unscaled "
        "in a join() that shadows, because a rank without inputs steps its "
        "part but cannot clip it. If inputs are even, give join() "
        "throw_on_early_termination or enable = false; if not, use an "
        "optimizer that is not sharded, with a JoinedOptimizer");
  }
  adopt_groups();
  require_dense_gradients();
  std::vector<at::Tensor> shards;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (!pieces_[i] || !grouped_[i]) continue;
    const at::Tensor& gradient = pieces_[i]->gradient();
    if (gradient.defined()) shards.push_back(gradient);
  }
  return shards;
}

ShardedOptimizer::OptimizerPtr ShardedOptimizer::make_plain() const {
  // Constructors change options that equal their class's, or warn of them.
  ParamGroups groups;
  for (const auto& group : param_groups_) groups.emplace_back(group.params());
  OptimizerPtr plain = make_(groups);
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    plain->param_groups()[g].set_options(param_groups_[g].options().clone());
  }
  return plain;
}

std::vector<NumberedPiece> ShardedOptimizer::numbered_pieces() const {
  std::vector<NumberedPiece> numbered;
  int64_t number = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const size_t index = index_.at(parameter.unsafeGetTensorImpl());
      if (pieces_[index]) numbered.push_back({number, pieces_[index].get()});
      ++number;
    }
  }
  return numbered;
}

std::vector<at::Tensor> ShardedOptimizer::grouped_parameters() const {
  std::vector<at::Tensor> all;
  for (const auto& group : param_groups_) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

// Returns the elements that belong to grouped parameters, in their order.
template <typename T>
std::vector<T> ShardedOptimizer::of_grouped(
    const std::vector<T>& by_parameter) const {
  std::vector<T> chosen;
  for (size_t i = 0; i < by_parameter.size(); ++i) {
    if (grouped_[i]) chosen.push_back(by_parameter[i]);
  }
  return chosen;
}

void ShardedOptimizer::consolidate_state_dict(int to) {
  if (to < 0 || to >= group_->size()) {
    throw std::invalid_argument(c10::str(
        "consolidate_state_dict: there is no rank ", to,
        " in the optimizer's group; allowed is 0 to ", group_->size() - 1));
  }
  const at::NoGradGuard no_grad;
  adopt_groups();
  synchronize();
  state_dict_.reset();
  const OptimizerPtr plain = make_plain();
  OptimizerState whole =
      names_ ? named_state_dict(*plain, *names_) : lockstep::state_dict(*plain);
  whole.state.clear();
  gather_state(whole, lockstep::state_dict(*inner_), numbered_pieces(),
               grouped_parameters(), to, group_);
  if (group_->rank() == to) state_dict_ = std::move(whole);
}

const OptimizerState& ShardedOptimizer::state_dict() const {
  if (!state_dict_) {
    throw std::logic_error(
        "ZeroRedundancyOptimizer: the optimizer's state is not on this rank; "
        "call consolidate_state_dict(rank) on all ranks, then state_dict() on "
        "that rank");
  }
  return *state_dict_;
}

void ShardedOptimizer::load_state_dict(const OptimizerState& state) {
  take_state(state, names_ && has_names(state) ? names_.get() : nullptr);
}

void ShardedOptimizer::load_state_dict(const OptimizerState& state,
                                       const torch::nn::Module& module) {
  require_names(state);
  const ParameterNames names(module);
  take_state(state, &names);
}

void ShardedOptimizer::load_plain(const torch::optim::Optimizer& plain) {
  const std::vector<at::Tensor> own = grouped_parameters();
  size_t number = 0;
  for (const auto& group : plain.param_groups()) {
    for (const at::Tensor& parameter : distinct(group.params())) {
      const size_t place = number++;
      if (place < own.size() && own[place].is_same(parameter)) continue;
      if (!index_.contains(parameter.unsafeGetTensorImpl())) continue;
      throw std::invalid_argument(
          "ZeroRedundancyOptimizer: the optimizer whose state is loaded has "
          "the same parameters in another order; make it with plain(), or load "
          "by names: load_state_dict(state_dict(optimizer, module), module)");
    }
  }
  take_state(lockstep::state_dict(plain), nullptr);
}

// `names`: null takes the parameters in their order.
void ShardedOptimizer::take_state(const OptimizerState& state,
                                  const ParameterNames* names) {
  const at::NoGradGuard no_grad;
  adopt_groups();
  state_dict_.reset();
  const OptimizerPtr plain = make_plain();
  lockstep::load_state_dict(*plain,
                            names ? in_order_of(*plain, state, *names) : state);
  set_options(*plain);
  OptimizerState part =
      slice_state(lockstep::state_dict(*plain), numbered_pieces());
  part.param_groups = lockstep::state_dict(*inner_).param_groups;
  lockstep::load_state_dict(*inner_, part);
}

OptimizerShards::State ShardedOptimizer::shards() {
  const at::NoGradGuard no_grad;
  adopt_groups();
  synchronize();
  State state;
  state.parameters = grouped_parameters();
  state.groups = lockstep::state_dict(*make_plain());
  state.groups.state.clear();
  for (const auto& [number, piece] : numbered_pieces()) {
    state.parts.push_back({.parameter = number,
                           .whole = piece->shaped(),
                           .range = piece->range()});
  }
  copy_options();
  state.local.state = std::move(lockstep::state_dict(*inner_).state);
  return state;
}

// Holds the checked state of the pieces and, in an optimizer over the whole
// parameters, the hyperparameters.
class ShardedOptimizer::PreparedShards : public PreparedOptimizer {
 public:
  PreparedShards(ShardedOptimizer& optimizer, const OptimizerState& groups,
                 const OptimizerState& local)
      : optimizer_(optimizer),
        plain_(optimizer.make_plain()),
        load_(*optimizer.inner_, local, /*adopt=*/true) {
    lockstep::load_state_dict(*plain_, groups);
  }

  void apply() override {
    const at::NoGradGuard no_grad;
    optimizer_.state_dict_.reset();
    load_.apply();
    optimizer_.set_options(*plain_);
  }

 private:
  ShardedOptimizer& optimizer_;
  OptimizerPtr plain_;
  OptimizerLoad load_;
};

std::unique_ptr<PreparedOptimizer> ShardedOptimizer::prepare_load(
    const OptimizerState& groups, const OptimizerState& local) {
  const at::NoGradGuard no_grad;
  // The pieces have numbers of their own.
  OptimizerState part = lockstep::state_dict(*inner_);
  part.state = local.state;
  for (size_t g = 0; g < part.param_groups.size(); ++g) {
    part.param_groups[g].options = groups.param_groups.at(g).options;
  }
  return std::make_unique<PreparedShards>(*this, groups, part);
}

void ShardedOptimizer::save(torch::serialize::OutputArchive&) const {
  throw std::logic_error(
      "ZeroRedundancyOptimizer: each rank holds a part of the state, which "
      "torch::save() cannot collect; give the optimizer to save_snapshot() "
      "with "
      "a folder, or call consolidate_state_dict() on all ranks and save "
      "state_dict() or plain()");
}

void ShardedOptimizer::load(torch::serialize::InputArchive&) {
  throw std::logic_error(
      "ZeroRedundancyOptimizer: torch::load() gives each rank the whole state; "
      "load it into plain(), then give that to load_state_dict()");
}

}  // namespace lockstep::internal
