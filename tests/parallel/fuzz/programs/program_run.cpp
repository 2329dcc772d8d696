#include "tests/parallel/fuzz/programs/program_run.h"

#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "tests/parallel/fuzz/programs/program_reference.h"
#include "tests/parallel/fuzz/programs/trained.h"

namespace lockstep::internal::fuzz {
namespace {

// The values of a model that gets others from a snapshot.
constexpr uint64_t kOtherValues = 77;

// The unit roundoff of bfloat16, which has 8 significant bits.
constexpr double kRoundoff = 1.0 / 256;
// How many gradients one average adds up on a rank, as the draw makes them.
constexpr int kAddedGradients = 4;

const char* name_of(ActionKind kind) {
  static constexpr const char* kNames[] = {
      "zero_grad", "train",    "step",       "clip",
      "set_rate",  "evaluate", "set_frozen", "keep_gradients",
      "use_kept",  "rebind",   "reload",     "joined"};
  return kNames[static_cast<size_t>(kind)];
}

class ProgramRun {
 public:
  explicit ProgramRun(const Program& program)
      : program_(program),
        rank_(data_ranks(program) == 1 ? 0 : get_rank()),
        reference_(program),
        trained_(make_trained(program, program.seed)) {}

  void run() {
    for (now_ = 0; now_ < program_.actions.size(); ++now_) {
      const auto& action = program_.actions[now_];
      reference_.run(action);
      run_action(action);
    }
    now_ = program_.actions.size() - 1;
    compare_parameters();
    compare_kept();
  }

  const std::string& difference() const { return difference_; }
  std::string place() const {
    return "action " + std::to_string(now_) + " (" +
           name_of(program_.actions[now_].kind) + ")";
  }

 private:
  void run_action(const Action& action) {
    auto& optimizer = trained_->optimizer();
    switch (action.kind) {
      case ActionKind::zero_grad:
        if (action.idiom == Idiom::arrow) {
          trained_->zero_grad(action.sets_to_none);
        } else {
          optimizer.zero_grad(action.sets_to_none);
        }
        if (action.sets_to_none) kept_are_apart_ = true;
        if (!action.sets_to_none && !kept_are_apart_) kept_.clear();
        return;
      case ActionKind::train:
        if (!kept_are_apart_) kept_.clear();
        train(action);
        if (action.synchronises) compare_gradients();
        return;
      case ActionKind::step:
        optimizer.step();
        return compare_parameters();
      case ActionKind::clip: {
        if (!kept_are_apart_) kept_.clear();
        const double norm =
            clip_grad_norm_(optimizer, kProgramMaxNorm).item<double>();
        compare("the norm", torch::tensor(norm, at::kDouble),
                torch::tensor(reference_.norm(), at::kDouble));
        return compare_gradients();
      }
      case ActionKind::set_rate:
        for (auto& group : optimizer.param_groups()) {
          group.options().set_lr(group.options().get_lr() / 2);
        }
        return;
      case ActionKind::evaluate:
        return evaluate(action);
      case ActionKind::set_frozen:
        for (const auto& item : trained_->module()->named_parameters()) {
          if (std::stoul(item.key().substr(5)) == action.layer) {
            item.value().set_requires_grad(!action.is_frozen);
          }
        }
        return;
      case ActionKind::keep_gradients:
        kept_.clear();
        kept_are_apart_ = false;
        for (auto& parameter : trained_->module()->parameters()) {
          const auto& gradient = parameter.grad();
          kept_.emplace_back(gradient,
                             gradient.defined() ? gradient.clone() : gradient);
        }
        return;
      case ActionKind::use_kept:
        compare_kept();
        return use_kept();
      case ActionKind::rebind:
        for (auto& parameter : trained_->module()->parameters()) {
          if (!parameter.grad().defined()) continue;
          const auto other = parameter.grad().clone();
          if (action.resizes) {
            parameter.mutable_grad().set_data(other);
          } else {
            parameter.mutable_grad() = other;
          }
        }
        kept_.clear();
        return;
      case ActionKind::reload:
        return reload(action);
      case ActionKind::joined:
        return join(action);
    }
  }

  at::Tensor input(int batch) const {
    const auto x = input_of_program(program_, batch, rank_);
    return program_.precision == Precision::float64 ? x : x.to(at::kFloat);
  }

  at::Tensor forward(const Action& action, int batch) {
    variables_.losses.clear();
    variables_.both.second = at::Tensor();
    auto x = input(batch);
    auto output = trained_->forward(action.idiom, x, Batch{batch}, variables_);
    if (action.modifies_result) output.mul_(0.5);
    seen_input_ = x;
    seen_output_ = output;
    return loss_of_program(program_, batch, rank_, output, variables_);
  }

  void train(const Action& action) {
    if (program_.wrapping == Wrapping::pipeline) {
      const auto loss =
          trained_->train(input(action.batch),
                          target_of_program(program_, action.batch, rank_));
      if (loss.defined()) {
        compare("the loss", loss.to(at::kDouble),
                torch::tensor(reference_.seen(rank_).loss, at::kDouble));
      }
      return;
    }
    const auto pass = [&] {
      begin_forward(variables_);
      auto loss = forward(action, action.batch);
      if (action.has_two_forwards) {
        loss = loss + forward(action, action.batch + 1);
      }
      loss.backward();
    };
    if (action.synchronises) {
      pass();
    } else {
      trained_->without_sync(pass);
    }
    compare_seen();
  }

  void evaluate(const Action& action) {
    const auto kept = variables_;
    const auto run = [&] {
      if (program_.wrapping != Wrapping::pipeline) {
        forward(action, action.batch);
        return compare_seen();
      }
      auto x = input(action.batch);
      const auto output =
          trained_->forward(action.idiom, x, Batch{action.batch}, variables_);
      if (!output.defined()) return;
      compare("the output", output, reference_.seen(rank_).output);
    };
    trained_->module()->eval();
    if (action.quiet == Quiet::inference) {
      const c10::InferenceMode guard;
      run();
    } else {
      const at::NoGradGuard guard;
      run();
    }
    trained_->module()->train();
    variables_ = kept;
  }

  void join(const Action& action) {
    const int count = action.inputs[static_cast<size_t>(rank_)];
    const auto body = [&] {
      for (int i = 0; i < count; ++i) {
        trained_->optimizer().zero_grad();
        begin_forward(variables_);
        forward(action, action.batch + i).backward();
        trained_->optimizer().step();
      }
    };
    trained_->join(body);
    kept_.clear();
    compare_parameters();
  }

  void use_kept() {
    const auto parameters = trained_->module()->parameters();
    for (size_t i = 0; i < kept_.size(); ++i) {
      at::Tensor parameter = parameters[i];
      const auto& [kept, copy] = kept_[i];
      if (!copy.defined()) continue;
      auto& gradient = parameter.mutable_grad();
      gradient = gradient.defined() ? gradient + kept : kept.clone();
    }
    kept_.clear();
    compare_gradients();
  }

  void reload(const Action& action) {
    trained_->synchronize();
    const char* folder = std::getenv("LOCKSTEP_TEST_FOLDER");
    const auto path = std::filesystem::path(folder ? folder : ".") /
                      ("program-" + std::to_string(program_.seed) + "-" +
                       std::to_string(now_) + (action.is_file ? ".pt" : "/"));
    save_snapshot(path, {.model = trained_->module(),
                         .optimizer = &trained_->optimizer()});
    kept_.clear();
    std::vector<bool> trains;
    for (const auto& parameter : trained_->module()->parameters()) {
      trains.push_back(parameter.requires_grad());
    }
    trained_.reset();
    trained_ = make_trained(program_, program_.seed + kOtherValues);
    for (size_t i = 0; i < trains.size(); ++i) {
      trained_->module()->parameters()[i].set_requires_grad(trains[i]);
    }
    TrainingState state{.model = trained_->module(),
                        .optimizer = &trained_->optimizer()};
    if (!load_snapshot(path, state, {.will_save = false})) {
      note("the snapshot is missing");
    }
    barrier();
    if (get_rank() == 0) std::filesystem::remove_all(path);
    compare_parameters();
  }

  // ---- Comparison ----

  void compare_seen() {
    const auto& seen = reference_.seen(rank_);
    compare("the output", seen_output_, seen.output);
    compare("the input", seen_input_, seen.input);
    const auto& want = reference_.variables(rank_);
    compare("the state", variables_.state, want.state);
    compare("the cache", variables_.cache.value_or(at::Tensor()),
            want.cache.value_or(at::Tensor()));
    compare("the first of a pair", variables_.both.first, want.both.first);
    compare("the second of a pair", variables_.both.second, want.both.second);
    if (variables_.losses.size() != want.losses.size()) {
      return note("the losses are " + std::to_string(variables_.losses.size()));
    }
    for (size_t i = 0; i < want.losses.size(); ++i) {
      compare("a loss", variables_.losses[i], want.losses[i]);
    }
  }

  void compare_parameters() {
    trained_->synchronize();
    compare_all(
        "parameter ", [](const at::Tensor& p) { return p.detach(); },
        [&](const auto& name) { return reference_.parameter(name); },
        reference_.reach());
    if (program_.precision == Precision::bfloat16) follow_parameters();
  }

  // Lets the reference go on from the parameters that this program has: from
  // others, which round to other numbers, a ReLU may decide otherwise.
  void follow_parameters() {
    const at::NoGradGuard no_grad;
    for (const auto& item : trained_->module()->named_parameters()) {
      at::Tensor whole = reference_.parameter(item.key());
      const auto* layout = layout_of(item.value());
      if (layout == nullptr) {
        whole.copy_(item.value());
        continue;
      }
      whole.zero_();
      part_of(whole, *layout).view_as(item.value()).copy_(item.value());
      all_reduce(whole);
    }
  }

  void compare_gradients() {
    if (is_zero(program_.wrapping)) return;
    compare_all(
        "the gradient of ", [](const at::Tensor& p) { return p.grad(); },
        [&](const auto& name) { return reference_.gradient(name); },
        reference_.magnitude());
    compare_kept();
  }

  // Compares shards with the parts of the whole that this rank has.
  //
  // In bfloat16, `magnitude` is what relative errors are multiplied by. The
  // gradient of one rank and backward is that of the reference, which begins
  // each step with the same weights and rounds at the same places. Each
  // addition to others on its rank, each to those of other ranks, and the
  // division round again, by kRoundoff of the summands at most.
  template <class Got, class Want>
  void compare_all(const std::string& what, const Got& got, const Want& want,
                   double magnitude) {
    std::vector<at::Tensor> all_got, all_want;
    for (const auto& item : trained_->module()->named_parameters()) {
      const auto& parameter = item.value();
      if (parameter.numel() == 0) continue;
      const auto mine = got(parameter);
      at::Tensor whole = want(item.key());
      const auto* layout = layout_of(parameter);
      if (whole.defined() && layout) {
        whole = part_of(whole, *layout).view(parameter.sizes());
      }
      if (mine.defined() != whole.defined()) {
        return note(
            what + item.key() +
            (whole.defined() ? " is missing" : " exists, but should not"));
      }
      if (!mine.defined()) continue;
      if (program_.precision != Precision::bfloat16) {
        compare(what + item.key(), mine, whole);
        continue;
      }
      all_got.push_back(mine.detach().to(at::kDouble).flatten());
      all_want.push_back(whole.flatten());
    }
    if (all_got.empty()) return;
    const auto wanted = torch::cat(all_want);
    const double off =
        (torch::cat(all_got) - wanted).norm().template item<double>();
    const double bound =
        (kAddedGradients + data_ranks(program_)) * kRoundoff * magnitude +
        1e-6 * wanted.norm().template item<double>();
    if (off <= bound) return;
    std::ostringstream text;
    text << what << "all is off by " << off << " of " << magnitude;
    note(text.str());
  }

  void compare_kept() {
    if (!kept_are_apart_) return;
    for (const auto& [kept, copy] : kept_) {
      if (copy.defined() && !kept.equal(copy)) {
        return note("a kept gradient was overwritten");
      }
    }
  }

  void compare(const std::string& what, const at::Tensor& got,
               const at::Tensor& want) {
    const at::NoGradGuard no_grad;
    if (got.defined() != want.defined()) {
      return note(what +
                  (want.defined() ? " is missing" : " exists, but should not"));
    }
    if (!want.defined() || program_.precision == Precision::bfloat16) return;
    if (got.sizes() != want.sizes()) return note(what + " has another shape");
    if (want.numel() == 0) return;
    const double off = (got.to(at::kDouble) - want).abs().max().item<double>();
    const double scale = want.abs().max().item<double>();
    const double bound = program_.precision == Precision::float64 ? 1e-9 : 2e-4;
    // Written so that NaN counts as a difference.
    if (off <= bound * std::max(1.0, scale)) return;
    std::ostringstream text;
    text << what << " is off by " << off << " of " << scale;
    note(text.str());
  }

  void note(const std::string& difference) {
    if (difference_.empty()) difference_ = difference + " after " + place();
  }

  const Program program_;
  const int rank_;  // whose data this rank uses
  ProgramReference reference_;
  std::unique_ptr<Trained> trained_;
  Variables variables_;
  at::Tensor seen_input_, seen_output_;
  // Tensors that were .grad, and what they were; they must stay so when .grad
  // has been reset.
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
  bool kept_are_apart_ = false;
  size_t now_ = 0;
  std::string difference_;
};

std::string first_of(const std::string& text) {
  return text.substr(0, text.find('\n')).substr(0, 400);
}

}  // namespace

Outcome run_program(const Program& drawn) {
  auto program = drawn;
  // Without memory of all ranks there are no shared parameters.
  if (program.wrapping == Wrapping::zero_shared &&
      default_group()->backend_config().find("lockstep") == std::string::npos) {
    program.wrapping = Wrapping::zero;
  }
  std::string place = "the constructor";
  std::unique_ptr<ProgramRun> run;
  const auto failed = [&](const std::string& error) {
    if (run) place = run->place();
    return Outcome{Verdict::failed,
                   "threw in " + place + "): " + first_of(error), false};
  };
  try {
    run = std::make_unique<ProgramRun>(program);
    run->run();
    if (run->difference().empty()) return {};
    return {Verdict::failed, run->difference(), true};
  } catch (const c10::Error& error) {
    return failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return failed(error.what());
  }
}

}  // namespace lockstep::internal::fuzz
