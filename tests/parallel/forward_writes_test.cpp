// Tests what a forward writes: into its reference arguments, into its inputs,
// into its parameters; and what the caller writes into its result. Each wrapper
// does what one process does, or refuses it by name.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::World;

struct WritesImpl : torch::nn::Module {
  WritesImpl() {
    torch::manual_seed(6);
    first = register_module("first", torch::nn::Linear(4, 4));
    second = register_module("second", torch::nn::Linear(4, 4));
    to(torch::kDouble);
  }
  at::Tensor next(const at::Tensor& x, const at::Tensor& state) {
    return first(x + (state.defined() ? state : torch::zeros_like(x))).tanh();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

// Each case has a forward that writes, and a loss over several calls of it.
struct WritesATensor : WritesImpl {
  at::Tensor forward(const at::Tensor& x, at::Tensor& state) {
    state = next(x, state);
    return second(state);
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    at::Tensor state;
    auto sum = call(x, state).pow(2).sum();
    for (int step = 0; step < 2; ++step) sum = sum + call(x, state).sum();
    return sum + state.pow(2).sum();
  }
};
struct WritesAnOptional : WritesImpl {
  at::Tensor forward(const at::Tensor& x, std::optional<at::Tensor>& state) {
    state = next(x, state.value_or(at::Tensor()));
    return second(*state);
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    std::optional<at::Tensor> state;
    auto sum = call(x, state).sum() + call(x, state).pow(2).sum();
    return sum + state->sum();
  }
};
struct WritesAVector : WritesImpl {
  at::Tensor forward(const at::Tensor& x, std::vector<at::Tensor>& losses) {
    auto h = next(x, {});
    losses.push_back(h.pow(2).mean());
    return second(h);
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    std::vector<at::Tensor> losses;
    auto sum = call(call(x, losses), losses).sum();
    EXPECT_EQ(losses.size(), 2);
    for (const auto& each : losses) sum = sum + each;
    return sum;
  }
};
struct WritesAnArray : WritesImpl {
  at::Tensor forward(const at::Tensor& x, std::array<at::Tensor, 2>& states) {
    states = {next(x, states[1]), states[0]};
    return second(states[0]);
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    std::array<at::Tensor, 2> states;
    auto sum = call(x, states).sum();
    for (int step = 0; step < 2; ++step) sum = sum + call(x, states).sum();
    return sum + states[0].sum() + states[1].pow(2).sum();
  }
};
struct WritesAPair : WritesImpl {
  void forward(at::Tensor x, std::pair<at::Tensor, at::Tensor>& out) {
    out.first = next(x, out.second);
    out.second = second(out.first);
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    std::pair<at::Tensor, at::Tensor> out;
    for (int step = 0; step < 3; ++step) call(x, out);
    return out.first.sum() + out.second.pow(2).sum();
  }
};
// A residual block, whose first layer works in place.
struct WritesItsInput : WritesImpl {
  at::Tensor forward(const at::Tensor& x) { return second(first(x.relu_())); }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    auto h = x * 3;
    auto y = call(h);
    return (h.pow(2) + y).sum();
  }
};
struct ReturnsAView : WritesImpl {
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    auto h = second(first(x).tanh());
    return {h.t(), (h + 1).unbind()};
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    auto [y, rows] = call(x);
    y.mul_(3);
    return y.pow(2).sum() + rows[0].sum();
  }
};
// The caller writes one of several results that share memory.
struct ReturnsOverlaps : WritesImpl {
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    auto h = second(first(x).tanh());
    auto hidden = (h + 1).tanh() * 2;
    return {h.t(), {h, hidden.narrow(0, 0, 2), hidden.narrow(0, 1, 2)}};
  }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    auto [y, rows] = call(x);
    y.mul_(3);
    rows[2].pow_(2);
    return y.sum() + rows[0].pow(2).sum() + rows[1].pow(3).sum();
  }
};
// Its result was computed before, by the plain module.
struct ReturnsItsMember : WritesImpl {
  void keep(const at::Tensor& x) { kept = second(first(x)).tanh() * 2; }
  at::Tensor forward(const at::Tensor& /*x*/) { return kept; }
  template <typename Call>
  static at::Tensor loss(const Call& call, const at::Tensor& x) {
    return call(x).mul_(3).sum();
  }
  at::Tensor kept;
};

template <typename Module, typename Call>
at::Tensor loss_of_rank(Module& module, const Call& call, int rank) {
  const auto x = torch::linspace(-1, 1, 12, torch::kDouble).reshape({3, 4});
  auto input = (x + 0.3 * rank).requires_grad_();
  if constexpr (requires { module.keep(input); }) module.keep(input);
  return Module::loss(call, input);
}

using Gradients = std::vector<at::Tensor>;
Gradients double_gradients(const torch::nn::Module& module) {
  Gradients gradients;
  for (const auto& parameter : module.parameters()) {
    gradients.push_back(parameter.grad().to(torch::kDouble));
  }
  return gradients;
}

// Returns the gradients of one process over the batches of the ranks.
template <typename Module>
Gradients plain_gradients(int ranks) {
  Module module;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto call = [&](auto&&... args) -> decltype(auto) {
      return module.forward(std::forward<decltype(args)>(args)...);
    };
    (loss_of_rank(module, call, rank) / ranks).backward();
  }
  return double_gradients(module);
}

void expect_near(const Gradients& gradients, const Gradients& expected,
                 double bound) {
  ASSERT_EQ(gradients.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LE((gradients[i] - expected[i]).abs().max().item<double>(), bound)
        << "parameter " << i;
  }
}

template <typename Module>
void expect_averages(const World& world,
                     const DistributedDataParallelOptions& options,
                     double bound) {
  const auto module = std::make_shared<Module>();
  DistributedDataParallel<Module> model(module, options);
  const auto call = [&](auto&&... args) -> decltype(auto) {
    return model->forward(std::forward<decltype(args)>(args)...);
  };
  const auto expected = plain_gradients<Module>(world.size);
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    loss_of_rank(*module, call, world.rank).backward();
    expect_near(double_gradients(*module), expected, bound);
  }
}

template <typename Module>
void expect_averages(const World& world) {
  SCOPED_TRACE(typeid(Module).name());
  expect_averages<Module>(world, {}, 1e-12);
  {
    SCOPED_TRACE("find_unused_parameters");
    expect_averages<Module>(world, {.find_unused_parameters = true}, 1e-12);
  }
}

// A tensor that forward put into a reference argument was announced late, and
// with mixed precision the argument was not cast, or an optional was refused. A
// view that the caller wrote gave other results of its memory new values and
// the old history, so gradients were wrong.
WORLD_TEST(ForwardWrites, ComesBackFromDistributedDataParallel, 1, 2, 3) {
  auto group = init_process_group();
  expect_averages<WritesATensor>(world);
  expect_averages<WritesAnOptional>(world);
  expect_averages<WritesAVector>(world);
  expect_averages<WritesAnArray>(world);
  expect_averages<WritesAPair>(world);
  expect_averages<WritesItsInput>(world);
  expect_averages<ReturnsAView>(world);
  expect_averages<ReturnsOverlaps>(world);
  expect_averages<ReturnsItsMember>(world);
}

// The modules compute in float32, which needs no kernels for 16 bits.
WORLD_TEST(ForwardWrites, ComesBackWithMixedPrecision, 1, 2) {
  auto group = init_process_group();
  const DistributedDataParallelOptions mixed{
      .static_graph = true,  // several forwards before one backward
      .mixed_precision = MixedPrecision{.param_dtype = torch::kFloat}};
  const auto one_backward = [&]<typename Module>(Module*) {
    SCOPED_TRACE(typeid(Module).name());
    expect_averages<Module>(world, mixed, 1e-5);
  };
  one_backward(static_cast<WritesATensor*>(nullptr));
  one_backward(static_cast<WritesAnOptional*>(nullptr));
  one_backward(static_cast<WritesAVector*>(nullptr));
  one_backward(static_cast<WritesAnArray*>(nullptr));
  one_backward(static_cast<WritesAPair*>(nullptr));
  one_backward(static_cast<WritesItsInput*>(nullptr));
  one_backward(static_cast<ReturnsAView*>(nullptr));
  one_backward(static_cast<ReturnsOverlaps*>(nullptr));
}

struct WritesAParameter : WritesImpl {
  at::Tensor forward(const at::Tensor& x) {
    {
      const torch::NoGradGuard no_grad;
      first->weight.mul_(x.mean());
    }
    return second(first(x));
  }
};
// Writes a parameter that backward does without.
struct WritesItsScale : WritesImpl {
  WritesItsScale() {
    scale = register_parameter("scale", torch::ones({}, torch::kDouble), false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = second(first(x) + scale.detach()).tanh();
    const torch::NoGradGuard no_grad;
    scale.add_(y.mean());
    return y;
  }
  at::Tensor scale;
};
struct Renormed : torch::nn::Module {
  Renormed() {
    table = register_module(
        "table",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).max_norm(0.1)));
  }
  at::Tensor forward(const at::Tensor& x) { return table(x); }
  torch::nn::Embedding table{nullptr};
};

// A bug: each rank wrote from its own data, and the ranks drifted apart; with
// mixed precision what was written was lost.
WORLD_TEST(ForwardWrites, AParameterIsRefusedByName, 1, 2) {
  auto group = init_process_group();
  for (const bool mixed : {false, true}) {
    DistributedDataParallelOptions options;
    if (mixed) {
      options.mixed_precision = MixedPrecision{.param_dtype = torch::kFloat};
    }
    DistributedDataParallel<WritesAParameter> model(
        std::make_shared<WritesAParameter>(), options);
    const auto refused =
        AllOf(HasSubstr("forward has written parameter 'first.weight'"),
              HasSubstr("after step()"));
    const auto x = torch::full({2, 4}, world.rank + 2, torch::kDouble);
    const auto train = [&] { model(x).sum().backward(); };
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      model(x);
    };
    if (mixed || world.size > 1) {
      EXPECT_THAT(message_of(train), refused);
      EXPECT_THAT(message_of(evaluate), refused);
    } else {
      train();
      evaluate();
    }
  }
  if (world.size == 1) return;
  DistributedDataParallel<Renormed> model(std::make_shared<Renormed>());
  EXPECT_THAT(message_of([&] { model(torch::arange(3)).sum().backward(); }),
              AllOf(HasSubstr("'table.weight'"), HasSubstr("max_norm")));
}

// A stage is on one rank, so what it writes there is as in one process.
WORLD_TEST(ForwardWrites, AParameterOfAStageIsWritten, 1, 2) {
  auto group = init_process_group();
  const auto stage = std::make_shared<WritesItsScale>();
  std::vector<WritesItsScale> single(static_cast<size_t>(world.size));
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return torch::mse_loss(output, target);
  };
  Pipeline pipeline({{world.rank, stage}},
                    {.schedule = schedule_gpipe(world.size, 2), .loss = loss});
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(step);
    const auto x = torch::randn({4, 4}, torch::kDouble);
    const auto y = torch::randn({4, 4}, torch::kDouble);
    {
      const torch::NoGradGuard no_grad;
      pipeline.eval(x);
    }
    pipeline.step(x, y);
    for (const bool trains : {false, true}) {
      const at::AutoGradMode grad_mode(trains);
      at::Tensor sum = torch::zeros({}, torch::kDouble);
      for (int part = 0; part < 2; ++part) {
        auto h = x.slice(0, 2 * part, 2 * part + 2);
        for (auto& each : single) h = each.forward(h);
        sum = sum + loss(h, y.slice(0, 2 * part, 2 * part + 2)) / 2;
      }
      if (trains) sum.backward();
    }
    const auto& same = single[static_cast<size_t>(world.rank)];
    expect_near(double_gradients(*stage->first), double_gradients(*same.first),
                1e-12);
    expect_near(double_gradients(*stage->second),
                double_gradients(*same.second), 1e-12);
    expect_near({stage->scale}, {same.scale}, 1e-12);
  }
}

// A bug: the copies of a tied weight drifted apart in silence.
WORLD_TEST(ForwardWrites, AParameterThatOtherRanksHaveIsRefusedInAStage, 2) {
  const auto message = [&](const char* kind, bool trains) {
    auto group = init_process_group();
    const auto alone = split_group({{0}, {1}});
    const auto module = std::make_shared<WritesAParameter>();
    const bool is_tied = std::string(kind) == "tied";
    std::unique_ptr<DistributedDataParallel<WritesAParameter>> model;
    std::vector<PipelineStage> stages;
    PipelineOptions options{
        .schedule = schedule_gpipe(is_tied ? 2 : 1, 1),
        .loss = [](const at::Tensor& output, const at::Tensor& target) {
          return torch::mse_loss(output, target);
        }};
    if (is_tied) {
      options.tied_weights = {{{{0, "first.weight"}, {1, "first.weight"}}}};
      stages.emplace_back(world.rank, module);
    } else if (std::string(kind) == "replicated") {
      options.group = alone;
      model =
          std::make_unique<DistributedDataParallel<WritesAParameter>>(module);
      stages.emplace_back(0, *model);
    } else {
      options.group = alone;
      stages.emplace_back(0, FullyShard(module, {.shared_memory = false}));
    }
    Pipeline pipeline(stages, options);
    const auto x = torch::full({2, 4}, world.rank + 2, torch::kDouble);
    return message_of([&] {
      if (trains) {
        pipeline.step(x, x);
      } else {
        pipeline.eval(x);
      }
    });
  };
  for (const bool trains : {true, false}) {
    SCOPED_TRACE(trains);
    EXPECT_THAT(message("tied", trains),
                AllOf(HasSubstr("has written parameter \"first.weight\""),
                      HasSubstr("a tied weight")));
    EXPECT_THAT(message("replicated", trains),
                HasSubstr("has written parameter 'first.weight'"));
    EXPECT_THAT(message("divided", trains),
                HasSubstr("the full parameter first.weight was written"));
  }
}

template <typename Module>
void expect_recomputes() {
  SCOPED_TRACE(typeid(Module).name());
  const auto module = std::make_shared<Module>();
  const auto call = [&](auto&&... args) -> decltype(auto) {
    return checkpoint(module, std::forward<decltype(args)>(args)...);
  };
  loss_of_rank(*module, call, 0).backward();
  expect_near(double_gradients(*module), plain_gradients<Module>(1), 1e-12);
}

TEST(ForwardWrites, ComesBackFromACheckpoint) {
  expect_recomputes<WritesATensor>();
  expect_recomputes<WritesAnOptional>();
  expect_recomputes<WritesAVector>();
  expect_recomputes<WritesAnArray>();
  expect_recomputes<ReturnsAView>();
  expect_recomputes<ReturnsOverlaps>();
  EXPECT_THAT(message_of([] { expect_recomputes<WritesItsInput>(); }),
              HasSubstr("changed tensor 1 of its arguments in place"));
}

// A bug: the recomputation wrote a second time, in silence.
TEST(ForwardWrites, ARecomputationThatWritesAParameterIsRefused) {
  const auto module = std::make_shared<WritesAParameter>();
  const auto x = torch::full({2, 4}, 2, torch::kDouble).requires_grad_();
  const auto y = checkpoint(module, x).sum();
  EXPECT_THAT(message_of([&] { y.backward(); }),
              HasSubstr("has written parameter 'first.weight'"));
}

// A bug: that of a lambda did.
TEST(ForwardWrites, ARecomputationOfALambdaThatWritesAParameterIsRefused) {
  const auto x = torch::full({2, 4}, 2, torch::kDouble).requires_grad_();
  WritesAParameter module;
  const auto before = module.second(x);  // not a part of the region
  const auto y =
      checkpoint(
          [&](const at::Tensor& t) { return module.forward(t) + before; }, x)
          .sum();
  EXPECT_THAT(message_of([&] { y.backward(); }),
              HasSubstr("has written a parameter of shape [4, 4]"));
  Renormed table;
  const auto rows = checkpoint(
      [&](const at::Tensor& index) { return table.forward(index).tanh(); },
      torch::arange(3));
  EXPECT_THAT(message_of([&] { rows.sum().backward(); }),
              HasSubstr("has written a parameter of shape [5, 3]"));
}

}  // namespace
}  // namespace lockstep::internal
