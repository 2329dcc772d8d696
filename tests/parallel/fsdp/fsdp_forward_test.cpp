// Tests what forward writes, and backward passes that are not one of a single
// loss: as in one process, on every path.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/block_net.h"

namespace lockstep::internal {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

Linear double_linear() {
  Linear linear(kWidth, kWidth);
  linear->to(at::kDouble);
  return linear;
}

// A net of two units of one kind, with a layer between them.
template <typename Cell, template <typename> class Unit>
struct CellNetImpl : torch::nn::Module {
  explicit CellNetImpl(const FullyShardOptions& options) {
    const auto make = [] {
      Cell cell;
      cell->to(at::kDouble);
      return cell;
    };
    for (const auto* name : {"first", "second"}) {
      cells.emplace_back(make, options);
      register_module(name, cells.back().ptr());
    }
    middle = register_module("middle", double_linear());
  }
  std::vector<Unit<Cell>> cells;
  Linear middle{nullptr};
};

// ---- References ----

struct Written {
  at::Tensor state = torch::zeros({4, kWidth}, torch::kDouble);
  std::vector<at::Tensor> losses{};
  std::optional<at::Tensor> gate{};
  std::array<at::Tensor, 2> both{};
  std::pair<at::Tensor, int> counted{{}, 0};
  std::map<std::string, at::Tensor> named{};
};

struct WriterImpl : torch::nn::Module {
  WriterImpl() { fc = register_module("fc", Linear(kWidth, kWidth)); }
  void forward(const at::Tensor& x, at::Tensor& state,
               std::vector<at::Tensor>& losses, std::optional<at::Tensor>& gate,
               std::array<at::Tensor, 2>& both,
               std::pair<at::Tensor, int>& counted,
               std::map<std::string, at::Tensor>& named) {
    state = (fc(x) + state).tanh();
    losses.push_back(state.square().mean());
    gate = gate ? *gate * state : state.sigmoid();
    both[1] = state + 1;
    both[0] = x + both[1];
    counted.first = both[1].exp();
    ++counted.second;
    named["x"] = state.sin();
  }
  Linear fc{nullptr};
};
TORCH_MODULE(Writer);

template <template <typename> class Unit>
struct WriterNetImpl : CellNetImpl<Writer, Unit> {
  using CellNetImpl<Writer, Unit>::CellNetImpl;
  at::Tensor forward(const at::Tensor& x, at::Tensor& state,
                     std::vector<at::Tensor>& losses) {
    Written w;
    w.state = state;
    w.losses = losses;
    auto h = x;
    for (auto& cell : this->cells) {
      cell(h, w.state, w.losses, w.gate, w.both, w.counted, w.named);
      h = this->middle(w.both[0]) * *w.gate + w.counted.first;
      h = h + w.named.at("x");
    }
    EXPECT_EQ(w.counted.second, 2);
    state = w.state;
    losses = w.losses;
    return h;
  }
};
template <template <typename> class Unit>
struct WriterNet : torch::nn::ModuleHolder<WriterNetImpl<Unit>> {
  using torch::nn::ModuleHolder<WriterNetImpl<Unit>>::ModuleHolder;
};

// Copies were handed to forward, so what it wrote was lost.
WORLD_TEST(FsdpForward, WhatForwardPutsIntoReferencesComesBack, 1, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    expect_trains_alike<WriterNet>(
        world, options, [](auto& net, const at::Tensor& x) {
          auto state = torch::zeros({4, kWidth}, torch::kDouble);
          std::vector<at::Tensor> losses;
          auto sum = net(x, state, losses).square().mean();
          // The state of one call is the input of the next one.
          sum = sum + net(x * 2, state, losses).mean() + state.mean();
          EXPECT_EQ(losses.size(), 4U);
          return sum + torch::stack(losses).sum();
        });
  });
}

struct ThrowsImpl : torch::nn::Module {
  ThrowsImpl() { fc = register_module("fc", Linear(3, 3)); }
  void forward(at::Tensor& x, std::vector<at::Tensor>& more) {
    more.push_back(fc(x));
    throw std::runtime_error("thrown by forward");
  }
  Linear fc{nullptr};
};
TORCH_MODULE(Throws);

WORLD_TEST(FsdpForward, AnExceptionLeavesTheCallersTensors, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    FullyShard<Throws> unit(Throws(), options);
    auto x = torch::ones({2, 3}).requires_grad_();
    std::vector<at::Tensor> more{x};
    const auto* before = x.unsafeGetTensorImpl();
    EXPECT_EQ(message_of([&] { unit(x, more); }), "thrown by forward");
    EXPECT_EQ(x.unsafeGetTensorImpl(), before);
    EXPECT_EQ(more[0].unsafeGetTensorImpl(), before);
    EXPECT_EQ(more.size(), 2U);
    barrier();
  });
}

// ---- In-place writes ----

// A residual block whose first layer works in place, and one that writes into
// a tensor which needs no gradient.
struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() { fc = register_module("fc", Linear(kWidth, kWidth)); }
  at::Tensor forward(at::Tensor x, at::Tensor state) {
    x.mul_(2).relu_();
    state.add_(fc(x));
    return fc(x).sigmoid();
  }
  Linear fc{nullptr};
};
TORCH_MODULE(InPlace);

template <template <typename> class Unit>
struct InPlaceNetImpl : CellNetImpl<InPlace, Unit> {
  using CellNetImpl<InPlace, Unit>::CellNetImpl;
  at::Tensor forward(const at::Tensor& given) {
    auto state = torch::zeros({4, kWidth}, torch::kDouble);
    auto x = this->middle(given);
    x = x + this->cells[0](x, state);
    // A view, whose base has the new values, too; and an rvalue.
    auto wide = torch::cat({x, x * 3}, 0);
    auto rows = wide.narrow(0, 4, 4);
    auto y = this->cells[1](rows, state) + rows;
    y = y + this->cells[0](torch::cat({x, x}, 0).slice(0, 0, 4), state);
    return y.square() + wide.sum() + state * state;
  }
};
template <template <typename> class Unit>
struct InPlaceNet : torch::nn::ModuleHolder<InPlaceNetImpl<Unit>> {
  using torch::nn::ModuleHolder<InPlaceNetImpl<Unit>>::ModuleHolder;
};

// The caller's tensor had the new values and the old history: gradients were
// wrong.
WORLD_TEST(FsdpForward, InputsThatForwardWritesInPlaceHaveRightGradients, 1,
           2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    expect_trains_alike<InPlaceNet>(
        world, options,
        [](auto& net, const at::Tensor& x) { return net(x).mean() / 1000; });
  });
}

struct HalvesImpl : torch::nn::Module {
  HalvesImpl() { fc = register_module("fc", Linear(3, 3)); }
  at::Tensor forward(at::Tensor x) { return fc(x.mul_(0.5)); }
  Linear fc{nullptr};
};
TORCH_MODULE(Halves);

WORLD_TEST(FsdpForward, InputsThatWereCastGetWhatForwardWrote, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    options.mp_policy.param_dtype = at::kBFloat16;
    FullyShard<Halves> unit(Halves(), options);
    for (const bool trains : {true, false}) {
      const at::AutoGradMode mode(trains);
      auto leaf = torch::ones({2, 3}).requires_grad_();
      auto x = leaf * 4;
      const auto y = unit(x);
      EXPECT_TRUE(x.equal(torch::full({2, 3}, 2.0)));
      if (!trains) continue;
      (y.sum() * 0 + x.sum()).backward();
      EXPECT_TRUE(leaf.grad().equal(torch::full({2, 3}, 2.0)));
    }
  });
}

struct StatesImpl : torch::nn::Module {
  StatesImpl() { fc = register_module("fc", Linear(3, 3)); }
  void forward(const at::Tensor& x, at::Tensor& state,
               std::vector<at::Tensor>& losses) {
    EXPECT_EQ(state.scalar_type(), at::kBFloat16);
    state = fc(x) + state;
    losses.push_back(state.sum());
  }
  Linear fc{nullptr};
};
TORCH_MODULE(States);

WORLD_TEST(FsdpForward, ReferencesGetWhatForwardComputedInLowPrecision, 1, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    options.mp_policy.param_dtype = at::kBFloat16;
    for (const bool raises : {false, true}) {
      if (raises) options.mp_policy.output_dtype = at::kFloat;
      FullyShard<States> unit(States(), options);
      auto start = torch::zeros({2, 3}).requires_grad_();
      auto state = start;
      std::vector<at::Tensor> losses;
      for (int call = 0; call < 2; ++call) {
        unit(torch::ones({2, 3}), state, losses);
        const auto dtype = raises ? at::kFloat : at::kBFloat16;
        EXPECT_EQ(state.scalar_type(), dtype);
        EXPECT_EQ(losses.back().scalar_type(), dtype);
      }
      EXPECT_EQ(losses.size(), 2U);
      (losses[0].sum() + losses[1].sum()).backward();
      // The first call is in both losses. All numbers are exact.
      EXPECT_TRUE(start.grad().equal(torch::full({2, 3}, 2.0)));
      for (const auto& shard : unit->parameters()) {
        EXPECT_TRUE(shard.grad().equal(torch::full_like(shard, 6.0)));
      }
    }
  });
}

WORLD_TEST(FsdpForward, LeavesThatForwardWritesInPlaceAreRefused, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    FullyShard<Halves> unit(Halves(), options);
    auto leaf = torch::ones({2, 3}).requires_grad_();
    EXPECT_THAT(message_of([&] { unit(leaf); }),
                HasSubstr("wrote an input in place that is a leaf"));
    barrier();
  });
}

// ---- Results ----

struct ViewsImpl : torch::nn::Module {
  ViewsImpl() { fc = register_module("fc", Linear(kWidth, kWidth)); }
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    auto y = fc(x).add(1);
    return {y.view({2, 2 * kWidth}), y.sum(1, true).expand({4, kWidth})};
  }
  Linear fc{nullptr};
};
TORCH_MODULE(Views);

template <template <typename> class Unit>
struct ViewNetImpl : CellNetImpl<Views, Unit> {
  using CellNetImpl<Views, Unit>::CellNetImpl;
  at::Tensor forward(at::Tensor x) {
    for (auto& cell : this->cells) {
      auto views = cell(this->middle(x).tanh());
      views[0].mul_(2).add_(views[0].detach());
      x = views[0].view({4, kWidth}) * views[1];
    }
    return x.view({-1});
  }
};
template <template <typename> class Unit>
struct ViewNet : torch::nn::ModuleHolder<ViewNetImpl<Unit>> {
  using torch::nn::ModuleHolder<ViewNetImpl<Unit>>::ModuleHolder;
};

// Autograd gave the view another node, by which no unit was recognised.
WORLD_TEST(FsdpForward, ResultsThatAreViewsMayBeWrittenInPlace, 1, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    expect_trains_alike<ViewNet>(world, options,
                                 [](auto& net, const at::Tensor& x) {
                                   auto y = net(x);
                                   y.div_(100);
                                   return y.sigmoid().mean();
                                 });
  });
}

struct OverlapsImpl : torch::nn::Module {
  OverlapsImpl() { fc = register_module("fc", Linear(kWidth, kWidth)); }
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    auto y = fc(x).add(1);
    auto z = y.tanh() * 2;
    return {y, y.narrow(1, 0, 5), z.narrow(0, 0, 3), z.narrow(0, 1, 3)};
  }
  Linear fc{nullptr};
};
TORCH_MODULE(Overlaps);

template <template <typename> class Unit>
struct OverlapNetImpl : CellNetImpl<Overlaps, Unit> {
  using CellNetImpl<Overlaps, Unit>::CellNetImpl;
  at::Tensor forward(at::Tensor x) {
    for (auto& cell : this->cells) {
      auto views = cell(this->middle(x).tanh());
      views[1].mul_(2);
      views[3].pow_(2);
      x = views[0] * (views[2].mean() + views[3].mean());
    }
    return x;
  }
};
template <template <typename> class Unit>
struct OverlapNet : torch::nn::ModuleHolder<OverlapNetImpl<Unit>> {
  using torch::nn::ModuleHolder<OverlapNetImpl<Unit>>::ModuleHolder;
};

// The other results had the new values and the old history.
WORLD_TEST(FsdpForward, ResultsThatShareMemoryMayBeWrittenInPlace, 1, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    expect_trains_alike<OverlapNet>(
        world, options,
        [](auto& net, const at::Tensor& x) { return net(x).sigmoid().mean(); });
  });
}

WORLD_TEST(FsdpForward, ASequentialMayEndInARecurrentLayer, 1, 2) {
  using State = std::tuple<at::Tensor, at::Tensor>;
  using Result = std::tuple<at::Tensor, State>;
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    const auto make = [] {
      torch::manual_seed(4);
      return torch::nn::Sequential(Linear(3, 2), torch::nn::LSTM(2, 2));
    };
    auto single = make();
    FullyShard<torch::nn::Sequential> unit(make(), options);
    const auto x = torch::ones({2, 1, 3});
    const auto output = std::get<0>(unit.forward<Result>(x));
    EXPECT_TRUE(
        output.allclose(std::get<0>(single->forward<Result>(x)), 1e-5, 1e-6));
    output.sum().backward();
  });
}

struct RefersImpl : torch::nn::Module {
  RefersImpl() { fc = register_module("fc", Linear(3, 3)); }
  const at::Tensor& forward(const at::Tensor& x) { return y = fc(x)[0]; }
  Linear fc{nullptr};
  at::Tensor y;
};
TORCH_MODULE(Refers);

WORLD_TEST(FsdpForward, ViewsThatAreReturnedByReferenceAreRefused, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    FullyShard<Refers> unit(Refers(), options);
    EXPECT_THAT(message_of([&] { unit(torch::ones({2, 3})); }),
                HasSubstr("returns a view by reference"));
    barrier();
  });
}

// ---- Parameters ----

struct WritesWeightImpl : torch::nn::Module {
  WritesWeightImpl() {
    table = register_module(
        "table",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).max_norm(0.1)));
  }
  at::Tensor forward(const at::Tensor& index) { return table(index); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(WritesWeight);

// Ranks of one host wrote the same memory; others threw the new values away.
WORLD_TEST(FsdpForward, ForwardMustNotWriteParameters, 1, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    FullyShard<WritesWeight> unit(WritesWeight(), options);
    const auto index = torch::tensor({1, 2});
    const auto said = message_of([&] { unit(index); });
    if (world.size == 1) {
      // There the values are kept.
      EXPECT_EQ(said, "");
      EXPECT_LT(
          unit->parameters()[0].slice(0, 1, 3).norm(2, 1).max().item<double>(),
          0.1 + 1e-6);
      return;
    }
    EXPECT_THAT(said, AllOf(HasSubstr("the full parameter table.weight was "
                                      "written"),
                            HasSubstr("max_norm")));
    unit.unshard();
    {
      const torch::NoGradGuard no_grad;
      unit.ptr()->table->weight.fill_(3);
    }
    EXPECT_THAT(message_of([&] { unit.reshard(); }),
                HasSubstr("the full parameter table.weight was written"));
    barrier();
  });
}

struct MayWriteImpl : torch::nn::Module {
  MayWriteImpl() { layer = register_module("layer", Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) {
    if (writes) {
      const torch::NoGradGuard no_grad;
      layer->weight.add_(0);
    }
    return layer(x);
  }
  Linear layer{nullptr};
  bool writes = false;
};
TORCH_MODULE(MayWrite);

// The other ranks waited until the timeout.
WORLD_TEST(FsdpForward, AParameterThatOneRankWritesIsToldToAll, 2, 3) {
  auto group = init_process_group();
  FullyShard<MayWrite> unit(MayWrite(), {});
  const auto x = torch::ones({2, 4});
  for (int step = 0; step < 6; ++step) {
    const int writer = step % world.size;
    const bool any_writes = step % 2 == 1;
    unit.ptr()->writes = any_writes && world.rank == writer;
    const auto said = message_of([&] { unit(x).sum().backward(); });
    if (!any_writes) {
      EXPECT_EQ(said, "");
    } else if (world.rank == writer) {
      EXPECT_THAT(said, HasSubstr("the full parameter layer.weight was "
                                  "written"));
    } else {
      EXPECT_THAT(
          said, HasSubstr("rank " + std::to_string(writer) + " has given up"));
    }
  }
  // Without a graph there is no backward that could throw.
  for (int step = 0; step < 4; ++step) {
    const bool writes = step % 2 == 1 && world.rank == 0;
    unit.ptr()->writes = writes;
    {
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(message_of([&] { unit(x); }).empty(), !writes);
    }
    unit.ptr()->writes = false;
    EXPECT_EQ(message_of([&] { unit(x).sum().backward(); }), "");
  }
}

// ---- Several backward passes ----

// Also gives an auxiliary loss, and keeps one.
struct TwoLossesImpl : torch::nn::Module {
  TwoLossesImpl() {
    up = register_module("up", Linear(kWidth, kWidth));
    down = register_module("down", Linear(kWidth, kWidth));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto h = up(x).tanh();
    kept = down(h).square().mean();
    return {x + down(h).sigmoid(), h.exp().mean()};
  }
  Linear up{nullptr}, down{nullptr};
  at::Tensor kept;
};
TORCH_MODULE(TwoLosses);

template <template <typename> class Unit>
struct TwoLossesNetImpl : CellNetImpl<TwoLosses, Unit> {
  using CellNetImpl<TwoLosses, Unit>::CellNetImpl;
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto [y, first] = this->cells[0](x);
    const auto [z, second] = this->cells[1](this->middle(y).tanh());
    return {z, first + second};
  }
  at::Tensor kept() {
    at::Tensor sum;
    for (auto& cell : this->cells) {
      const auto& one =
          std::dynamic_pointer_cast<TwoLossesImpl>(cell.ptr())->kept;
      sum = sum.defined() ? sum + one : one;
    }
    return sum;
  }
};
template <template <typename> class Unit>
struct TwoLossesNet : torch::nn::ModuleHolder<TwoLossesNetImpl<Unit>> {
  using torch::nn::ModuleHolder<TwoLossesNetImpl<Unit>>::ModuleHolder;
};

// Worked only if ranks share the parameters.
WORLD_TEST(FsdpForward, AGradientPenaltyIsTrained, 1, 2, 3) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    for (const bool alone : {false, true}) {
      expect_trains_alike<TwoLossesNet>(
          world, options, [&](auto& net, const at::Tensor& batch) {
            const auto x = batch.clone().requires_grad_();
            const auto y = net(x).first;
            const auto slope = torch::autograd::grad({y.square().sum()}, {x},
                                                     {}, /*retain_graph=*/true,
                                                     /*create_graph=*/true)[0];
            const auto penalty = (slope.norm(2, 1) - 1).square().mean();
            return alone ? penalty : y.mean() + penalty;
          });
    }
  });
}

// The gradient of an energy inside of forward, as models of forces take it.
template <template <typename> class Unit>
struct ForceNetImpl : TwoLossesNetImpl<Unit> {
  using TwoLossesNetImpl<Unit>::TwoLossesNetImpl;
  at::Tensor forward(const at::Tensor& given) {
    const torch::AutoGradMode with_grad(true);
    const auto x = given.clone().requires_grad_();
    const auto energy = TwoLossesNetImpl<Unit>::forward(x).first.square().sum();
    const auto force = torch::autograd::grad({energy}, {x}, {}, true, true)[0];
    return this->middle(force).tanh().sum() + energy;
  }
};
template <template <typename> class Unit>
struct ForceNet : torch::nn::ModuleHolder<ForceNetImpl<Unit>> {
  using torch::nn::ModuleHolder<ForceNetImpl<Unit>>::ModuleHolder;
};

WORLD_TEST(FsdpForward, GradMayBeCalledInsideOfForward, 1, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    for (const bool reshards : {true, false}) {
      options.reshard_after_forward = reshards;
      expect_trains_alike<ForceNet>(world, options,
                                    [](auto& net, const at::Tensor& x) {
                                      {
                                        const torch::NoGradGuard no_grad;
                                        net(x);
                                      }
                                      return net(x) / 100;
                                    });
    }
  });
}

WORLD_TEST(FsdpForward, AuxiliaryLossesMayHaveABackwardOfTheirOwn, 1, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    expect_trains_alike<TwoLossesNet>(
        world, options, [&](auto& net, const at::Tensor& x) {
          using Net = std::decay_t<decltype(net)>;
          const bool plain = std::is_same_v<Net, TwoLossesNet<PlainUnit>>;
          const auto [y, auxiliary] = net(x);
          (y.square().mean() / (plain ? world.size : 1))
              .backward({}, /*keep_graph=*/true);
          return auxiliary;
        });
  });
}

// The tensors that a unit kept besides its results.
WORLD_TEST(FsdpForward, ABackwardPastTheResultsOfUnitsIsRefused, 2) {
  on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    FullyShard<TwoLossesNet<FullyShard>> model(
        [&] { return TwoLossesNet<FullyShard>(options); }, options);
    const auto x = torch::randn({4, kWidth}, torch::kDouble);
    const auto kept = [&] { return model.ptr()->kept(); };
    for (int turn = 0; turn < 2; ++turn) {
      // With the results it is right.
      auto y = model(x).first;
      (y.mean() + kept()).backward();
      // The outermost unit has a result, the others have none.
      auto auxiliary = model(x).second;
      const auto said =
          message_of([&] { (auxiliary * 0 + kept()).backward(); });
      EXPECT_EQ(said, "");
      y = model(x).first;
      EXPECT_THAT(message_of([&] {
                    y.mean().backward({}, /*keep_graph=*/true);
                    kept().backward();
                    model(x);
                  }),
                  HasSubstr("FullyShard: "));
      barrier();
    }
  });
}

// On Gloo the next forward that trained failed: its buffers were inference
// tensors.
WORLD_TEST(FsdpForward, InferenceModeMayComeFirstAndBetweenSteps, 1, 2) {
  on_fsdp_paths(world, [&](FullyShardOptions options) {
    for (const bool half : {false, true}) {
      if (half) options.mp_policy.param_dtype = at::kBFloat16;
      BothNets nets(options);
      for (int step = 0; step < 3; ++step) {
        {
          const c10::InferenceMode inference;
          nets.model(tokens_of(step, world.rank));
        }
        if (!half) nets.plain_step(step, world.size);
        nets.step(step, world.rank);
      }
      if (!half) nets.expect_equal(1e-12);
    }
  });
}

}  // namespace
}  // namespace lockstep::internal
