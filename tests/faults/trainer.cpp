// One rank of a training in which ranks are killed, stopped or fail:
// `faults_trainer SCENARIO BACKEND [NAME=N]`, with the environment of a rank.
// It trains six parameters w0 ... w5 for `steps` (6), each in a bucket of its
// own from the second step on; their gradients become ready in the order w5 ...
// w0. Every step compares gradients and parameters with their exact values.
//
// It prints the lines of faults_rank (rank.cpp), and stays like that program;
// `failed` has the place before the text, as in "failed 0 backward 3: TEXT". It
// also prints
//
//   harm R            it now does what its scenario says
//   caught R TEXT     a failure after which it continues to train
//
// Scenarios, by what the rank `odd` does in step 3:
//
//   plain         nothing
//   kill_first    is killed before its first forward
//   kill_rebuild  ... before its second one, in which the buckets are made
//   kill          ... in backward, when w5, w4 and w3 are published
//   kill_update   ... between backward and the optimizer's step
//   kill_step     ... in the optimizer's step
//   stop          stops itself in backward, where `kill` is killed
//   leave         has no more inputs and destroys its group
//   barrier       has no more inputs and waits in barrier()
//   joined        has no more inputs, but all ranks train under join()
//   unused        leaves w2 out of its loss
//   all_unused    every rank leaves out a different one: they give up the step
//   nan           has NaN in its gradient of w4: the step is given up
//   drift         adds 1 to its w4 after the step
//   skip_step     looks at its gradients; from then on all ranks leave out the
//                 optimizer's steps and zero theirs at once
//
// More arguments: `timeout` in ms (30,000); `elements` of a parameter (1,000);
// `zero`, for a sharded optimizer with shared parameters; `in_place`, to zero
// gradients instead of dropping them; `late`, ms that `odd` comes late with its
// gradients in step 3; `spoil`, for NaN as in `nan` in any scenario;
// `check_nan` and `check_replicas`, for the options of DistributedDataParallel;
// `leave`, to destroy the group after a failure; `end`, to end instead of
// staying, without `leave` at once.

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/faults/rank_report.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kParameters = 6;
constexpr int kHarmStep = 3;
constexpr double kLearningRate = 0.5;
const int rank = own_rank();

// The place in the training, which is printed with a failure.
std::string place;

void harm(int signal) {
  say("harm");
  ::raise(signal);
}

void stay() { std::this_thread::sleep_for(seconds(60)); }

// The moment after w3's gradient and before w2's.
constexpr int kAmid = 2;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t elements) {
    for (int i = 0; i < kParameters; ++i) {
      weights[i] =
          register_parameter("w" + std::to_string(i), torch::zeros({elements}));
    }
  }
  // The gradient of each weight is `input`, multiplied by `spoilt` for w4.
  // Backward calls `before[i]` before the gradient of w_i is ready.
  torch::Tensor forward(double input) {
    auto loss = torch::zeros({1});
    for (int i = 0; i < kParameters; ++i) {
      if (i == left_out) continue;
      auto part = weights[i] * (i == 4 ? input * spoilt : input);
      if (before[i]) {
        part.register_hook([call = before[i]](const at::Tensor&) { call(); });
      }
      loss = loss + part.sum();
    }
    return loss;
  }
  std::array<torch::Tensor, kParameters> weights;
  std::array<std::function<void()>, kParameters> before{};
  double spoilt = 1;
  int left_out = -1;
};
TORCH_MODULE(Net);

struct KilledSgd : torch::optim::SGD {
  using Options = torch::optim::SGDOptions;
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    if (ending) harm(SIGKILL);
    return SGD::step(std::move(closure));
  }
  static inline bool ending = false;
};

class Training {
 public:
  Training(std::string scenario, const Arguments& given)
      : scenario_(std::move(scenario)),
        given_(given),
        odd_(rank == given.get("odd", -1)),
        net_(given.get("elements", 1000)),
        model_(net_, options(given)) {
    if (given.get("zero")) {
      sharded_ = std::make_unique<Sharded>(
          model_, KilledSgd::Options(kLearningRate),
          ZeroRedundancyOptions{.shared_parameters = true});
    } else {
      plain_ = std::make_unique<KilledSgd>(net_->parameters(),
                                           KilledSgd::Options(kLearningRate));
    }
  }

  void run() {
    if (odd_ && scenario_ == "kill_first") harm(SIGKILL);
    if (scenario_ == "joined") {
      join({&model_.joinable()}, [&] { train(); });
      place = "after join";
      compare_weights();
    } else {
      train();
    }
  }

 private:
  using Sharded = ZeroRedundancyOptimizer<KilledSgd>;

  static DistributedDataParallelOptions options(const Arguments& given) {
    const double bytes = 4.0 * given.get("elements", 1000);
    return {.bucket_cap_mb = bytes / (1 << 20),
            .check_for_nan_in_grad = given.get("check_nan") != 0,
            .check_replicas_every = given.get("check_replicas")};
  }

  void train() {
    for (step_ = 0; step_ < given_.get("steps", 6); ++step_) {
      const bool harmed = step_ == kHarmStep;
      if (odd_ && step_ == 1 && scenario_ == "kill_rebuild") harm(SIGKILL);
      if (odd_ && harmed && has_no_more()) return;
      prepare(harmed);
      at_place("forward");
      auto loss = model_(input_of(rank));
      at_place("backward");
      if (harmed && gives_up()) {
        try {
          loss.backward();
        } catch (const std::runtime_error& error) {
          say("caught", one_line(error));
          zero_grad();
          continue;
        }
        throw std::logic_error("nothing was noticed");
      }
      loss.backward();
      if (step_ >= kHarmStep && scenario_ == "skip_step") {
        if (odd_) compare_gradients();
        zero_grad();
        continue;
      }
      compare_gradients();
      if (odd_ && harmed && scenario_ == "kill_update") harm(SIGKILL);
      at_place("step");
      KilledSgd::ending = odd_ && harmed && scenario_ == "kill_step";
      if (sharded_) {
        sharded_->step();
      } else {
        plain_->step();
      }
      expected_weight_ -= kLearningRate * expected_gradient();
      if (harmed && scenario_ == "drift") {
        at::NoGradGuard no_grad;
        if (odd_) net_->weights[4] += 1;
      } else if (!harmed || scenario_ != "kill_step") {
        // In kill_step the comparison is left to the next forward.
        compare_weights();
      }
      zero_grad();
    }
  }

  bool has_no_more() {
    if (scenario_ == "joined") {
      for (; step_ < given_.get("steps", 6); ++step_) {
        expected_weight_ -= kLearningRate * expected_gradient();
      }
      return true;
    }
    if (scenario_ == "barrier") {
      place = "barrier";
      say("harm");
      barrier();
    }
    return scenario_ == "leave";
  }

  void prepare(bool harmed) {
    net_->before = {};
    net_->left_out = -1;
    net_->spoilt = 1;
    if (!harmed) return;
    if (scenario_ == "all_unused") net_->left_out = rank;
    if (!odd_) return;
    if (scenario_ == "unused") net_->left_out = kAmid;
    if (scenario_ == "nan" || given_.get("spoil")) {
      net_->spoilt = std::numeric_limits<double>::quiet_NaN();
    }
    if (scenario_ == "kill") net_->before[kAmid] = [] { harm(SIGKILL); };
    if (scenario_ == "stop") net_->before[kAmid] = [] { harm(SIGSTOP); };
    if (const int late = given_.get("late")) {
      net_->before[kParameters - 1] = [late] {
        std::this_thread::sleep_for(milliseconds(late));
      };
    }
  }
  bool gives_up() const {
    return scenario_ == "all_unused" || scenario_ == "nan";
  }

  void zero_grad() {
    const bool drop = given_.get("in_place") == 0;
    if (sharded_) {
      sharded_->zero_grad(drop);
    } else {
      plain_->zero_grad(drop);
    }
  }

  void at_place(const char* what) {
    place = what + (" " + std::to_string(step_));
  }

  // The inputs are multiples of the group's size, so their averages are
  // integers.
  double input_of(int of) const {
    return get_world_size() * (of + 1.0 + step_);
  }
  double expected_gradient() const {
    double sum = 0;
    for (int of = 0; of < get_world_size(); ++of) {
      const bool there = scenario_ != "joined" || step_ < kHarmStep ||
                         of != given_.get("odd", -1);
      if (there) sum += of + 1.0 + step_;
    }
    return sum;
  }

  void compare_gradients() {
    if (sharded_) {
      for (const auto& shard : sharded_->gradient_shards()) {
        compare("a shard", shard, expected_gradient());
      }
      return;
    }
    for (const auto& weight : net_->weights) {
      compare("a gradient", weight.grad(), expected_gradient());
    }
  }
  void compare_weights() const {
    if (sharded_) sharded_->synchronize();
    for (const auto& weight : net_->weights) {
      compare("a parameter", weight.detach(), expected_weight_);
    }
  }
  void compare(const char* what, const at::Tensor& tensor,
               double expected) const {
    const auto wrong = tensor.ne(expected);
    if (!wrong.any().item<bool>()) return;
    throw std::logic_error(
        std::string(what) + " has the value " +
        std::to_string(tensor.index({wrong})[0].item<double>()) +
        " instead of " + std::to_string(expected));
  }

  const std::string scenario_;
  const Arguments given_;
  const bool odd_;
  Net net_;
  DistributedDataParallel<Net> model_;
  std::unique_ptr<KilledSgd> plain_{};
  std::unique_ptr<Sharded> sharded_{};
  int step_ = 0;
  double expected_weight_ = 0;
};

// Returns whether all went well. A failure leaves through the group's guard, as
// it does in a program that does not catch it.
bool train_in_group(const std::string& scenario, const std::string& backend,
                    const Arguments& given) {
  const auto group = init_process_group(
      backend, {.timeout = milliseconds(given.get("timeout", 30'000))});
  const bool leaves = given.get("leave") != 0;
  try {
    place = "wrapper";
    Training(scenario, given).run();
    say("done");
    const bool left_early = scenario == "leave" && rank == given.get("odd", -1);
    if (!left_early && !leaves && !given.get("end")) stay();
    return true;
  } catch (const std::exception& error) {
    say("failed", place + ": " + one_line(error));
    // Does not destroy the group, which would take long if a peer is dead.
    if (!leaves && given.get("end")) std::_Exit(1);
    if (!leaves) stay();
    throw;
  }
}

}  // namespace

int run(const std::string& scenario, const std::string& backend,
        const Arguments& given) {
  bool right = false;
  try {
    right = train_in_group(scenario, backend, given);
  } catch (const std::exception&) {  // printed already
  }
  say("left");
  // The ranks that fail because this one left must find that it did. With rank
  // 0 the store ends, and then only a living process shows it.
  const bool left_early = scenario == "leave" && rank == given.get("odd", -1);
  if (left_early || !given.get("end")) stay();
  return right ? 0 : 1;
}

}  // namespace lockstep::internal::testing
