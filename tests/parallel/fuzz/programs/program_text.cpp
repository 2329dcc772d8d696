#include <algorithm>
#include <sstream>

#include "tests/parallel/fuzz/programs/program.h"

namespace lockstep::internal::fuzz {
namespace {

const char* name_of(Wrapping wrapping) {
  switch (wrapping) {
    case Wrapping::ddp:
      return "DistributedDataParallel";
    case Wrapping::zero:
      return "ZeroRedundancyOptimizer";
    case Wrapping::zero_shared:
      return "ZeroRedundancyOptimizer with shared_parameters";
    case Wrapping::fully_shard:
      return "FullyShard";
    case Wrapping::pipeline:
      return "Pipeline";
  }
  return "";
}

const char* name_of(Stages stages) {
  return stages == Stages::replicated ? "stages in DistributedDataParallel"
         : stages == Stages::divided  ? "stages in FullyShard"
                                      : "plain stages";
}

const char* name_of(Precision precision) {
  return precision == Precision::float64   ? "float64"
         : precision == Precision::float32 ? "float32"
                                           : "param_dtype bfloat16";
}

const char* name_of(Stepper stepper) {
  return stepper == Stepper::sgd        ? "SGD"
         : stepper == Stepper::momentum ? "SGD with momentum"
                                        : "AdamW";
}

const char* name_of(LayerKind kind) {
  static constexpr const char* kNames[] = {"linear",    "residual",  "norm",
                                           "twice",     "embedding", "in_place",
                                           "recurrent", "penalty"};
  return kNames[static_cast<size_t>(kind)];
}

const char* name_of(Argument argument) {
  static constexpr const char* kNames[] = {
      "", ", Tensor& state", ", vector<Tensor>& losses",
      ", optional<Tensor>& cache", ", pair<Tensor, Tensor>& both"};
  return kNames[static_cast<size_t>(argument)];
}

bool is_anywhere(const Program& program, ActionKind kind) {
  return std::ranges::any_of(program.actions, [&](const Action& action) {
    return action.kind == kind;
  });
}

// A window under no_sync() whose gradients are dropped.
bool gives_up_a_window(const Program& program) {
  bool is_open = false;
  for (const auto& action : program.actions) {
    if (action.kind == ActionKind::train) is_open = !action.synchronises;
    if (action.kind == ActionKind::zero_grad && is_open) return true;
  }
  return false;
}

std::string text_of(const Program& program, const Action& action) {
  std::ostringstream text;
  const char* forward =
      action.idiom == Idiom::call ? "model(x" : "model->forward(x";
  const auto call = [&](int batch) {
    text << forward << batch << name_of(program.argument) << ")";
  };
  switch (action.kind) {
    case ActionKind::zero_grad:
      text << (action.idiom == Idiom::arrow ? "model->" : "optimizer.")
           << "zero_grad(" << action.sets_to_none << ");";
      break;
    case ActionKind::train:
      if (!action.synchronises) text << "{ auto guard = model.no_sync(); ";
      text << "y = ";
      call(action.batch);
      if (action.modifies_result) text << ".mul_(0.5)";
      if (action.has_two_forwards) {
        text << "; z = ";
        call(action.batch + 1);
      }
      text << "; loss.backward();" << (action.synchronises ? "" : " }");
      break;
    case ActionKind::step:
      text << "optimizer.step();";
      break;
    case ActionKind::clip:
      text << "clip_grad_norm_(optimizer, 0.5);";
      break;
    case ActionKind::set_rate:
      text << "// halve all learning rates";
      break;
    case ActionKind::evaluate:
      text << "model.eval(); { "
           << (action.quiet == Quiet::inference ? "c10::InferenceMode guard; "
                                                : "NoGradGuard guard; ");
      call(action.batch);
      text << "; } model.train();";
      break;
    case ActionKind::set_frozen:
      text << "layer" << action.layer << " requires_grad(" << !action.is_frozen
           << ");";
      break;
    case ActionKind::keep_gradients:
      text << "for (p : parameters) kept.push_back(p.grad());";
      break;
    case ActionKind::use_kept:
      text << "for (p : parameters) p.grad = p.grad + kept;";
      break;
    case ActionKind::rebind:
      text << (action.resizes
                   ? "for (p : parameters) p.grad().set_data(clone);"
                   : "for (p : parameters) p.mutable_grad() = clone;");
      break;
    case ActionKind::reload:
      text << "save_snapshot(" << (action.is_file ? "\"x.pt\"" : "\"x/\"")
           << "); make everything anew; load_snapshot();";
      break;
    case ActionKind::joined:
      text << "join(); inputs of each rank:";
      for (int count : action.inputs) text << " " << count;
      text << "; each with zero_grad, ";
      call(action.batch);
      text << ", backward, step";
      break;
  }
  return text.str();
}

}  // namespace

std::set<std::string> features_of_program(const Program& program) {
  std::set<std::string> features;
  const auto add = [&](bool is_there, const std::string& name) {
    if (is_there) features.insert(name);
  };
  add(true, std::string("wrapper ") + name_of(program.wrapping));
  add(true, std::string("optimizer ") + name_of(program.stepper));
  add(true, std::string("dtype ") + name_of(program.precision));
  add(program.argument != Argument::none,
      std::string("forward(x") + name_of(program.argument) + ")");
  add(program.returns_view, "returns a view");
  add(program.wrapping == Wrapping::pipeline, name_of(program.stages));
  const bool shards = divides(program);
  add(shards && program.shares_memory, "shards share memory");
  add(shards && !program.shares_memory, "shards are gathered");
  add(program.wrapping == Wrapping::fully_shard && !program.reshards,
      "reshard_after_forward false");
  for (const auto& layer : program.layers) {
    add(true, std::string("layer ") + name_of(layer.kind));
    add(shards && layer.is_unit, "units in units");
    add(layer.is_skipped, "skipped layers");
    add(layer.is_frozen, "frozen layers");
    add(layer.has_hook, "hooks on parameters");
    add(layer.hooks_result, "hooks on activations");
  }
  for (const auto& action : program.actions) {
    add(action.kind == ActionKind::train && !action.synchronises, "no_sync");
    add(action.has_two_forwards, "two forwards in one backward");
    add(action.modifies_result, "result changed in place");
    add(!action.sets_to_none, "gradients of zeros");
    add(action.kind == ActionKind::evaluate && action.quiet == Quiet::inference,
        "inference mode");
    add(action.kind == ActionKind::evaluate && action.quiet == Quiet::no_grad,
        "no grad");
    add(action.kind == ActionKind::train && action.idiom == Idiom::arrow,
        "model->forward(x)");
  }
  add(gives_up_a_window(program), "no_sync window given up");
  add(is_anywhere(program, ActionKind::clip), "clip");
  add(is_anywhere(program, ActionKind::keep_gradients), "kept gradients");
  add(is_anywhere(program, ActionKind::use_kept), "kept gradients added");
  add(is_anywhere(program, ActionKind::rebind), "gradients elsewhere");
  add(is_anywhere(program, ActionKind::reload), "snapshot and reload");
  add(is_anywhere(program, ActionKind::joined), "join");
  add(is_anywhere(program, ActionKind::set_frozen), "requires_grad changes");
  add(is_anywhere(program, ActionKind::set_rate), "learning rate changes");
  return features;
}

std::string text_of_program(const Program& program, const std::string& reason) {
  std::ostringstream text;
  text << "// " << reason << "\n// seed " << program.seed << ", "
       << program.world_size << " ranks, x of [" << program.rows << ", "
       << program.width << "], " << name_of(program.precision) << "\n// "
       << name_of(program.wrapping) << ", " << name_of(program.stepper);
  if (program.wrapping == Wrapping::fully_shard) {
    text << ", shared_memory " << program.shares_memory
         << ", reshard_after_forward " << program.reshards;
  } else if (program.wrapping == Wrapping::pipeline) {
    text << ", micro-batches " << program.micro_batches << ", "
         << name_of(program.stages) << ", shared_memory "
         << program.shares_memory << ", find_unused_parameters "
         << program.finds_unused;
  } else {
    text << ", find_unused_parameters " << program.finds_unused
         << ", gradient_as_bucket_view " << program.gradient_as_bucket_view;
  }
  if (program.returns_view) text << ", returns a view";
  text << "\n";
  for (size_t i = 0; i < program.layers.size(); ++i) {
    const auto& layer = program.layers[i];
    text << "// layer" << i << ": " << name_of(layer.kind) << ", group "
         << layer.group << (layer.is_unit ? ", unit" : "")
         << (layer.is_skipped ? ", skipped" : "")
         << (layer.is_frozen ? ", frozen" : "")
         << (layer.has_hook ? ", hook" : "")
         << (layer.hooks_result ? ", hook on its result" : "") << "\n";
  }
  for (const auto& action : program.actions) {
    text << text_of(program, action) << "\n";
  }
  return text.str();
}

}  // namespace lockstep::internal::fuzz
