#include "tests/parallel/fuzz/draw_case.h"

#include <algorithm>
#include <optional>

#include "tests/parallel/fuzz/draw_events.h"
#include "tests/parallel/fuzz/operations.h"
#include "tests/parallel/fuzz/traits.h"

namespace lockstep::internal::fuzz {
namespace {

class CaseDraw {
 public:
  CaseDraw(uint64_t seed, int world_size) : dice_(seed) {
    case_.seed = seed;
    case_.world_size = world_size;
  }

  Case draw() {
    traits_ = draw_traits(dice_);
    case_.rows = static_cast<int64_t>(1 + dice_.below(3));
    case_.width = has(Trait::big) ? static_cast<int64_t>(91 + dice_.below(6))
                                  : static_cast<int64_t>(1 + dice_.below(4));
    draw_ops();
    draw_parameters();
    draw_conditions();
    draw_options();
    draw_events(case_, traits_, dice_);
    return case_;
  }

 private:
  bool has(Trait trait) const { return traits_.contains(trait); }

  // Returns a real parameter with these sizes: a new one, or for tied
  // parameters an existing one.
  size_t parameter_for(const std::vector<int64_t>& sizes) {
    if (has(Trait::tied) && dice_.percent(60)) {
      std::vector<size_t> alike;
      for (size_t i = 0; i < case_.parameters.size(); ++i) {
        const auto& parameter = case_.parameters[i];
        if (parameter.sizes == sizes && !parameter.is_complex) {
          alike.push_back(i);
        }
      }
      if (!alike.empty()) return dice_.one_of(alike);
    }
    case_.parameters.push_back({.sizes = sizes});
    return case_.parameters.size() - 1;
  }

  Op& add_op(OpKind kind, Part part) {
    Op op{.kind = kind, .part = part};
    for (const auto& sizes : sizes_for(kind, case_.width)) {
      op.parameters.push_back(parameter_for(sizes));
    }
    return case_.ops.emplace_back(std::move(op));
  }

  OpKind draw_kind() {
    static const std::vector<OpKind> kKinds{
        OpKind::linear,          OpKind::linear,     OpKind::linear,
        OpKind::linear_in_place, OpKind::product,    OpKind::masked,
        OpKind::outer,           OpKind::batched,    OpKind::where,
        OpKind::addmm,           OpKind::lora,       OpKind::merged_lora,
        OpKind::custom,          OpKind::transposed, OpKind::reshaped,
        OpKind::chunked,         OpKind::scale,      OpKind::bias,
        OpKind::embedding,       OpKind::scalar,     OpKind::empty};
    return dice_.one_of(kKinds);
  }

  void draw_ops() {
    const size_t count = (has(Trait::tied) ? 2 : 1) + dice_.below(3);
    for (size_t i = 0; i < count; ++i) {
      auto& op = add_op(draw_kind(), Part::trunk);
      static const std::vector<Activation> kActivations{
          Activation::tanh, Activation::tanh, Activation::none,
          Activation::relu};
      op.activation = dice_.one_of(kActivations);
    }
    if (has(Trait::two_wrappers)) {
      add_op(draw_kind(), Part::first_head);
      add_op(draw_kind(), Part::second_head);
      if (dice_.percent(40)) add_op(draw_kind(), Part::third_head);
    }
    if (has(Trait::sparse)) {
      auto& op = add_op(OpKind::embedding, Part::trunk);
      case_.parameters[op.parameters[0]].is_sparse = true;
      if (has(Trait::two_wrappers)) op.part = Part::first_head;
    }
    if (has(Trait::complex)) {
      case_.parameters.push_back({.sizes = {case_.width}, .is_complex = true});
      case_.ops.push_back({.kind = OpKind::rotated,
                           .parameters = {case_.parameters.size() - 1}});
    }
    if (has(Trait::buffers)) add_op(OpKind::running_mean, Part::trunk);
    if (has(Trait::auxiliary_loss)) {
      auto& op = add_op(OpKind::auxiliary_loss, Part::trunk);
      if (has(Trait::two_wrappers)) op.part = Part::first_head;
    }
    if (has(Trait::several_outputs)) draw_outputs();
    const bool has_third = std::ranges::any_of(
        case_.ops, [](const Op& op) { return op.part == Part::third_head; });
    case_.wrappers = has_third ? 3 : has(Trait::two_wrappers) ? 2 : 1;
    case_.modifies_result = has(Trait::modified_result);
    if (has(Trait::checkpointed_whole)) {
      for (auto& op : case_.ops) op.is_checkpointed = true;
    }
    if (has(Trait::checkpointed_part)) draw_checkpoint();
  }

  void draw_outputs() {
    for (auto& op : case_.ops) {
      if (op.kind != OpKind::auxiliary_loss && dice_.percent(40)) {
        op.is_output = true;
      }
    }
    auto& branch = dice_.percent(45)
                       ? add_op(OpKind::returned_parameter, Part::trunk)
                       : add_op(draw_kind(), Part::trunk);
    branch.is_output = branch.is_branch = true;
  }

  // Checkpoints some of the operations whose results the loss does not use; at
  // least one operation stays plain.
  void draw_checkpoint() {
    if (case_.ops.size() == 1) add_op(draw_kind(), Part::trunk);
    std::vector<size_t> possible;
    for (size_t i = 0; i < case_.ops.size(); ++i) {
      const auto& op = case_.ops[i];
      if (!op.is_output && op.part == Part::trunk) possible.push_back(i);
    }
    if (possible.empty()) return;
    if (possible.size() == case_.ops.size()) {
      possible.erase(possible.begin() +
                     static_cast<int64_t>(dice_.below(possible.size())));
    }
    for (size_t i : possible) case_.ops[i].is_checkpointed = dice_.percent(60);
    case_.ops[dice_.one_of(possible)].is_checkpointed = true;
  }

  void draw_parameters() {
    for (auto& parameter : case_.parameters) {
      if (parameter.is_sparse) continue;
      const bool is_matrix = parameter.sizes.size() > 1;
      if (has(Trait::transposed) && is_matrix && dice_.percent(60)) {
        parameter.layout = Layout::transposed;
      }
      if (has(Trait::gapped) && !parameter.sizes.empty() && dice_.percent(60)) {
        parameter.layout = Layout::gapped;
      }
      if (has(Trait::registered_twice) && dice_.percent(60)) {
        parameter.is_registered_twice = true;
      }
      parameter.has_hook = has(Trait::hooks) && dice_.percent(60);
    }
    for (const auto& op : case_.ops) {
      if (op.kind == OpKind::merged_lora) {
        case_.parameters[op.parameters[0]].is_frozen = true;
      }
    }
    if (has(Trait::frozen)) {
      case_.parameters[dice_.below(case_.parameters.size())].is_frozen = true;
    }
    keep_wrappers_trained();
    draw_special_parameters();
    for (auto& parameter : case_.parameters) {
      if (parameter.is_sparse) parameter.is_frozen = false;
    }
  }

  // Skips the parameters of the first operation, which is trained as usual.
  void draw_special_parameters() {
    const auto& first = case_.ops[0].parameters;
    for (size_t i = 0; i < case_.parameters.size(); ++i) {
      auto& parameter = case_.parameters[i];
      if (std::ranges::find(first, i) != first.end() || parameter.is_sparse) {
        continue;
      }
      parameter.is_ignored = has(Trait::ignored) && dice_.percent(50);
    }
  }

  // A wrapper needs a parameter to train, and each backward a gradient: the
  // first operation of the trunk has one.
  void keep_wrappers_trained() {
    const auto& first = case_.ops[0].parameters;
    const bool is_trained = std::ranges::any_of(
        first, [&](size_t i) { return !case_.parameters[i].is_frozen; });
    if (!is_trained) case_.parameters[first.back()].is_frozen = false;
  }

  // Draws what some ranks or some steps leave out.
  void draw_conditions() {
    std::vector<Use> uses;
    if (has(Trait::static_graph)) {
      uses = {Use::never, Use::rank_zero, Use::always};
    } else if (has(Trait::skip_unused)) {
      uses = {Use::never, Use::always};
    } else if (has(Trait::find_unused)) {
      uses = {Use::never, Use::even_steps, Use::rank_zero,
              Use::one_rank_in_turn, Use::always};
    } else {
      return;
    }
    // static_graph may also be used for nested passes alone.
    if (has(Trait::static_graph) && dice_.percent(50)) return;
    if (dice_.percent(40)) {
      case_.parameters.push_back({.sizes = {case_.width, case_.width}});
    }
    for (size_t i = 1; i < case_.ops.size(); ++i) {
      auto& op = case_.ops[i];
      if (op.kind == OpKind::running_mean) continue;
      if (dice_.percent(40)) op.use = dice_.one_of(uses);
      if (op.is_output && dice_.percent(80)) op.loss_use = dice_.one_of(uses);
    }
  }

  void draw_options() {
    auto& options = case_.options;
    // In MiB; the smallest is less than one element.
    static const std::vector<double> kSizes{1e-6, 1e-4, 1e-3, 0.05, 0.2, 25};
    if (has(Trait::bucket_cap)) {
      if (dice_.percent(70)) options.bucket_cap_mb = dice_.one_of(kSizes);
      if (!options.bucket_cap_mb || dice_.percent(40)) {
        options.first_bucket_mb = dice_.one_of(kSizes);
      }
    }
#define LOCKSTEP_FUZZ_DRAW(option, plain, trait) \
  options.option = has(Trait::trait) != plain;
    LOCKSTEP_FUZZ_FLAGS(LOCKSTEP_FUZZ_DRAW)
#undef LOCKSTEP_FUZZ_DRAW
    options.broadcast_buffers = !has(Trait::buffers) || dice_.percent(45);
    options.has_comm_hook = has(Trait::comm_hook);
    if (has(Trait::check_replicas)) {
      options.check_replicas_every = static_cast<int64_t>(1 + dice_.below(2));
    }
    if (has(Trait::zero_of_list)) options.stepping = Stepping::zero_of_list;
    if (has(Trait::adamw)) options.optimizer = Optimizer::adamw;
    if (has(Trait::in_backward)) options.stepping = Stepping::in_backward;
    if (has(Trait::zero_private)) options.stepping = Stepping::zero_private;
    if (has(Trait::zero_shared)) options.stepping = Stepping::zero_shared;
    if (has(Trait::zero_in_backward)) {
      options.stepping = Stepping::zero_in_backward;
    }
    static const std::vector<Outputs> kMany{Outputs::vector, Outputs::tuple,
                                            Outputs::map, Outputs::record};
    const bool has_many = std::ranges::any_of(
        case_.ops, [](const Op& op) { return op.is_output; });
    if (has_many || dice_.percent(10)) case_.outputs = dice_.one_of(kMany);
  }

  Dice dice_;
  std::set<Trait> traits_;
  Case case_;
};

}  // namespace

Case draw_case(uint64_t seed, int world_size) {
  return CaseDraw(seed, world_size).draw();
}

}  // namespace lockstep::internal::fuzz
