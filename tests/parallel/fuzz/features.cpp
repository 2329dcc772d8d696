#include "tests/parallel/fuzz/features.h"

#include <map>
#include <type_traits>

namespace lockstep::internal::fuzz {
namespace {

using Features = std::set<std::string>;

void add_options(const Options& options, Features& features) {
  const Options plain;
  for_each_ddp_option([&](const std::string& name, auto of) {
    if (of(options) == of(plain)) return;
    bool is_off = false;
    if constexpr (std::is_same_v<decltype(of(options)), const bool&>) {
      is_off = !of(options);
    }
    features.insert((is_off ? "option: no " : "option: ") + name);
  });
  if (options.has_comm_hook) features.insert("option: comm hook");
  if (options.optimizer == Optimizer::adamw) {
    features.insert("optimizer: AdamW");
  }
  static const std::map<Stepping, const char*> kWaysToStep{
      {Stepping::in_backward, "optimizer: in backward"},
      {Stepping::zero_private, "optimizer: sharded"},
      {Stepping::zero_shared, "optimizer: sharded, shared parameters"},
      {Stepping::zero_in_backward, "optimizer: sharded, in backward"},
      {Stepping::zero_of_list, "optimizer: sharded, of a list"}};
  const auto found = kWaysToStep.find(options.stepping);
  if (found != kWaysToStep.end()) features.insert(found->second);
}

void add_module(const Case& fuzz_case, Features& features) {
  std::vector<int> uses(fuzz_case.parameters.size());
  size_t checkpointed = 0;
  for (const auto& op : fuzz_case.ops) {
    features.insert(std::string("op: ") + name_of(op.kind));
    for (size_t i : op.parameters) ++uses[i];
    if (op.is_checkpointed) ++checkpointed;
    if (op.is_output) features.insert("module: several outputs");
    if (op.use != Use::always) features.insert("module: unused operations");
    if (op.loss_use != Use::always) features.insert("module: unused outputs");
  }
  if (checkpointed == fuzz_case.ops.size()) {
    features.insert("module: checkpointed whole");
  } else if (checkpointed > 0) {
    features.insert("module: checkpointed in part");
  }
  if (fuzz_case.wrappers == 2) features.insert("module: two wrappers");
  if (fuzz_case.wrappers == 3) features.insert("module: three wrappers");
  if (fuzz_case.modifies_result) features.insert("module: modified result");
  for (size_t i = 0; i < uses.size(); ++i) {
    const auto& parameter = fuzz_case.parameters[i];
    if (uses[i] == 0) features.insert("module: parameter of no operation");
    if (uses[i] > 1) features.insert("module: tied parameters");
    if (parameter.is_registered_twice) {
      features.insert("module: registered twice");
    }
    if (parameter.is_ignored) features.insert("module: ignored parameters");
    if (parameter.has_hook) features.insert("module: hooks on parameters");
    if (parameter.is_frozen) features.insert("module: frozen parameters");
    if (parameter.is_sparse) features.insert("module: sparse embedding");
    if (parameter.layout == Layout::transposed) {
      features.insert("module: transposed parameters");
    }
    if (parameter.layout == Layout::gapped) {
      features.insert("module: parameters with gaps");
    }
  }
  if (fuzz_case.width >= 91) features.insert("module: 64 KiB parameters");
}

void add_forward(const Event& event, Features& features) {
  if (event.has_no_grad) {
    features.insert(event.is_on_rank_zero_only ? "event: evaluation on rank 0"
                                               : "event: evaluation");
  }
  if (event.has_penalty) features.insert("event: gradient penalty");
  if (event.keeps_penalty_apart) features.insert("event: penalty by itself");
  if (event.throws_on_rank_zero_only) {
    features.insert("event: exception on rank 0 only");
  }
  if (event.use_step != event.step) {
    features.insert("event: another use of parameters");
  }
  if (event.is_on_rank_zero_only && !event.has_no_grad && !event.is_plain) {
    features.insert("event: forward on rank 0");
  }
  if (event.exception == Deliberate::in_forward) {
    features.insert("event: exception in forward");
  }
  if (event.exception == Deliberate::in_backward) {
    features.insert("event: exception in backward");
  }
  if (event.is_plain) {
    features.insert(event.is_on_rank_zero_only ? "event: plain module on rank 0"
                                               : "event: plain module");
  } else if (!event.synchronises) {
    features.insert("event: no_sync");
  }
}

}  // namespace

std::set<std::string> features_of(const Case& fuzz_case) {
  Features features;
  add_options(fuzz_case.options, features);
  add_module(fuzz_case, features);

  std::map<int, const Event*> open;  // forwards by slot
  std::set<int> zeroed;
  std::set<int> steps;
  for (const auto& event : fuzz_case.events) {
    steps.insert(event.step);
    switch (event.kind) {
      case EventKind::forward:
        add_forward(event, features);
        for (const auto& [slot, other] : open) {
          if (slot == event.slot || other->wrapper != event.wrapper ||
              other->is_plain || event.is_plain || event.has_no_grad) {
            continue;
          }
          features.insert("event: several forwards");
          if (other->synchronises != event.synchronises) {
            features.insert("event: no_sync between forward and backward");
          }
        }
        if (open.contains(event.slot)) {
          features.insert("event: forward without backward");
        }
        if (!event.has_no_grad && event.exception != Deliberate::in_forward) {
          open[event.slot] = &event;
        }
        break;
      case EventKind::backward: {
        if (event.slots.size() > 1) features.insert("event: sum of losses");
        if (event.retains_graph) {
          features.insert("event: backward twice");
          break;
        }
        // The order differs from that of the forwards; a plain forward is in
        // slot 8.
        if (!event.slots.empty() && event.slots[0] == 1 && open.contains(0)) {
          features.insert("event: out of order");
        }
        for (int slot : event.slots) open.erase(slot);
        break;
      }
      case EventKind::gradient:
        features.insert(event.is_on_rank_zero_only
                            ? "event: autograd::grad on rank 0"
                            : "event: autograd::grad");
        break;
      case EventKind::zero_grad:
        zeroed.insert(event.step);
        if (!event.sets_to_none) features.insert("event: zero_grad(false)");
        break;
      case EventKind::restore_gradients:
        features.insert("event: gradients put back");
        break;
      case EventKind::hold_gradients:
        features.insert("event: gradients held");
        break;
      case EventKind::change_gradients:
        features.insert(event.change == Change::rebound
                            ? "event: gradients rebound"
                            : "event: gradients resized");
        break;
      case EventKind::round_trip:
        features.insert("event: dtype round trip");
        break;
      case EventKind::set_frozen:
        features.insert("event: freezing");
        break;
      case EventKind::wrap_again:
        features.insert("event: wrapped again");
        break;
      default:
        break;
    }
  }
  if (!open.empty()) features.insert("event: forward without backward");
  if (zeroed.size() < steps.size()) features.insert("event: no zero_grad");
  return features;
}

}  // namespace lockstep::internal::fuzz
