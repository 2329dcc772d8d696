#include "tests/parallel/fuzz/dice.h"
#include "tests/parallel/fuzz/programs/program.h"

namespace lockstep::internal::fuzz {
namespace {

class Drawing {
 public:
  Drawing(uint64_t seed, int world_size) : dice_(seed * 2 + 1) {
    program_.seed = seed;
    program_.world_size = world_size;
  }

  Program draw() {
    options();
    layers();
    const size_t steps = 2 + dice_.below(3);
    for (size_t step = 0; step < steps; ++step) {
      before_gradients();
      gradients(step == 0);
      if (may_touch_gradients()) touch_gradients();
      if (dice_.percent(25)) add({.kind = ActionKind::clip});
      add({.kind = ActionKind::step});
      after_step();
    }
    return program_;
  }

 private:
  bool is(Wrapping wrapping) const { return program_.wrapping == wrapping; }
  bool may_touch_gradients() const { return !is_zero(program_.wrapping); }

  void options() {
    auto& p = program_;
    p.wrapping = dice_.one_of<Wrapping>(
        {Wrapping::ddp, Wrapping::ddp, Wrapping::fully_shard,
         Wrapping::fully_shard, Wrapping::fully_shard, Wrapping::zero,
         Wrapping::zero_shared, Wrapping::pipeline});
    p.rows = 2 + static_cast<int64_t>(dice_.below(3));
    p.width = 2 + static_cast<int64_t>(dice_.below(5));
    p.stepper = dice_.one_of<Stepper>(
        {Stepper::sgd, Stepper::momentum, Stepper::adamw});
    if (dice_.percent(20)) p.precision = Precision::float32;
    // Rounding of a gradient changes Adam's first steps wholly.
    if (dice_.percent(12) && !is(Wrapping::pipeline) &&
        !is(Wrapping::zero_shared)) {
      p.precision = Precision::bfloat16;
      p.stepper = Stepper::sgd;
    }
    if (!is(Wrapping::pipeline)) {
      p.argument = dice_.one_of<Argument>({Argument::none, Argument::none,
                                           Argument::tensor, Argument::list,
                                           Argument::optional, Argument::pair});
    }
    p.returns_view = dice_.percent(15);
    p.finds_unused = dice_.percent(20);
    p.gradient_as_bucket_view = dice_.percent(80);
    p.shares_memory = dice_.percent(50);
    p.reshards = dice_.percent(70);
    p.micro_batches = p.world_size + static_cast<int>(dice_.below(3));
    // Each micro-batch has a row.
    if (is(Wrapping::pipeline)) {
      p.rows = p.micro_batches + 1;
      p.stages = dice_.one_of<Stages>(
          {Stages::plain, Stages::replicated, Stages::divided});
    }
  }

  void layers() {
    auto& p = program_;
    std::vector<LayerKind> kinds{LayerKind::linear, LayerKind::residual,
                                 LayerKind::twice};
    // It enlarges the rounding of values that are nearly equal.
    if (p.precision != Precision::bfloat16) kinds.push_back(LayerKind::norm);
    if (!is(Wrapping::pipeline)) {
      kinds.insert(kinds.end(), {LayerKind::embedding, LayerKind::in_place});
      if (p.argument != Argument::none) {
        kinds.insert(kinds.end(), {LayerKind::recurrent, LayerKind::recurrent,
                                   LayerKind::penalty});
      }
    }
    size_t count = 1 + dice_.below(4);
    if (is(Wrapping::pipeline)) {
      count = stage_count(p) + dice_.below(2);
    }
    const bool skips = dice_.percent(20) && !is(Wrapping::pipeline);
    const bool has_units = dice_.percent(75);
    for (size_t i = 0; i < count; ++i) {
      Layer layer{.kind = dice_.one_of(kinds)};
      if (layer.kind == LayerKind::in_place && i > 0 &&
          !may_be_changed(p.layers.back())) {
        layer.kind = LayerKind::residual;
      }
      layer.is_unit = has_units && dice_.percent(60);
      layer.is_skipped = skips && i > 0 && dice_.percent(50);
      layer.is_frozen = i > 0 && dice_.percent(10) && !is(Wrapping::pipeline);
      layer.has_hook = !layer.is_frozen && dice_.percent(12);
      // A FullyShard returns an alias, whose gradient is without that of the
      // penalty.
      layer.hooks_result =
          dice_.percent(15) && layer.kind != LayerKind::penalty;
      layer.group = static_cast<int>(dice_.below(kGroups));
      p.finds_unused |= layer.is_skipped;
      p.layers.push_back(layer);
    }
  }

  // Whether backward of the layer does without its result.
  static bool may_be_changed(const Layer& layer) {
    return !layer.is_skipped && layer.kind != LayerKind::linear &&
           layer.kind != LayerKind::in_place &&
           layer.kind != LayerKind::penalty;
  }

  void before_gradients() {
    if (dice_.percent(25)) {
      add({.kind = ActionKind::evaluate,
           .quiet = dice_.percent(50) ? Quiet::no_grad : Quiet::inference});
    }
    const bool may_freeze = is(Wrapping::ddp) || is(Wrapping::fully_shard);
    if (may_freeze && program_.layers.size() > 1 && dice_.percent(10)) {
      add({.kind = ActionKind::zero_grad});
      add({.kind = ActionKind::set_frozen,
           .layer = 1 + dice_.below(program_.layers.size() - 1),
           .is_frozen = dice_.percent(50)});
    }
    if (may_join() && dice_.percent(12)) {
      Action action{.kind = ActionKind::joined};
      for (int rank = 0; rank < program_.world_size; ++rank) {
        action.inputs.push_back(static_cast<int>(dice_.below(4)));
      }
      // Some rank has the state that the others get.
      action.inputs[dice_.below(action.inputs.size())] = 3;
      add(action);
      add({.kind = ActionKind::zero_grad});
      batch_ += 4;
    }
  }

  // Layers that are skipped would be in some ranks' iterations only, and
  // forward would go on from another state.
  bool may_join() const {
    if (!is(Wrapping::ddp) && !is(Wrapping::zero)) return false;
    if (program_.precision == Precision::bfloat16) return false;
    for (const auto& layer : program_.layers) {
      if (layer.is_skipped) return false;
    }
    return program_.argument == Argument::none ||
           program_.argument == Argument::list;
  }

  void zero_grad() {
    add({.kind = ActionKind::zero_grad, .sets_to_none = dice_.percent(75)});
  }

  void gradients(bool is_first) {
    if (is_first || !may_touch_gradients() || dice_.percent(85)) zero_grad();
    const bool may_defer = !is(Wrapping::pipeline);
    if (may_defer && dice_.percent(30)) {
      train(false);
      if (dice_.percent(30)) train(false);
      if (dice_.percent(40)) zero_grad();  // the window is given up
    }
    train(true);
    if (may_touch_gradients() && dice_.percent(15)) train(true);
  }

  void train(bool synchronises) {
    Action action{.kind = ActionKind::train, .synchronises = synchronises};
    action.has_two_forwards = program_.precision != Precision::bfloat16 &&
                              !is(Wrapping::pipeline) && dice_.percent(12);
    action.modifies_result = !is(Wrapping::pipeline) &&
                             may_be_changed(program_.layers.back()) &&
                             dice_.percent(25);
    add(action);
  }

  void touch_gradients() {
    const bool keeps = dice_.percent(30) && !is(Wrapping::pipeline);
    if (keeps) {
      add({.kind = ActionKind::keep_gradients});
      add({.kind = ActionKind::zero_grad});
      train(true);
      if (dice_.percent(50)) add({.kind = ActionKind::use_kept});
    }
    if (dice_.percent(20)) {
      add({.kind = ActionKind::rebind, .resizes = dice_.percent(50)});
      if (dice_.percent(50) && !is(Wrapping::pipeline)) train(true);
    }
  }

  void after_step() {
    if (dice_.percent(15)) add({.kind = ActionKind::set_rate});
    if (dice_.percent(15)) {
      add({.kind = ActionKind::reload,
           .is_file = is(Wrapping::ddp) && dice_.percent(50)});
      add({.kind = ActionKind::zero_grad});
    }
  }

  void add(Action action) {
    action.idiom = dice_.percent(50) ? Idiom::call : Idiom::arrow;
    action.batch = batch_;
    if (action.kind == ActionKind::train) batch_ += 2;
    program_.actions.push_back(std::move(action));
  }

  Dice dice_;
  Program program_;
  int batch_{0};
};

}  // namespace

Program draw_program(uint64_t seed, int world_size) {
  return Drawing(seed, world_size).draw();
}

}  // namespace lockstep::internal::fuzz
