#include <algorithm>
#include <utility>

#include "tests/parallel/fuzz/programs/program.h"

namespace lockstep::internal::fuzz {
namespace {

// Returns whether the program could have been drawn; checks only what an edit
// may break.
bool is_sound(const Program& program) {
  // A sharded optimizer has the gradients of one averaging backward.
  bool has_gradients = false;
  for (const auto& action : program.actions) {
    if (action.kind == ActionKind::zero_grad) has_gradients = false;
    if (action.kind != ActionKind::train || !action.synchronises) continue;
    if (has_gradients && is_zero(program.wrapping)) return false;
    has_gradients = true;
  }
  if (program.wrapping == Wrapping::pipeline &&
      program.layers.size() < stage_count(program)) {
    return false;
  }
  // An operation in place needs a layer before it whose result is not saved.
  for (size_t i = 1; i < program.layers.size(); ++i) {
    const auto before = program.layers[i - 1].kind;
    if (program.layers[i].kind == LayerKind::in_place &&
        (before == LayerKind::linear || before == LayerKind::in_place ||
         before == LayerKind::penalty || program.layers[i - 1].is_skipped)) {
      return false;
    }
  }
  const auto& first = program.layers.front();
  if (first.is_frozen || first.is_skipped) return false;
  const auto last = program.layers.back().kind;
  const bool may_be_changed =
      last != LayerKind::linear && last != LayerKind::in_place &&
      last != LayerKind::penalty && !program.layers.back().is_skipped;
  return std::ranges::all_of(program.actions, [&](const Action& action) {
    return (may_be_changed || !action.modifies_result) &&
           action.layer < program.layers.size();
  });
}

}  // namespace

std::vector<Program> smaller_programs(const Program& program) {
  std::vector<Program> all;
  const auto edit = [&](const auto& change) {
    Program smaller = program;
    change(smaller);
    if (!smaller.layers.empty() && is_sound(smaller)) {
      all.push_back(std::move(smaller));
    }
  };
  // Sets a field to its simple value, if it has another.
  const auto simplify = [&](const auto& field, auto simple) {
    if (field(program) == simple) return;
    edit([&](Program& smaller) {
      const_cast<decltype(simple)&>(field(smaller)) = simple;
    });
  };
  for (size_t i = program.actions.size(); i-- > 0;) {
    edit([&](Program& smaller) {
      smaller.actions.erase(smaller.actions.begin() +
                            static_cast<std::ptrdiff_t>(i));
    });
  }
  for (size_t i = program.layers.size(); i-- > 0;) {
    edit([&](Program& smaller) {
      smaller.layers.erase(smaller.layers.begin() +
                           static_cast<std::ptrdiff_t>(i));
      std::erase_if(smaller.actions, [&](const Action& action) {
        return action.kind == ActionKind::set_frozen && action.layer == i;
      });
      for (auto& action : smaller.actions) {
        if (action.layer > i) --action.layer;
      }
    });
  }
#define LOCKSTEP_FUZZ_SIMPLIFY(of, simple) \
  simplify([&](const Program& p) -> const auto& { return of; }, simple)
  LOCKSTEP_FUZZ_SIMPLIFY(p.precision, Precision::float64);
  LOCKSTEP_FUZZ_SIMPLIFY(p.argument, Argument::none);
  LOCKSTEP_FUZZ_SIMPLIFY(p.returns_view, false);
  LOCKSTEP_FUZZ_SIMPLIFY(p.stepper, Stepper::sgd);
  LOCKSTEP_FUZZ_SIMPLIFY(p.gradient_as_bucket_view, true);
  LOCKSTEP_FUZZ_SIMPLIFY(p.reshards, true);
  LOCKSTEP_FUZZ_SIMPLIFY(p.stages, Stages::plain);
  for (size_t i = 0; i < program.layers.size(); ++i) {
    LOCKSTEP_FUZZ_SIMPLIFY(p.layers[i].kind, LayerKind::linear);
    LOCKSTEP_FUZZ_SIMPLIFY(p.layers[i].is_unit, false);
    LOCKSTEP_FUZZ_SIMPLIFY(p.layers[i].is_skipped, false);
    LOCKSTEP_FUZZ_SIMPLIFY(p.layers[i].is_frozen, false);
    LOCKSTEP_FUZZ_SIMPLIFY(p.layers[i].has_hook, false);
    LOCKSTEP_FUZZ_SIMPLIFY(p.layers[i].hooks_result, false);
    LOCKSTEP_FUZZ_SIMPLIFY(p.layers[i].group, 0);
  }
  for (size_t i = 0; i < program.actions.size(); ++i) {
    LOCKSTEP_FUZZ_SIMPLIFY(p.actions[i].idiom, Idiom::call);
    LOCKSTEP_FUZZ_SIMPLIFY(p.actions[i].has_two_forwards, false);
    LOCKSTEP_FUZZ_SIMPLIFY(p.actions[i].modifies_result, false);
    LOCKSTEP_FUZZ_SIMPLIFY(p.actions[i].sets_to_none, true);
    LOCKSTEP_FUZZ_SIMPLIFY(p.actions[i].quiet, Quiet::no_grad);
    LOCKSTEP_FUZZ_SIMPLIFY(p.actions[i].resizes, false);
  }
#undef LOCKSTEP_FUZZ_SIMPLIFY
  // Without the option, all parameters must be used.
  if (program.finds_unused &&
      std::ranges::none_of(program.layers, &Layer::is_skipped)) {
    edit([](Program& smaller) { smaller.finds_unused = false; });
  }
  return all;
}

}  // namespace lockstep::internal::fuzz
