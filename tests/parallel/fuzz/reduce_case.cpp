#include "tests/parallel/fuzz/reduce_case.h"

#include <algorithm>
#include <utility>

namespace lockstep::internal::fuzz {
namespace {

// Removes parameters that no operation uses, unless the options allow them.
void drop_unused_parameters(Case& fuzz_case) {
  std::vector<bool> is_used(fuzz_case.parameters.size());
  for (const auto& op : fuzz_case.ops) {
    for (size_t i : op.parameters) is_used[i] = true;
  }
  std::vector<size_t> place(is_used.size());
  std::vector<Parameter> left;
  for (size_t i = 0; i < is_used.size(); ++i) {
    place[i] = left.size();
    if (is_used[i]) left.push_back(fuzz_case.parameters[i]);
  }
  for (auto& op : fuzz_case.ops) {
    for (auto& i : op.parameters) i = place[i];
  }
  std::erase_if(fuzz_case.events, [&](const Event& event) {
    return event.kind == EventKind::set_frozen && !is_used[event.parameter];
  });
  for (auto& event : fuzz_case.events) {
    if (event.kind == EventKind::set_frozen) {
      event.parameter = place[event.parameter];
    }
  }
  fuzz_case.parameters = std::move(left);
}

// Returns whether the case could have been drawn; checks only what an edit may
// break.
bool is_sound(const Case& fuzz_case) {
  const auto& options = fuzz_case.options;
  if (fuzz_case.ops.empty() || fuzz_case.parameters.empty()) return false;
  const auto& first = fuzz_case.ops[0];
  if (first.part != Part::trunk || first.use != Use::always ||
      first.is_branch || fuzz_case.throwing_op >= fuzz_case.ops.size() ||
      fuzz_case.ops[fuzz_case.throwing_op].part != Part::trunk) {
    return false;
  }
  if (std::ranges::all_of(first.parameters, [&](size_t i) {
        return fuzz_case.parameters[i].is_frozen;
      })) {
    return false;
  }
  const bool allows_unused =
      options.find_unused_parameters || options.static_graph;
  if (!allows_unused && has_conditions(fuzz_case)) return false;
  if (options.skip_all_reduce_unused_params && !allows_unused) return false;
  for (int wrapper = 0; wrapper < fuzz_case.wrappers; ++wrapper) {
    if (ops_of(fuzz_case, wrapper).size() == fuzz_case.ops.size() &&
        fuzz_case.wrappers > 1) {
      return false;
    }
  }
  // After a backward that threw, the gradients must be zeroed before another.
  bool has_thrown = false;
  for (const auto& event : fuzz_case.events) {
    if (event.exception == Deliberate::in_backward) has_thrown = true;
    if (event.kind == EventKind::zero_grad && event.sets_to_none) {
      has_thrown = false;
    }
    if (has_thrown && (event.kind == EventKind::step ||
                       (event.kind == EventKind::forward &&
                        event.exception == Deliberate::none))) {
      return false;
    }
  }
  return true;
}

class Smaller {
 public:
  explicit Smaller(const Case& fuzz_case) : case_(fuzz_case) {}

  std::vector<Case> all() {
    drop_events();
    drop_parts();
    simplify_options();
    simplify_module();
    simplify_events();
    return std::move(cases_);
  }

 private:
  template <class Edit>
  void edit(Edit&& change) {
    Case smaller = case_;
    change(smaller);
    if (is_sound(smaller)) cases_.push_back(std::move(smaller));
  }
  // Sets a field to its simple value, if it has another.
  template <class Value, class Field>
  void simplify(Field&& field, const Value& simple) {
    if (field(case_) == simple) return;
    edit([&](Case& smaller) { field(smaller) = simple; });
  }

  void drop_events() {
    const bool may_drop_zero_grad = case_.options.stepping == Stepping::plain;
    int last = 0;
    for (const auto& event : case_.events) last = std::max(last, event.step);
    for (int step = last; step >= 0; --step) {
      edit([&](Case& smaller) {
        std::erase_if(smaller.events,
                      [&](const Event& event) { return event.step == step; });
      });
    }
    for (int step = last; step >= 0; --step) {
      for (int slot = 0; slot < 10; ++slot) drop_slot(step, slot);
    }
    for (size_t i = 0; i < case_.events.size(); ++i) {
      const auto kind = case_.events[i].kind;
      if (kind == EventKind::forward || kind == EventKind::restore_gradients ||
          (kind == EventKind::zero_grad && !may_drop_zero_grad)) {
        continue;
      }
      edit([&](Case& smaller) {
        smaller.events.erase(smaller.events.begin() +
                             static_cast<std::ptrdiff_t>(i));
      });
    }
  }

  // Removes a forward and everything that uses its loss.
  void drop_slot(int step, int slot) {
    const bool is_there =
        std::ranges::any_of(case_.events, [&](const Event& event) {
          return event.kind == EventKind::forward && event.step == step &&
                 event.slot == slot;
        });
    if (!is_there) return;
    edit([&](Case& smaller) {
      for (auto& event : smaller.events) {
        if (event.step == step) std::erase(event.slots, slot);
      }
      std::erase_if(smaller.events, [&](const Event& event) {
        if (event.step != step) return false;
        const bool has_losses = event.kind == EventKind::backward ||
                                event.kind == EventKind::gradient;
        return (event.kind == EventKind::forward && event.slot == slot) ||
               (has_losses && event.slots.empty());
      });
    });
  }

  void drop_parts() {
    for (size_t i = 0; i < case_.ops.size(); ++i) {
      edit([&](Case& smaller) {
        smaller.ops.erase(smaller.ops.begin() + static_cast<std::ptrdiff_t>(i));
        if (smaller.throwing_op > i) --smaller.throwing_op;
        smaller.throwing_op =
            std::min(smaller.throwing_op,
                     smaller.ops.empty() ? 0 : smaller.ops.size() - 1);
        drop_unused_parameters(smaller);
      });
      // Replaces the operation by a plainer one.
      if (case_.ops[i].kind != OpKind::bias &&
          case_.ops[i].kind != OpKind::running_mean) {
        edit([&](Case& smaller) {
          auto& op = smaller.ops[i];
          op.kind = OpKind::bias;
          op.is_output = op.is_branch = false;
          op.parameters = {smaller.parameters.size()};
          smaller.parameters.push_back({.sizes = {smaller.width}});
          drop_unused_parameters(smaller);
        });
      }
    }
    std::vector<bool> is_used(case_.parameters.size());
    for (const auto& op : case_.ops) {
      for (size_t i : op.parameters) is_used[i] = true;
    }
    if (std::ranges::find(is_used, false) != is_used.end()) {
      edit([](Case& smaller) { drop_unused_parameters(smaller); });
    }
    if (case_.wrappers > 1) {
      edit([](Case& smaller) {
        const int last = --smaller.wrappers;
        const auto head = last == 1 ? Part::second_head : Part::third_head;
        std::erase_if(smaller.ops,
                      [&](const Op& op) { return op.part == head; });
        std::erase_if(smaller.events, [&](const Event& event) {
          return event.wrapper == last;
        });
        drop_unused_parameters(smaller);
      });
    }
  }

  void simplify_options() {
    const Options plain;
    for_each_ddp_option([&](const char*, auto of) {
      simplify([of](auto& one) -> auto& { return of(one.options); }, of(plain));
    });
    auto of = [](auto member) {
      return [member](auto& one) -> auto& { return one.options.*member; };
    };
    simplify(of(&Options::has_comm_hook), false);
    simplify(of(&Options::optimizer), Optimizer::sgd);
    simplify(of(&Options::stepping), Stepping::plain);
    const bool has_many = std::ranges::any_of(
        case_.ops, [](const Op& op) { return op.is_output; });
    if (!has_many) {
      simplify([](auto& one) -> auto& { return one.outputs; }, Outputs::tensor);
    }
  }

  void simplify_module() {
    simplify([](auto& one) -> auto& { return one.rows; }, int64_t{1});
    simplify([](auto& one) -> auto& { return one.modifies_result; }, false);
    for (size_t i = 0; i < case_.parameters.size(); ++i) {
      auto of = [i](auto member) {
        return [i, member](auto& one) -> auto& {
          return one.parameters[i].*member;
        };
      };
      simplify(of(&Parameter::layout), Layout::contiguous);
      simplify(of(&Parameter::is_registered_twice), false);
      simplify(of(&Parameter::is_sparse), false);
      simplify(of(&Parameter::has_hook), false);
      simplify(of(&Parameter::is_ignored), false);
      simplify(of(&Parameter::is_frozen), false);
    }
    for (size_t i = 0; i < case_.ops.size(); ++i) {
      auto of = [i](auto member) {
        return [i, member](auto& one) -> auto& { return one.ops[i].*member; };
      };
      simplify(of(&Op::activation), Activation::none);
      simplify(of(&Op::use), Use::always);
      simplify(of(&Op::loss_use), Use::always);
      simplify(of(&Op::is_checkpointed), false);
    }
  }

  void simplify_events() {
    for (size_t i = 0; i < case_.events.size(); ++i) {
      auto of = [i](auto member) {
        return
            [i, member](auto& one) -> auto& { return one.events[i].*member; };
      };
      simplify(of(&Event::has_penalty), false);
      simplify(of(&Event::sets_to_none), true);
      simplify(of(&Event::synchronises), true);
      simplify(of(&Event::throws_on_rank_zero_only), false);
      simplify(of(&Event::use_step), case_.events[i].step);
    }
  }

  const Case& case_;
  std::vector<Case> cases_;
};

}  // namespace

std::vector<Case> smaller_cases(const Case& fuzz_case) {
  return Smaller(fuzz_case).all();
}

}  // namespace lockstep::internal::fuzz
