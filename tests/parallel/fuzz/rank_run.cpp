#include "tests/parallel/fuzz/rank_run.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string_view>

#include "lockstep/comm/init.h"
#include "tests/parallel/fuzz/operations.h"
#include "tests/parallel/fuzz/reference.h"
#include "tests/parallel/fuzz/wrapped.h"

namespace lockstep::internal::fuzz {
namespace {

// Part of the error on peers of a rank that throws in backward.
constexpr std::string_view kGivenUp = "has given up iteration";

constexpr double kTolerance = 1e-10;

// Errors by which DistributedDataParallel may refuse a case according to its
// documentation. Any other exception is a failure.
struct Refusal {
  std::string_view error;
  // Every rank throws at the same place, between two operations.
  bool leaves_ranks_in_step;
};
constexpr std::array<Refusal, 6> kRefusals{{
    {"came in a nested backward pass, which find_unused_parameters cannot see",
     false},
    {"became ready twice in one backward", false},
    {"leads from one operation straight to parameters", false},
    {"the process group has no memory that all its ranks share", true},
    {"NCCL sums no sparse tensors", true},
    {"ranks can share only memory of the CPU", true},
}};

bool is_sharded(Stepping stepping) {
  return stepping == Stepping::zero_private ||
         stepping == Stepping::zero_shared ||
         stepping == Stepping::zero_in_backward;
}

std::string difference_between(const torch::Tensor& got,
                               const torch::Tensor& want) {
  torch::NoGradGuard no_grad;
  const auto dense_got = (got.is_sparse() ? got.to_dense() : got).cpu();
  const auto dense_want = want.is_sparse() ? want.to_dense() : want;
  if (dense_got.sizes() != dense_want.sizes()) return "another shape";
  if (dense_got.scalar_type() != dense_want.scalar_type()) {
    return "another dtype";
  }
  if (dense_want.numel() == 0) return {};
  const auto difference =
      (dense_got - dense_want).abs().max().template item<double>();
  const auto scale = dense_want.abs().max().template item<double>();
  // The training has diverged, so values cannot be compared.
  if (!(scale < 1e100)) return {};
  // Written so that NaN counts as a difference.
  if (difference <= kTolerance * std::max(1.0, scale)) return {};
  std::ostringstream text;
  text << "off by " << difference << " of " << scale;
  return text.str();
}

class RankRun {
 public:
  explicit RankRun(const Case& fuzz_case)
      : case_(fuzz_case),
        rank_(get_rank()),
        reference_(fuzz_case),
        device_(default_group()->control_device()),
        tensors_(make_parameters(fuzz_case, rank_, device_)) {
    for (int wrapper = 0; wrapper < case_.wrappers; ++wrapper) {
      wrappers_.push_back(wrap(case_, wrapper, tensors_));
    }
    if (case_.options.stepping == Stepping::plain) {
      optimizer_ = make_plain_optimizer(case_, tensors_);
    } else {
      optimizer_ = wrappers_[0]->make_optimizer();
    }
  }

  void run() {
    for (size_t i = 0; i < case_.events.size(); ++i) {
      const auto& event = case_.events[i];
      now_ = i;
      reference_.run(event);
      settle_held(event);
      if (!event.is_on_rank_zero_only || rank_ == 0) run_event(event);
      compare(event);
    }
  }

  const std::string& difference() const { return difference_; }
  std::string place() const {
    const auto& event = case_.events[now_];
    return std::string("event ") + std::to_string(now_) + " (" +
           name_of(event.kind) + ", step " + std::to_string(event.step) + ")";
  }

 private:
  void run_event(const Event& event) {
    switch (event.kind) {
      case EventKind::forward:
        return forward(event);
      case EventKind::backward:
        return backward(event);
      case EventKind::gradient:
        return gradient(event);
      case EventKind::zero_grad:
        if (optimizer_) {
          optimizer_->zero_grad(event.sets_to_none);
        } else {
          for (auto& wrapped : wrappers_) {
            wrapped->net()->zero_grad(event.sets_to_none);
          }
        }
        return;
      case EventKind::keep_gradients:
        kept_.clear();
        for (auto& tensor : tensors_) {
          const auto& grad = tensor.grad();
          kept_.push_back(grad.defined() ? grad.clone() : grad);
        }
        return;
      case EventKind::hold_gradients:
        return hold_gradients(event.hold);
      case EventKind::change_gradients:
        return change_gradients(event.change);
      case EventKind::restore_gradients:
        for (size_t i = 0; i < kept_.size(); ++i) {
          tensors_[i].mutable_grad() = kept_[i];
        }
        kept_.clear();
        return;
      case EventKind::round_trip:
        round_trip(nets());
        return;
      case EventKind::set_frozen:
        tensors_[event.parameter].set_requires_grad(!event.is_frozen);
        return;
      case EventKind::wrap_again:
        return wrap_again(event.wrapper);
      case EventKind::step:
        if (!optimizer_) return;
        optimizer_->step();
        if (case_.options.stepping == Stepping::zero_shared) {
          wrappers_[0]->synchronize(*optimizer_);
        }
        return;
    }
  }

  void forward(const Event& event) {
    losses_.erase(event.slot);
    peers_throw_.erase(event.slot);
    torch::AutoGradMode mode(!event.has_no_grad);
    const auto x = input_of(case_, event, rank_, device_);
    const Call call{.rank = rank_,
                    .step = event.use_step,
                    .exception = exception_on(event, rank_)};
    auto& wrapped = *wrappers_[event.wrapper];
    std::vector<Output> outputs;
    // A forward in training mode must be made by all ranks.
    wrapped.net()->train(!event.is_on_rank_zero_only);
    try {
      outputs = event.is_plain ? wrapped.net()->run(x, call)
                               : wrapped.forward(x, call, event.synchronises);
    } catch (const DeliberateError&) {
      return;
    }
    if (event.has_no_grad) return;
    losses_[event.slot] =
        loss_of(case_, event, rank_, x, outputs, wrapped.net()->auxiliary);
    if (event.keeps_penalty_apart) {
      losses_[event.slot + kPenalties] = penalty_of(x, outputs);
    }
    if (event.exception == Deliberate::in_backward) {
      peers_throw_.insert(event.slot);
    }
  }

  void backward(const Event& event) {
    const auto total = sum_of(event.slots);
    if (!total.defined()) return;
    try {
      total.backward({}, event.retains_graph);
    } catch (const DeliberateError&) {
    } catch (const std::exception& error) {
      const bool is_allowed =
          std::ranges::any_of(
              event.slots,
              [&](int slot) { return peers_throw_.contains(slot); }) &&
          std::string_view(error.what()).find(kGivenUp) !=
              std::string_view::npos;
      if (!is_allowed) throw;
    }
  }

  void hold_gradients(Hold hold) {
    for (auto& tensor : tensors_) {
      const auto& grad = tensor.grad();
      if (!grad.defined() || grad.is_sparse()) continue;
      held_.push_back({.tensor = hold == Hold::itself     ? grad
                                 : hold == Hold::detached ? grad.detach()
                                 : hold == Hold::data     ? grad.variable_data()
                                                          : grad.flatten(),
                       .value = grad.clone(),
                       .is_grad = true});
    }
  }

  void change_gradients(Change change) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto& grad = tensors_[i].grad();
      if (!grad.defined() || case_.parameters[i].is_sparse) continue;
      if (change == Change::rebound) {
        grad.set_data(rebound(grad, rank_));
        continue;
      }
      if (change == Change::larger) grad.resize_({grad.numel() + 3});
      if (change == Change::smaller) grad.resize_({grad.numel() / 2});
      if (change == Change::transposed && grad.dim() == 2) grad.t_();
      tensors_[i].mutable_grad().reset();
    }
  }

  // A held gradient keeps its value from when it is not the .grad any more.
  void settle_held(const Event& event) {
    const bool drops =
        event.kind == EventKind::restore_gradients ||
        (event.kind == EventKind::zero_grad && event.sets_to_none);
    const bool writes = event.kind == EventKind::backward ||
                        event.kind == EventKind::change_gradients ||
                        (event.kind == EventKind::zero_grad && !drops);
    if (writes)
      std::erase_if(held_, [](const Held& one) { return one.is_grad; });
    if (!drops) return;
    for (auto& one : held_) one.is_grad = false;
  }

  void wrap_again(int wrapper) {
    losses_.clear();  // their graphs keep the module alive
    wrappers_[wrapper].reset();
    wrappers_[wrapper] = wrap(case_, wrapper, tensors_);
  }

  void gradient(const Event& event) {
    const auto total = sum_of(event.slots);
    if (!total.defined()) return;
    std::vector<torch::Tensor> trained;
    for (const auto& tensor : tensors_) {
      if (tensor.requires_grad()) trained.push_back(tensor);
    }
    torch::autograd::grad({total}, trained, {}, /*retain_graph=*/true,
                          /*create_graph=*/false, /*allow_unused=*/true);
  }

  torch::Tensor sum_of(const std::vector<int>& slots) const {
    torch::Tensor total;
    for (int slot : slots) {
      const auto found = losses_.find(slot);
      if (found == losses_.end()) continue;
      total = total.defined() ? total + found->second : found->second;
    }
    return total;
  }

  void compare(const Event& event) {
    const bool is_step = event.kind == EventKind::step;
    if (!is_step && event.kind != EventKind::backward &&
        event.kind != EventKind::restore_gradients) {
      return;
    }
    const bool sharded = is_sharded(case_.options.stepping);
    if (!difference_.empty() || (sharded && !is_step)) return;
    for (const auto& one : held_) {
      if (!one.tensor.view_as(one.value).allclose(one.value, 0, 0, true)) {
        difference_ = "a gradient that was held has changed after " + place();
        return;
      }
    }
    const auto& want = reference_.parameters(rank_);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      note(i, "p", difference_between(tensors_[i], want[i]));
      if (sharded || !reference_.gradients_are_known()) continue;
      note(i, "the gradient of p",
           gradient_difference(tensors_[i].grad(), want[i].grad()));
    }
  }

  std::string gradient_difference(const torch::Tensor& got,
                                  const torch::Tensor& want) const {
    if (got.defined() && want.defined()) return difference_between(got, want);
    if (got.defined() == want.defined()) return {};
    return got.defined() ? "there, but should not be" : "missing";
  }

  void note(size_t parameter, const char* what, const std::string& difference) {
    if (difference.empty() || !difference_.empty()) return;
    difference_ = std::string(what) + std::to_string(parameter) + " is " +
                  difference + " after " + place();
  }

  std::vector<std::shared_ptr<Net>> nets() const {
    std::vector<std::shared_ptr<Net>> all;
    for (const auto& wrapped : wrappers_) all.push_back(wrapped->net());
    return all;
  }

  const Case case_;
  const int rank_;
  Reference reference_;
  const torch::Device device_;
  std::vector<torch::Tensor> tensors_;
  std::vector<std::unique_ptr<Wrapped>> wrappers_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::map<int, torch::Tensor> losses_;
  std::set<int> peers_throw_;  // slots in whose backward some rank throws
  std::vector<torch::Tensor> kept_;
  struct Held {
    torch::Tensor tensor;
    torch::Tensor value;
    bool is_grad;  // it is still a .grad
  };
  std::vector<Held> held_;
  size_t now_ = 0;
  std::string difference_;
};

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n')).substr(0, 300);
}

Outcome outcome_of(const std::string& error, const std::string& place) {
  for (const auto& refusal : kRefusals) {
    if (error.find(refusal.error) == std::string::npos) continue;
    return {Verdict::refused, std::string(refusal.error),
            refusal.leaves_ranks_in_step};
  }
  return {Verdict::failed, "threw in " + place + ": " + first_line(error),
          false};
}

}  // namespace

Outcome run_on_rank(const Case& drawn) {
  auto fuzz_case = drawn;
  // Without shared memory, peers would wait until their deadline for the rank
  // that throws.
  if (default_group()->backend_config().find("lockstep") == std::string::npos) {
    for (auto& event : fuzz_case.events) event.throws_on_rank_zero_only = false;
  }
  std::string place = "the constructor";
  std::unique_ptr<RankRun> run;
  try {
    run = std::make_unique<RankRun>(fuzz_case);
    run->run();
    Outcome outcome;
    if (!run->difference().empty()) {
      outcome = {Verdict::failed, run->difference(), true};
    }
    place = "the end";
    run.reset();
    return outcome;
  } catch (const c10::Error& error) {
    if (run) place = run->place();
    return outcome_of(error.what_without_backtrace(), place);
  } catch (const std::exception& error) {
    if (run) place = run->place();
    return outcome_of(error.what(), place);
  }
}

}  // namespace lockstep::internal::fuzz
