#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace lockstep::internal {

// The name of the only scalar tensor in a state_dict(); all other tensors have
// their parameter's shape.
inline constexpr const char* kStepName = "step";

// The state that each kind of optimizer keeps, under Python's names, described
// once for reading and for writing. A visitor has
//
//   field(name, T&)      double, bool or a tuple of two doubles
//   step(name, int64_t&) an int here, a tensor in Python
//   buffer(name, Tensor&, needed)   of the parameter's shape
//   fixed(name, bool)    an option of Python that LibTorch lacks, with the
//                        only value that this optimizer can do
//   maximize             a member: that value of the option of this name
//   ignored(name)        an option of Python that LibTorch lacks and that
//                        changes no result
//
// The options are those of torch 2.13's Python classes.

template <class Visitor>
void visit_common(Visitor& v) {
  v.fixed("maximize", v.maximize);
  v.ignored("foreach");
  v.fixed("differentiable", false);
}

struct SgdFields {
  using Optimizer = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr const char* kName = "SGD";

  static Options options() { return Options(0.0); }

  template <class Visitor>
  static void visit_options(Options& o, Visitor& v) {
    v.field("lr", o.lr());
    v.field("momentum", o.momentum());
    v.field("dampening", o.dampening());
    v.field("weight_decay", o.weight_decay());
    v.field("nesterov", o.nesterov());
    visit_common(v);
    v.ignored("fused");
  }
  template <class Visitor>
  static void visit_state(State& s, const Options&, Visitor& v) {
    // The buffer is needed: LibTorch assumes that every entry has one.
    v.buffer("momentum_buffer", s.momentum_buffer(), true);
  }
};

template <class OptimizerType, class OptionsType, class StateType,
          bool decoupled>
struct AdamLikeFields {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
  using State = StateType;
  static constexpr const char* kName = decoupled ? "AdamW" : "Adam";

  static Options options() { return Options(); }

  template <class Visitor>
  static void visit_options(Options& o, Visitor& v) {
    v.field("lr", o.lr());
    v.field("betas", o.betas());
    v.field("eps", o.eps());
    v.field("weight_decay", o.weight_decay());
    v.field("amsgrad", o.amsgrad());
    visit_common(v);
    v.fixed("decoupled_weight_decay", decoupled);
    v.ignored("capturable", false);
    v.ignored("fused");
  }
  template <class Visitor>
  static void visit_state(State& s, const Options& o, Visitor& v) {
    v.step(kStepName, s.step());
    v.buffer("exp_avg", s.exp_avg(), true);
    v.buffer("exp_avg_sq", s.exp_avg_sq(), true);
    v.buffer("max_exp_avg_sq", s.max_exp_avg_sq(), o.amsgrad());
  }
};

using AdamFields = AdamLikeFields<torch::optim::Adam, torch::optim::AdamOptions,
                                  torch::optim::AdamParamState, false>;
using AdamWFields =
    AdamLikeFields<torch::optim::AdamW, torch::optim::AdamWOptions,
                   torch::optim::AdamWParamState, true>;

struct RmspropFields {
  using Optimizer = torch::optim::RMSprop;
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static constexpr const char* kName = "RMSprop";

  static Options options() { return Options(); }

  template <class Visitor>
  static void visit_options(Options& o, Visitor& v) {
    v.field("lr", o.lr());
    v.field("alpha", o.alpha());
    v.field("eps", o.eps());
    v.field("weight_decay", o.weight_decay());
    v.field("momentum", o.momentum());
    v.field("centered", o.centered());
    visit_common(v);
    v.ignored("capturable", false);
  }
  template <class Visitor>
  static void visit_state(State& s, const Options& o, Visitor& v) {
    v.step(kStepName, s.step());
    v.buffer("square_avg", s.square_avg(), true);
    v.buffer("momentum_buffer", s.momentum_buffer(), o.momentum() > 0);
    v.buffer("grad_avg", s.grad_avg(), o.centered());
  }
};

struct AdagradFields {
  using Optimizer = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr const char* kName = "Adagrad";

  static Options options() { return Options(); }

  template <class Visitor>
  static void visit_options(Options& o, Visitor& v) {
    v.field("lr", o.lr());
    v.field("lr_decay", o.lr_decay());
    v.field("weight_decay", o.weight_decay());
    v.field("initial_accumulator_value", o.initial_accumulator_value());
    v.field("eps", o.eps());
    visit_common(v);
    v.ignored("fused");
  }
  template <class Visitor>
  static void visit_state(State& s, const Options&, Visitor& v) {
    v.step(kStepName, s.step());
    v.buffer("sum", s.sum(), true);
  }
};

}  // namespace lockstep::internal
