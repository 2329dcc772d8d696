// checkpoint() in one process: values, gradients and what is refused, beside
// the same function without checkpointing.

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal {

// A result of a type of the user's.
struct TwoOutputs {
  torch::Tensor main;
  std::vector<torch::Tensor> others;
  std::string note;
};

}  // namespace lockstep::internal

template <>
struct lockstep::ForwardResult<lockstep::internal::TwoOutputs> {
  template <typename Visit>
  static void visit(lockstep::internal::TwoOutputs& output,
                    const Visit& visit_part) {
    visit_part(output.main);
    visit_part(output.others);
  }
};

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::ThrowsMessage;
using torch::Tensor;

enum class Form { none, saved };

// Calls the function with or without checkpointing.
template <typename Function, typename... Args>
auto call_in(Form form, Function&& function, Args&&... args) {
  if (form == Form::none) {
    std::decay_t<Function> own(function);
    return call_forward(own, std::forward<Args>(args)...);
  }
  return checkpoint(std::forward<Function>(function),
                    std::forward<Args>(args)...);
}

Tensor some_input(bool requires_grad = true) {
  return torch::linspace(-1, 1, 12, torch::kDouble)
      .view({3, 4})
      .requires_grad_(requires_grad);
}

void expect_equal(const std::vector<Tensor>& have,
                  const std::vector<Tensor>& want) {
  ASSERT_EQ(have.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(have[i].defined(), want[i].defined()) << i;
    if (!want[i].defined()) continue;
    EXPECT_TRUE(torch::equal(have[i], want[i])) << i;
  }
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double dropout = 0) : rate(dropout) {
    inner = register_module("inner", torch::nn::Linear(4, 8));
    outer = register_module("outer", torch::nn::Linear(8, 4));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    ++calls;
    auto hidden = torch::dropout(inner(x).tanh(), rate, is_training());
    return x + outer(hidden);
  }
  double rate;
  int calls = 0;
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};
TORCH_MODULE(Block);

struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(double dropout = 0) {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block(dropout));
    register_module("blocks", blocks);
  }
  Tensor forward(Tensor x, Form form) {
    for (size_t i = 0; i < blocks->size(); ++i) {
      x = call_in(form, blocks->ptr<BlockImpl>(i), x);
    }
    return x;
  }
  std::vector<int> calls() const {
    std::vector<int> all;
    for (size_t i = 0; i < blocks->size(); ++i) {
      all.push_back(blocks->at<BlockImpl>(i).calls);
    }
    return all;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Blocks);

// Returns loss, gradient of the input, and gradients of the parameters.
std::vector<Tensor> step(Blocks& net, Form form) {
  net->zero_grad();
  auto x = some_input();
  auto loss = net->forward(x, form).square().sum();
  loss.backward();
  std::vector<Tensor> all{loss.detach(), x.grad()};
  for (const auto& parameter : net->parameters()) {
    all.push_back(parameter.grad().clone());
  }
  return all;
}

TEST(Checkpointing, GradientsAreThoseWithoutIt) {
  torch::manual_seed(3);
  Blocks net;
  const auto want = step(net, Form::none);
  for (int i = 0; i < 2; ++i) expect_equal(step(net, Form::saved), want);
}

TEST(Checkpointing, EachCallIsRecomputedOnce) {
  torch::manual_seed(3);
  Blocks net;
  step(net, Form::saved);
  EXPECT_EQ(net->calls(), std::vector<int>({2, 2, 2}));
}

TEST(Checkpointing, WorksWhileAnomaliesAreDetected) {
  torch::manual_seed(3);
  Blocks net;
  const auto want = step(net, Form::none);
  const torch::autograd::DetectAnomalyGuard detect;
  expect_equal(step(net, Form::saved), want);
}

TEST(Checkpointing, HooksOfParametersAreCalledOnce) {
  torch::manual_seed(3);
  Blocks net;
  std::map<std::string, int> counts;
  for (const auto& item : net->named_parameters()) {
    item.value().register_hook(
        [&count = counts[item.key()]](const Tensor& gradient) {
          ++count;
          return gradient;
        });
  }
  step(net, Form::saved);
  EXPECT_EQ(counts.size(), 12);
  for (const auto& [name, count] : counts) EXPECT_EQ(count, 1) << name;
}

TEST(Checkpointing, DropoutDropsTheSameElements) {
  torch::manual_seed(3);
  Blocks net(0.5);
  torch::manual_seed(11);
  const auto want = step(net, Form::none);
  const auto next = torch::rand({4});
  torch::manual_seed(11);
  expect_equal(step(net, Form::saved), want);
  // Backward has left the generator as it was.
  EXPECT_TRUE(torch::equal(torch::rand({4}), next));
}

TEST(Checkpointing, WithoutPreservedGeneratorsTheMasksDiffer) {
  std::vector<Tensor> masks;
  const auto drop = [&](const Tensor& x) {
    masks.push_back(torch::bernoulli(torch::full({64}, 0.5)));
    return (x * masks.back()).tanh();
  };
  auto x = torch::ones({64}, torch::requires_grad());
  checkpoint({.preserve_rng_state = false}, drop, x).sum().backward();
  ASSERT_EQ(masks.size(), 2);
  EXPECT_FALSE(torch::equal(masks[0], masks[1]));
}

TEST(Checkpointing, AutocastIsRestored) {
  torch::manual_seed(3);
  torch::nn::Linear layer(4, 4);
  std::vector<at::ScalarType> dtypes;
  const auto function = [&](const Tensor& x) {
    auto y = layer(x);
    dtypes.push_back(y.scalar_type());
    return y.tanh();
  };
  auto run = [&](Form now) {
    layer->zero_grad();
    auto x = torch::linspace(-1, 1, 8).view({2, 4}).requires_grad_();
    Tensor y;
    {
      const Autocast mixed(at::kCPU, at::kBFloat16);
      y = call_in(now, function, x);
    }
    y.sum().backward();
    return std::vector<Tensor>{y.detach(), x.grad(), layer->weight.grad()};
  };
  const auto want = run(Form::none);
  expect_equal(run(Form::saved), want);
  ASSERT_EQ(dtypes.size(), 3);
  EXPECT_EQ(dtypes[1], at::kBFloat16);
  EXPECT_EQ(dtypes[2], at::kBFloat16);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Checkpointing, TensorsAreFoundInArgumentsAndResult) {
  torch::manual_seed(3);
  const auto function =
      [](const std::vector<Tensor>& pair, int power, const std::string& note,
         const std::optional<Tensor>& bias, const Tensor& none) {
        EXPECT_FALSE(none.defined());
        auto main = (pair[0] * pair[1]).pow(power).tanh();
        if (bias) main = main + bias->exp();
        return TwoOutputs{main, {pair[0].sin(), Tensor(), pair[1].cos()}, note};
      };
  auto run = [&](Form now) {
    auto a = some_input();
    auto b = (some_input(false) + 0.5).requires_grad_();
    auto bias = some_input();
    auto out = call_in(now, function, std::vector<Tensor>{a * 1, b}, 2, "note",
                       std::optional<Tensor>(bias), Tensor());
    EXPECT_EQ(out.note, "note");
    EXPECT_FALSE(out.others[1].defined());
    (out.main + out.others[0] * out.others[2]).sum().backward();
    return std::vector<Tensor>{a.grad(), b.grad(), bias.grad()};
  };
  const auto want = run(Form::none);
  expect_equal(run(Form::saved), want);
}

// A result of this type is not searched for tensors.
struct Unknown {
  Tensor value;
};

TEST(Checkpointing, AnyTypeMayBeReturned) {
  auto function = [](const Tensor& x, const Unknown& other) {
    return Unknown{(x * other.value).tanh()};
  };
  auto x = some_input();
  checkpoint(function, x, Unknown{x}).value.sum().backward();
  auto y = some_input();
  (y * y).tanh().sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), y.grad()));
}

TEST(Checkpointing, HoldersPointersAndSequentialAreCalled) {
  torch::manual_seed(3);
  Block block;
  torch::nn::Sequential sequential(torch::nn::Linear(4, 4), torch::nn::Tanh());
  sequential->to(torch::kDouble);
  auto run = [&](Form now) {
    auto x = some_input();
    auto y = call_in(now, block, x);
    y = call_in(now, std::as_const(block), y);
    y = call_in(now, block.ptr(), y);
    y = call_in(now, sequential, y);
    y.sum().backward();
    return std::vector<Tensor>{x.grad()};
  };
  const auto want = run(Form::none);
  expect_equal(run(Form::saved), want);
}

TEST(Checkpointing, WithoutGradModeItIsAPlainCall) {
  torch::manual_seed(3);
  const at::NoGradGuard no_grad;
  const Block block;
  auto y = call_in(Form::saved, block, some_input());
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(block->calls, 1);
}

TEST(Checkpointing, SecondBackwardRecomputesForItself) {
  torch::manual_seed(3);
  Blocks net;
  auto x = some_input();
  auto y = net->forward(x, Form::saved).square().sum();
  y.backward({}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  y.backward();
  EXPECT_TRUE(torch::equal(x.grad(), once + once));
  EXPECT_EQ(net->calls(), std::vector<int>({3, 3, 3}));
  EXPECT_THAT(message_of([&] { y.backward(); }), HasSubstr("second time"));
}

TEST(Checkpointing, SecondDerivatives) {
  Blocks net;
  auto run = [&](Form form) {
    net->zero_grad();
    auto x = some_input();
    auto y = net->forward(x, form).square().sum();
    auto first = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true,
                                       /*create_graph=*/true)[0];
    (y + first.square().sum()).backward();
    std::vector<Tensor> all{first.detach(), x.grad()};
    for (const auto& parameter : net->parameters()) {
      all.push_back(parameter.grad().clone());
    }
    return all;
  };
  const auto want = run(Form::none);
  expect_equal(run(Form::saved), want);
}

TEST(Checkpointing, RegionsNest) {
  Blocks net(0.25);
  auto run = [&](Form form) {
    net->zero_grad();
    torch::manual_seed(5);
    auto x = some_input();
    auto y = call_in(
        form, [&](const Tensor& t) { return net->forward(t, form); }, x);
    y.square().sum().backward();
    std::vector<Tensor> all{y.detach(), x.grad()};
    for (const auto& parameter : net->parameters()) {
      all.push_back(parameter.grad().clone());
    }
    return all;
  };
  const auto want = run(Form::none);
  expect_equal(run(Form::saved), want);
  // The plain run, forward, the outer recomputation and the inner one. The
  // outer one stops when it has saved the input of the last block.
  EXPECT_EQ(net->calls(), std::vector<int>({4, 4, 3}));
}

TEST(Checkpointing, PartOfTheResultsMayBeUsed) {
  torch::manual_seed(3);
  auto x = some_input();
  auto [a, b] = call_in(
      Form::saved, [](const Tensor& t) { return std::tuple(t.sin(), t.exp()); },
      x);
  a.sum().backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(torch::equal(x.grad(), some_input(false).cos()));
  x.mutable_grad() = Tensor();
  b.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), some_input(false).exp()));
}

// Tensors that a backward pass has recomputed and did not need stayed in memory
// for as long as the graph.
TEST(Checkpointing, WhatABackwardDoesNotNeedIsDroppedAtItsEnd) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made;
  auto x = some_input();
  auto [a, b] = checkpoint(
      [&](const Tensor& t) {
        auto exponential = t.exp();
        made.emplace_back(
            c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(
                exponential.storage().unsafeGetStorageImpl()));
        return std::tuple(exponential.square(), t.sin());
      },
      x);
  b.sum().backward({}, /*retain_graph=*/true);
  ASSERT_EQ(made.size(), 2);
  EXPECT_TRUE(made[0].expired());
  EXPECT_TRUE(made[1].expired());
  a.sum().backward();
  EXPECT_EQ(made.size(), 3);
}

TEST(Checkpointing, TheFunctionIsFreedWithTheGraph) {
  torch::manual_seed(3);
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> weak = token;
  auto function = [token = std::move(token)](const Tensor& x) {
    return x.exp().sin();
  };
  auto x = some_input();
  auto unused = call_in(Form::saved, std::move(function), x);
  EXPECT_FALSE(weak.expired());
  unused = Tensor();
  EXPECT_TRUE(weak.expired());
}

TEST(Checkpointing, InPlaceOperationsAndViewsInTheFunction) {
  torch::manual_seed(3);
  const auto function = [](const Tensor& x) {
    auto y = (x * 2).view({4, 3});
    y.select(0, 1).mul_(3);
    auto z = y.t().exp() - 1;
    return torch::relu_(z).narrow(0, 1, 2).contiguous();
  };
  auto run = [&](Form now) {
    auto x = some_input();
    auto y = call_in(now, function, x);
    y.square().sum().backward();
    return std::vector<Tensor>{y.detach(), x.grad()};
  };
  const auto want = run(Form::none);
  expect_equal(run(Form::saved), want);
}

TEST(Checkpointing, AnInputChangedInPlaceIsNamed) {
  torch::manual_seed(3);
  auto x = some_input();
  auto counter = torch::zeros({1});
  EXPECT_THAT(
      message_of([&] {
        call_in(
            Form::saved,
            [](const Tensor& t, Tensor& count) {
              count.add_(1);
              return t.exp();
            },
            x, counter);
      }),
      AllOf(HasSubstr("tensor 2 of its arguments"), HasSubstr("in place")));
}

// LibTorch does not compare the versions of tensors that hooks give.
TEST(Checkpointing, ASavedTensorChangedInPlaceIsNamed) {
  auto x = some_input();
  auto y = checkpoint(
      [](const Tensor& t) {
        auto exponential = t.exp();
        auto sine = exponential.sin();
        exponential.detach().zero_();
        return sine.tanh().sum();
      },
      x);
  EXPECT_THAT([&] { y.backward(); }, ThrowsMessage<CheckpointError>(
                                         AllOf(HasSubstr("tensor 2 of the 3"),
                                               HasSubstr("changed in place"))));
}

TEST(Checkpointing, InputsChangedAfterwardsAreNamed) {
  torch::manual_seed(3);
  auto x = some_input();
  auto data = torch::ones({3, 4}, torch::kDouble);
  auto y = call_in(
      Form::saved,
      [](const Tensor& t, const Tensor& d) { return (t * d).exp(); }, x, data);
  data.add_(1);
  EXPECT_THAT(message_of([&] { y.sum().backward(); }),
              HasSubstr("modified by an inplace operation"));
}

TEST(Checkpointing, ParametersGetGradientsIfNoInputNeedsOne) {
  Block block;
  auto y = checkpoint(block, some_input(false));
  y.sum().backward();
  ASSERT_TRUE(block->inner->weight.grad().defined());
}

// The number of the call decides what is computed.
Tensor changing(int call, const std::string& what, const Tensor& x) {
  if (what == "fewer" && call == 1) return x.exp();
  if (what == "shape" && call == 1) return x.exp().narrow(0, 0, 2).sin();
  if (what == "dtype" && call == 1) return x.to(torch::kFloat).exp().sin();
  if (what == "more" && call == 1) return x.exp().sin().cos();
  return x.exp().sin();
}

TEST(Checkpointing, ADifferentRecomputationIsNamed) {
  for (const auto& [what, text] : std::map<std::string, std::string>{
           {"fewer", "saved 2 tensors in forward and only 1"},
           {"shape",
            "tensor 2 of the 2 that autograd saves in it was "
            "Double[3, 4] on cpu and is now Double[2, 4] on cpu"},
           {"dtype", "tensor 1 of the 2"},
           {"more", "saved 2 tensors in forward and more"}}) {
    int call = 0;
    auto x = some_input();
    auto y = checkpoint(
        {.early_stop = what != "more"},
        [&, &what = what](const Tensor& t) {
          return changing(call++, what, t);
        },
        x);
    EXPECT_THAT([&] { y.sum().backward(); },
                ThrowsMessage<CheckpointError>(HasSubstr(text)))
        << what;
  }
}

TEST(Checkpointing, WithoutTheCheckOtherShapesAreTaken) {
  int call = 0;
  auto x = some_input();
  auto y = checkpoint(
      {.determinism_check = DeterminismCheck::none},
      [&](const Tensor& t) {
        // The recomputed tensor is a part that broadcasts.
        return (call++ == 0 ? t.exp() : t.exp().narrow(0, 0, 1)) * t;
      },
      x);
  y.sum().backward();
  EXPECT_EQ(call, 2);
}

TEST(Checkpointing, BackwardInAnotherThread) {
  torch::manual_seed(3);
  Blocks net(0.5);
  torch::manual_seed(2);
  const auto want = step(net, Form::none);
  torch::manual_seed(2);
  net->zero_grad();
  auto x = some_input();
  auto loss = net->forward(x, Form::saved).square().sum();
  std::thread([&] { loss.backward(); }).join();
  EXPECT_TRUE(torch::equal(x.grad(), want[1]));
}

TEST(Checkpointing, SeveralThreadsTrainTheirOwnModels) {
  torch::manual_seed(3);
  Blocks net;
  const auto want = step(net, Form::none);
  const auto parameters = net->parameters();
  std::vector<std::vector<Tensor>> have(4);
  std::vector<std::thread> threads;
  for (auto& mine : have) {
    threads.emplace_back([&] {
      Blocks own;
      {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < parameters.size(); ++i) {
          own->parameters()[i].copy_(parameters[i]);
        }
      }
      for (int i = 0; i < 5; ++i) mine = step(own, Form::saved);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& mine : have) expect_equal(mine, want);
}

TEST(Checkpointing, SeveralThreadsGoBackThroughOneRegion) {
  auto x = some_input();
  int calls = 0;
  auto y = checkpoint(
      [&](const Tensor& t) {
        ++calls;
        return t.exp().sin().sum();
      },
      x);
  std::vector<Tensor> gradients(4);
  std::vector<std::thread> threads;
  for (auto& gradient : gradients) {
    threads.emplace_back([&] {
      gradient = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0];
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(calls, 5);
  auto plain = some_input();
  plain.exp().sin().sum().backward();
  for (const auto& gradient : gradients) {
    EXPECT_TRUE(torch::equal(gradient, plain.grad()));
  }
}

// The function takes a derivative itself: of forward's graph in forward, of the
// recomputed one in the recomputation.
TEST(Checkpointing, TheFunctionMayTakeDerivatives) {
  for (bool early_stop : {true, false}) {
    const auto function = [](const Tensor& x) {
      auto y = x.exp().sin();
      auto slope = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
      return y * slope.square();
    };
    auto x = some_input();
    auto y = checkpoint({.early_stop = early_stop}, function, x);
    auto plain = some_input();
    auto want = function(plain);
    EXPECT_TRUE(torch::equal(y, want));
    y.sum().backward();
    want.sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), plain.grad()));
  }
}

TEST(Checkpointing, EarlyStopEndsTheFunctionWhenAllIsThere) {
  for (bool early_stop : {true, false}) {
    int ends = 0;
    auto x = some_input();
    auto y = checkpoint(
        {.early_stop = early_stop},
        [&](const Tensor& t) {
          auto result = t.exp().sum();
          ++ends;
          return result;
        },
        x);
    y.backward();
    EXPECT_EQ(ends, early_stop ? 1 : 2);
  }
}

TEST(Checkpointing, AFunctionThatCatchesEverythingMayBeStopped) {
  auto x = some_input();
  auto y = checkpoint(
      [](const Tensor& t) {
        Tensor result = t;
        try {
          result = t.exp();
        } catch (...) {
        }
        return result.sin();
      },
      x);
  auto want = some_input();
  want.exp().sin().sum().backward();
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), want.grad()));
}

// Asks twice for what it has saved.
struct AsksTwice : torch::autograd::Function<AsksTwice> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x) {
    context->save_for_backward({x * 1});
    return x * 2;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    auto once = context->get_saved_variables()[0];
    auto twice = context->get_saved_variables()[0];
    EXPECT_TRUE(torch::equal(once, twice));
    return {gradients[0] * 2};
  }
};

TEST(Checkpointing, ASavedTensorMayBeAskedForTwice) {
  auto x = some_input();
  checkpoint([](const Tensor& t) { return AsksTwice::apply(t.exp()); }, x)
      .sum()
      .backward();
  EXPECT_TRUE(torch::equal(x.grad(), 2 * some_input(false).exp()));
}

TEST(Checkpointing, ErrorsOfTheFunctionPass) {
  struct Own : std::exception {};
  torch::manual_seed(3);
  auto x = some_input();
  const auto fails = [](const Tensor& t) -> Tensor {
    auto y = t.exp();
    if (y.defined()) throw Own();
    return y;
  };
  EXPECT_THROW(call_in(Form::saved, fails, x), Own);
  // The region has ended: what is saved now is kept.
  int call = 0;
  auto y = call_in(
      Form::saved,
      [&](const Tensor& t) {
        auto result = t.exp().sin();
        if (call++ == 1) throw Own();
        return result;
      },
      x.exp());
  y.sum().backward();  // early_stop: the exception is not reached
  EXPECT_TRUE(x.grad().defined());
}

// As in Python: the documentation says so.
TEST(Checkpointing, RunningStatisticsAreUpdatedTwice) {
  torch::manual_seed(3);
  torch::nn::BatchNorm1d norm(4);
  norm->to(torch::kDouble);
  auto x = some_input();
  call_in(
      Form::saved, [&](const Tensor& t) { return norm(t).tanh(); }, x)
      .sum()
      .backward();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

TEST(Checkpointing, SequentialInSegments) {
  torch::manual_seed(1);
  torch::nn::Sequential net;
  for (int i = 0; i < 7; ++i) net->push_back(Block());
  auto run = [&](int64_t segments) {
    net->zero_grad();
    auto x = some_input();
    auto y = segments == 0 ? net->forward(x)
                           : checkpoint_sequential(net, segments, x);
    y.square().sum().backward();
    std::vector<Tensor> all{y.detach(), x.grad()};
    for (const auto& parameter : net->parameters()) {
      all.push_back(parameter.grad().clone());
    }
    return all;
  };
  const auto want = run(0);
  for (int64_t segments : {1, 2, 3, 7}) expect_equal(run(segments), want);
  net->at<BlockImpl>(0).calls = net->at<BlockImpl>(3).calls =
      net->at<BlockImpl>(6).calls = 0;
  run(2);  // 3 modules, then 4 that are not checkpointed
  EXPECT_EQ(net->at<BlockImpl>(0).calls, 2);
  EXPECT_EQ(net->at<BlockImpl>(3).calls, 1);
  EXPECT_EQ(net->at<BlockImpl>(6).calls, 1);
  EXPECT_THAT(message_of([&] { checkpoint_sequential(net, 8, some_input()); }),
              HasSubstr("segments is 8; it must be from 1 to 7"));
}

// An engine that somebody else installs, as Python does when it is imported.
class OtherEngine final : public torch::autograd::Engine {
 public:
  int asked = 0;
  int executed = 0;
  torch::autograd::variable_list execute(
      const torch::autograd::edge_list& roots,
      const torch::autograd::variable_list& inputs, bool keep_graph,
      bool create_graph, bool accumulate_grad,
      const torch::autograd::edge_list& outputs) override {
    ++executed;
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph,
                                     accumulate_grad, outputs);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks>
  get_default_saved_variable_hooks() override {
    ++asked;
    return nullptr;
  }
};
OtherEngine& other_engine() {
  static OtherEngine engine;
  return engine;
}

TEST(Checkpointing, AnEngineThatComesLaterIsPassedOnTo) {
  Blocks net;
  const auto want = step(net, Form::saved);
  torch::autograd::set_default_engine_stub(
      []() -> torch::autograd::Engine& { return other_engine(); });
  expect_equal(step(net, Form::saved), want);
  EXPECT_EQ(net->calls(), std::vector<int>({4, 4, 4}));
  EXPECT_EQ(other_engine().executed, 1);
  const int asked = other_engine().asked;
  EXPECT_GT(asked, 0);  // square() of the loss, outside of the regions
  expect_equal(step(net, Form::none), want);
  EXPECT_GT(other_engine().asked, asked);
  EXPECT_EQ(other_engine().executed, 2);
}

}  // namespace
}  // namespace lockstep::internal
