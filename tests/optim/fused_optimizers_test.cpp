#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <string>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "tests/harness/kept_warnings.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;
using torch::optim::OptimizerParamGroup;

struct Net {
  Net() {
    torch::manual_seed(1);
    layers = torch::nn::Sequential(torch::nn::Linear(5, 40), torch::nn::Tanh(),
                                   torch::nn::Linear(40, 3));
  }
  std::vector<at::Tensor> parameters() const { return layers->parameters(); }
  void backward(int step) {
    torch::manual_seed(static_cast<uint64_t>(step) + 100);
    layers->forward(torch::randn({8, 5})).square().mean().backward();
  }
  void train(torch::optim::Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      backward(step);
      optimizer.step();
    }
  }
  at::Tensor flat() const {
    return torch::nn::utils::parameters_to_vector(parameters())
        .detach()
        .clone();
  }
  torch::nn::Sequential layers{nullptr};
};

// Compares with LibTorch's optimizer: the same formulas, rounded in another
// order.
template <class Ours, class Theirs, class Options>
void expect_close(const Options& options) {
  Net a, b;
  Ours ours(a.parameters(), options);
  Theirs theirs(b.parameters(), options);
  a.train(ours, 0, 20);
  b.train(theirs, 0, 20);
  EXPECT_LT((a.flat() - b.flat()).abs().max().item<double>(), 1e-5);
  EXPECT_GT((a.flat() - Net().flat()).abs().max().item<double>(), 1e-3);
}

TEST(FusedOptimizers, TakeWhatLibTorchsTakeAndStepAlike) {
  expect_close<optim::SGD, torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  // eps is large, because Adam turns a rounding error in a tiny gradient into a
  // whole step.
  expect_close<optim::Adam, torch::optim::Adam>(
      torch::optim::AdamOptions(1e-2).amsgrad(true).eps(1e-3));
  expect_close<optim::AdamW, torch::optim::AdamW>(
      torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3));
  Net net;
  optim::Adam plain_rate(net.parameters(), 0.5);
  EXPECT_EQ(plain_rate.param_groups()[0].options().get_lr(), 0.5);
}

// LibTorch 2.13's fused SGD leaves most elements of half-precision parameters
// on the CPU as they are, and reads momenta that were never written.
TEST(FusedOptimizers, SgdStepsAllElementsOfHalfPrecision) {
  const std::vector<torch::optim::SGDOptions> kinds{
      torch::optim::SGDOptions(0.1),
      torch::optim::SGDOptions(0.1).weight_decay(0.3),
      torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.2),
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.3).nesterov(
          true)};
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const auto& options : kinds) {
      torch::manual_seed(5);
      const at::Tensor start = torch::randn({7, 15}).to(dtype);
      at::Tensor a = start.clone();
      at::Tensor b = start.to(at::kDouble);
      optim::SGD ours(std::vector<at::Tensor>{a}, options);
      torch::optim::SGD theirs(std::vector<at::Tensor>{b}, options);
      for (int step = 0; step < 5; ++step) {
        const at::Tensor gradient = torch::randn({7, 15}).to(dtype);
        a.mutable_grad() = gradient;
        b.mutable_grad() = gradient.to(at::kDouble);
        ours.step();
        theirs.step();
        EXPECT_LT((a - b).abs().max().item<double>(), 0.1) << step;
      }
      EXPECT_TRUE(a.ne(start).sum().item<int64_t>() > 90) << a;
    }
  }
}

// A snapshot that was copied meanwhile was torn and counted as good, and
// FullyShard missed a write between a forward and its backward.
TEST(FusedOptimizers, StepsRaiseTheVersionsOfWhatTheyChange) {
  const auto raises = [](auto make) {
    auto changed = torch::ones({4}).requires_grad_();
    const auto unchanged = torch::ones({4}).requires_grad_();
    auto optimizer = make(std::vector<at::Tensor>{changed, unchanged});
    changed.mutable_grad() = torch::ones({4});
    const auto before = changed._version();
    optimizer.step();
    EXPECT_EQ(unchanged._version(), before);
    return changed._version() > before;
  };
  using Parameters = std::vector<at::Tensor>;
  EXPECT_TRUE(raises([](const Parameters& p) {
    return optim::SGD(p, torch::optim::SGDOptions(0.1));
  }));
  EXPECT_TRUE(raises([](const Parameters& p) {
    return optim::SGD(p, torch::optim::SGDOptions(0.1).momentum(0.9));
  }));
  EXPECT_TRUE(raises([](const Parameters& p) { return optim::Adam(p); }));
  EXPECT_TRUE(raises([](const Parameters& p) { return optim::AdamW(p); }));
}

// The versions of some tensors when the first operation on a parameter begins.
class VersionsInStep {
 public:
  explicit VersionsInStep(std::vector<at::Tensor> tensors) {
    watched = std::move(tensors);
    seen.clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(begin));
  }
  ~VersionsInStep() { at::removeCallback(handle_); }

  static std::vector<int64_t> of(const std::vector<at::Tensor>& tensors) {
    std::vector<int64_t> versions;
    for (const auto& tensor : tensors) versions.push_back(tensor._version());
    return versions;
  }
  inline static std::vector<at::Tensor> watched;
  inline static std::vector<int64_t> seen;

 private:
  static std::unique_ptr<at::ObserverContext> begin(
      const at::RecordFunction& function) {
    const std::string name = function.name();
    const bool writes =
        name.starts_with("aten::_fused_") || name == "aten::mul_";
    if (writes && seen.empty()) seen = of(watched);
    return nullptr;
  }
  at::CallbackHandle handle_;
};

std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& from) {
  std::vector<at::Tensor> tensors;
  for (const auto& [number, values] : state_dict(from).state) {
    for (const auto& [name, value] : values) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (tensor && name != "step") tensors.push_back(*tensor);
    }
  }
  return tensors;
}

template <class Optimizer, class Options>
void expect_raised_before(const Options& options, size_t count,
                          at::ScalarType dtype = at::kFloat) {
  auto changed = torch::ones({4}, dtype).requires_grad_();
  Optimizer optimizer(std::vector<at::Tensor>{changed}, options);
  changed.mutable_grad() = torch::ones({4}, dtype);
  optimizer.step();
  std::vector<at::Tensor> written = state_tensors(optimizer);
  written.push_back(changed);
  ASSERT_EQ(written.size(), count);
  const auto before = VersionsInStep::of(written);
  const VersionsInStep versions(written);
  optimizer.step();
  ASSERT_EQ(VersionsInStep::seen.size(), count);
  for (size_t i = 0; i < count; ++i) {
    EXPECT_GT(VersionsInStep::seen[i], before[i]) << i;
  }
}

// The versions were raised after the step, those of the moments not at all: a
// snapshot whose copy ended during the step was torn and counted as good.
TEST(FusedOptimizers, VersionsAreRaisedBeforeAnythingIsWritten) {
  const auto sgd = torch::optim::SGDOptions(0.1);
  const auto momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
  expect_raised_before<optim::SGD>(sgd, 1);
  expect_raised_before<optim::SGD>(momentum, 2);
  expect_raised_before<optim::SGD>(momentum, 2, at::kBFloat16);
  expect_raised_before<optim::Adam>(optim::AdamOptions{}, 3);
  expect_raised_before<optim::AdamW>(optim::AdamWOptions{.amsgrad = true}, 4);
}

// Memory that runs out after some allocations.
class LittleMemory final : public c10::Allocator {
 public:
  explicit LittleMemory(int64_t allocations) : left_(allocations) {
    c10::SetCPUAllocator(this);
  }
  ~LittleMemory() override { c10::SetCPUAllocator(usual_); }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

  at::DataPtr allocate(size_t bytes) override {
    if (left_-- <= 0) throw std::bad_alloc();
    return usual_->allocate(bytes);
  }
  at::DeleterFnPtr raw_deleter() const override {
    return usual_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  c10::Allocator* const usual_ = c10::GetCPUAllocator();
  int64_t left_;
};

template <class Optimizer, class Options>
void expect_whole_steps(const Options& options, size_t count,
                        at::ScalarType dtype = at::kFloat) {
  constexpr int64_t kEnough = 1000;
  // Returns whether the step after `steps` others has failed.
  const auto train = [&](int steps, int64_t allocations,
                         std::vector<at::Tensor>& parameters) {
    torch::manual_seed(3);
    parameters.clear();
    for (size_t i = 0; i < count; ++i) {
      parameters.push_back(torch::randn({70}).to(dtype).requires_grad_());
    }
    Optimizer optimizer(parameters, options);
    const auto set_gradients = [&] {
      for (auto& p : parameters)
        p.mutable_grad() = torch::randn({70}).to(dtype);
    };
    for (int step = 0; step < steps; ++step) {
      set_gradients();
      optimizer.step();
    }
    set_gradients();
    bool failed = false;
    const size_t states = optimizer.state().size();
    const auto before = torch::cat(parameters).detach();
    try {
      const LittleMemory memory(allocations);
      optimizer.step();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    if (!failed) return false;
    EXPECT_TRUE(torch::cat(parameters).equal(before)) << allocations;
    EXPECT_EQ(optimizer.state().size(), states) << allocations;
    optimizer.step();
    return true;
  };
  for (const int steps : {0, 1}) {
    std::vector<at::Tensor> expected, parameters;
    EXPECT_FALSE(train(steps, kEnough, expected));
    int64_t allocations = 0;
    while (train(steps, allocations, parameters)) {
      for (size_t i = 0; i < count; ++i) {
        EXPECT_TRUE(parameters[i].equal(expected[i]))
            << i << " after " << allocations << " allocations";
      }
      ASSERT_LT(++allocations, kEnough);
    }
  }
}

// A momentum stayed that was never written, or steps were counted that were not
// made; the next step used them.
TEST(FusedOptimizers, AStepWithoutMemoryCanBeMadeAgain) {
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
  const auto nesterov =
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.3).nesterov(
          true);
  expect_whole_steps<optim::SGD>(sgd, 2);
  expect_whole_steps<optim::SGD>(sgd, 1, at::kBFloat16);
  expect_whole_steps<optim::SGD>(nesterov, 1, at::kBFloat16);
  expect_whole_steps<optim::Adam>(optim::AdamOptions{.amsgrad = true}, 2);
  expect_whole_steps<optim::AdamW>(optim::AdamWOptions{}, 2);
}

// There is no kernel for this dtype.
TEST(FusedOptimizers, AKernelThatFailsLeavesNoState) {
  const auto expect = [](auto optimizer) {
    auto parameter = optimizer.param_groups()[0].params()[0];
    parameter.mutable_grad() = torch::zeros_like(parameter);
    EXPECT_THROW(optimizer.step(), c10::Error);
    EXPECT_TRUE(optimizer.state().empty());
  };
  const auto parameters = [] {
    return std::vector<at::Tensor>{torch::zeros({4}, at::kFloat8_e5m2)};
  };
  expect(optim::SGD(parameters(), torch::optim::SGDOptions(1).momentum(0.9)));
  expect(optim::Adam(parameters()));
  expect(optim::AdamW(parameters()));
}

TEST(FusedOptimizers, DefaultsArePythons) {
  Net net;
  const auto sgd = state_dict(optim::SGD(net.parameters()));
  const auto adam = state_dict(optim::Adam(net.parameters()));
  const auto adamw = state_dict(optim::AdamW(net.parameters()));
  const auto value = [](const OptimizerState& state, const char* name) {
    return std::get<double>(state.param_groups[0].options.at(name));
  };
  EXPECT_EQ(value(sgd, "lr"), 1e-3);
  EXPECT_EQ(value(sgd, "momentum"), 0);
  EXPECT_EQ(value(adam, "lr"), 1e-3);
  EXPECT_EQ(value(adam, "weight_decay"), 0);
  EXPECT_EQ(value(adamw, "weight_decay"), 1e-2);
  EXPECT_EQ(value(adamw, "eps"), 1e-8);
}

template <class Optimizer, class Options>
void expect_stepped_once(const Options& options) {
  Net a, b;
  auto tied = a.parameters();
  tied.push_back(tied.front());
  tied.insert(tied.begin() + 1, tied.front());
  Optimizer once(b.parameters(), options);
  Optimizer twice(tied, options);
  EXPECT_EQ(twice.param_groups()[0].params().size(), 4);
  a.train(twice, 0, 5);
  b.train(once, 0, 5);
  EXPECT_TRUE(a.flat().equal(b.flat()));
  const auto state = state_dict(twice);
  EXPECT_THAT(state.param_groups[0].params, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(state.state.size(), state_dict(once).state.size());

  Optimizer added(std::vector<at::Tensor>{}, options);
  added.add_param_group(OptimizerParamGroup(tied));
  EXPECT_EQ(added.param_groups()[1].params().size(), 4);
  // Python raises "some parameters appear in more than one parameter group".
  EXPECT_THAT(
      [&] { added.add_param_group(OptimizerParamGroup({tied.front()})); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("more than one")));
  EXPECT_EQ(added.param_groups().size(), 2);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{tied.front()});
  groups.emplace_back(std::vector<at::Tensor>{tied.front()});
  EXPECT_THAT([&] { Optimizer(groups, options); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("more than one")));
}

// module->parameters() names a tied tensor twice; Python's names it once.
TEST(FusedOptimizers, AParameterListedTwiceIsSteppedOnce) {
  expect_stepped_once<optim::SGD>(
      optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  expect_stepped_once<optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_stepped_once<optim::Adam>(optim::AdamOptions{.lr = 0.01});
  expect_stepped_once<optim::Adam>(torch::optim::AdamOptions(0.01));
  expect_stepped_once<optim::AdamW>(optim::AdamWOptions{.lr = 0.01});
  expect_stepped_once<optim::AdamW>(torch::optim::AdamWOptions(0.01));
}

TEST(FusedOptimizers, GroupsHaveOptionsOfTheirOwnAndSchedulersSetThem) {
  Net net, same;
  auto p = net.parameters();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{p[0], p[1]});
  groups.emplace_back(std::vector<at::Tensor>{p[2], p[3]},
                      std::make_unique<torch::optim::SGDOptions>(
                          torch::optim::SGDOptions(0.5).momentum(0.9)));
  optim::SGD optimizer(groups, {.lr = 0.1});
  torch::optim::StepLR scheduler(optimizer, 1, 0.5);
  const at::Tensor first = p[0].detach().clone();
  const at::Tensor last = p[3].detach().clone();
  net.backward(0);
  optimizer.step();
  EXPECT_TRUE(torch::allclose(p[0].detach(), first - 0.1 * p[0].grad()));
  EXPECT_TRUE(torch::allclose(p[3].detach(), last - 0.5 * p[3].grad()));
  scheduler.step();  // the first call of LibTorch's schedulers only counts
  scheduler.step();
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.25);
  EXPECT_EQ(optimizer.state().size(), 2);  // momentum in the second group only
}

TEST(FusedOptimizers, ParametersWithoutGradientAreLeftAlone) {
  Net net;
  auto p = net.parameters();
  optim::AdamW optimizer(p, {.lr = 0.1});
  p[0].mutable_grad() = torch::ones_like(p[0]);
  const at::Tensor other = p[2].detach().clone();
  optimizer.step();
  EXPECT_TRUE(p[2].detach().equal(other));
  EXPECT_EQ(optimizer.state().size(), 1);
}

TEST(FusedOptimizers, ClosureIsCalledWithGradientsEnabled) {
  Net net;
  optim::SGD optimizer(net.parameters());
  const torch::NoGradGuard outside;
  const auto loss = optimizer.step([&] {
    EXPECT_TRUE(torch::GradMode::is_enabled());
    return torch::full({}, 3.0);
  });
  EXPECT_EQ(loss.item<double>(), 3);
}

TEST(FusedOptimizers, GradientsOfOtherStridesAreReadRight) {
  const auto run = [](bool strided) {
    auto p = torch::arange(12.0).view({3, 4}).requires_grad_();
    auto gradient = torch::arange(12.0).view({3, 4}) / 8;
    p.mutable_grad() = strided ? gradient.t().contiguous().t() : gradient;
    optim::SGD optimizer({p}, {.lr = 1});
    optimizer.step();
    return p.detach();
  };
  EXPECT_TRUE(run(true).equal(run(false)));
}

// Returns the parameter after four steps. After two of them the parameter gets
// other strides, or (`anew`) the state goes to an optimizer of such a one.
template <class Optimizer, class Options>
at::Tensor with_other_strides(const Options& options, bool change, bool anew) {
  constexpr auto kOther = at::MemoryFormat::ChannelsLast;
  torch::manual_seed(3);
  auto p = torch::randn({4, 4, 2, 4}).requires_grad_();
  std::optional<Optimizer> optimizer;
  optimizer.emplace(std::vector<at::Tensor>{p}, options);
  for (int step = 0; step < 4; ++step) {
    if (step == 2 && change) {
      std::stringstream archive;
      torch::save(*optimizer, archive);
      if (anew) {
        p = p.detach().contiguous(kOther).requires_grad_();
        optimizer.emplace(std::vector<at::Tensor>{p}, options);
        torch::load(*optimizer, archive);
      } else {
        p.set_data(p.detach().contiguous(kOther));
      }
    }
    p.mutable_grad() = torch::randn({4, 4, 2, 4});
    optimizer->step();
  }
  return p.detach().contiguous();
}

template <class Optimizer, class Options>
void expect_strides_to_be_read(const Options& options) {
  const auto expected = with_other_strides<Optimizer>(options, false, false);
  for (const bool anew : {false, true}) {
    EXPECT_TRUE(
        with_other_strides<Optimizer>(options, true, anew).equal(expected))
        << anew;
  }
}

// The kernels walk through memory, so each element got the moments of another.
TEST(FusedOptimizers, StateOfOtherStridesIsReadRight) {
  const auto momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
  expect_strides_to_be_read<optim::SGD>(momentum);
  expect_strides_to_be_read<optim::Adam>(optim::AdamOptions{});
  expect_strides_to_be_read<optim::AdamW>(optim::AdamWOptions{.amsgrad = true});
}

// The kernels wrote past the end of the smaller tensor.
TEST(FusedOptimizers, StateThatDoesNotFitItsParameterIsRefused) {
  const auto message = [](auto make, const at::Tensor& other) {
    auto p = torch::ones({70}).requires_grad_();
    auto first = torch::ones({2});
    auto optimizer = make(std::vector<at::Tensor>{first, p});
    p.mutable_grad() = torch::ones({70});
    optimizer.step();
    p.mutable_grad() = at::Tensor();
    p.set_data(other);
    p.mutable_grad() = torch::ones_like(other);
    try {
      optimizer.step();
    } catch (const std::invalid_argument& error) {
      EXPECT_TRUE(p.detach().equal(other));
      return std::string(error.what());
    }
    return std::string();
  };
  using Parameters = std::vector<at::Tensor>;
  EXPECT_THAT(message(
                  [](const Parameters& p) {
                    return optim::SGD(p,
                                      torch::optim::SGDOptions(1).momentum(1));
                  },
                  torch::ones({9})),
              AllOf(HasSubstr("SGD: parameter 1 of its group is Float[9] on "
                              "cpu, its momentum_buffer Float[70] on cpu"),
                    HasSubstr("make the optimizer after")));
  EXPECT_THAT(message([](const Parameters& p) { return optim::Adam(p); },
                      torch::ones({70}, at::kDouble)),
              HasSubstr("is Double[70] on cpu, its exp_avg Float[70] on cpu"));
  EXPECT_THAT(message([](const Parameters& p) { return optim::AdamW(p); },
                      torch::ones({7, 10})),
              HasSubstr("is Float[7, 10] on cpu, its exp_avg Float[70]"));
}

TEST(FusedOptimizers, WhatTheKernelsCannotTakeIsRefusedByName) {
  auto sparse = torch::zeros({4, 2}).requires_grad_();
  sparse.mutable_grad() = torch::ones({4, 2}).to_sparse(1);
  optim::Adam adam({sparse});
  EXPECT_THAT([&] { adam.step(); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("Adam: parameter 0 of its group has a sparse")));
  auto gaps = torch::zeros({4, 4}).narrow(1, 0, 2).detach().requires_grad_();
  gaps.mutable_grad() = torch::ones({4, 2});
  optim::SGD sgd({gaps});
  EXPECT_THAT([&] { sgd.step(); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("parameter.set_data(parameter.contiguous())")));
  auto small = torch::zeros({4});
  small.mutable_grad() = torch::ones({3});
  optim::SGD one({small});
  EXPECT_THAT([&] { one.step(); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("is of sizes [4], its gradient of [3]")));
  auto whole = torch::zeros({3}, torch::kLong);
  whole.mutable_grad() = torch::ones({3}, torch::kLong);
  optim::AdamW adamw({whole});
  EXPECT_THAT([&] { adamw.step(); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("is of Long")));
}

// Regression: the groups before it were stepped.
TEST(FusedOptimizers, AGroupThatIsRefusedLeavesTheOthersAlone) {
  const auto expect = [](auto make) {
    auto good = torch::ones({4}).requires_grad_();
    good.mutable_grad() = torch::ones({4});
    auto sparse = torch::ones({4, 2}).requires_grad_();
    sparse.mutable_grad() = torch::ones({4, 2}).to_sparse(1);
    auto optimizer = make(std::vector<OptimizerParamGroup>{
        OptimizerParamGroup({good}), OptimizerParamGroup({sparse})});
    EXPECT_THROW(optimizer.step(), std::invalid_argument);
    EXPECT_TRUE(good.detach().equal(torch::ones({4})));
    EXPECT_TRUE(optimizer.state().empty());
  };
  expect([](const auto& groups) { return optim::SGD(groups); });
  expect([](const auto& groups) { return optim::AdamW(groups); });
}

// The advice of the errors above gives the numbers of a parameter that was
// never refused.
TEST(FusedOptimizers, TheAdviceForWhatIsRefusedIsRight) {
  const auto options = torch::optim::SGDOptions(0.1);
  const at::Tensor start = torch::arange(8.0).view({4, 2});
  const auto stepped = [](at::Tensor parameter, auto make,
                          bool sparse = false) {
    auto optimizer = make(std::vector<at::Tensor>{parameter});
    torch::embedding(parameter, torch::tensor({1, 3, 1}), -1, false, sparse)
        .square()
        .sum()
        .backward();
    optimizer.step();
    return parameter.detach().clone();
  };
  const auto ours = [&](const auto& p) { return optim::SGD(p, options); };
  const auto theirs = [&](const auto& p) {
    return torch::optim::SGD(p, options);
  };
  const auto plain = [&] { return start.clone().requires_grad_(); };
  const at::Tensor expected = stepped(plain(), ours);
  auto gaps = torch::zeros({4, 4}).narrow(1, 1, 2).copy_(start).detach();
  gaps.requires_grad_();
  EXPECT_THROW(stepped(gaps, ours), std::invalid_argument);
  gaps.mutable_grad() = at::Tensor();
  gaps.set_data(gaps.contiguous());
  EXPECT_TRUE(stepped(gaps, ours).equal(expected));
  EXPECT_THROW(stepped(plain(), ours, true), std::invalid_argument);
  EXPECT_TRUE(stepped(plain(), theirs, true).allclose(expected));
}

// Options with all values, some of them those of a class whose options were not
// set.
template <class Optimizer, class Group, class Options>
void expect_kept(const Options& defaults, const Group& given,
                 const Options& expected) {
  const auto same = [&](const Optimizer& optimizer, size_t group) {
    return static_cast<const Options&>(
               optimizer.param_groups()[group].options()) == expected;
  };
  const auto parameters = [] {
    auto p = torch::ones({2}).requires_grad_();
    p.mutable_grad() = torch::ones({2});
    return std::vector<at::Tensor>{p};
  };
  // Both as LibTorch's groups and as ours, in the constructor and later.
  Group ours = given;
  ours.params = parameters();
  const auto theirs = [&] {
    return OptimizerParamGroup(parameters(),
                               std::make_unique<Options>(expected));
  };
  std::vector<OptimizerParamGroup> groups{OptimizerParamGroup(parameters())};
  groups.push_back(theirs());
  Optimizer one(groups, defaults);
  EXPECT_TRUE(same(one, 1));
  one.add_param_group(ours);
  EXPECT_TRUE(same(one, 2));
  one.add_param_group(theirs());
  EXPECT_TRUE(same(one, 3));
  EXPECT_FALSE(same(one, 0));
  EXPECT_TRUE(static_cast<const Options&>(one.defaults()) == defaults);
  one.step();
  Optimizer alone(parameters(), expected);
  alone.step();
  const at::Tensor stepped = alone.param_groups()[0].params()[0];
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(one.param_groups()[i].params()[0].equal(stepped), i > 0) << i;
  }
}

// A group of SGD that decayed by 0 got the optimizer's decay: LibTorch takes a
// value that equals the default of its class for one that was not given.
TEST(FusedOptimizers, AGroupKeepsWhatItWasGiven) {
  expect_kept<optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.5),
      optim::SGDGroup{.momentum = 0, .weight_decay = 0},
      torch::optim::SGDOptions(0.1));
  expect_kept<optim::Adam>(
      torch::optim::AdamOptions(0.1).weight_decay(0.5).amsgrad(true),
      optim::AdamGroup{.weight_decay = 0, .amsgrad = false},
      torch::optim::AdamOptions(0.1));
  expect_kept<optim::AdamW>(
      torch::optim::AdamWOptions(0.1).betas({0.5, 0.6}).weight_decay(0.5),
      optim::AdamWGroup{.betas = std::tuple{0.9, 0.999}, .weight_decay = 0.01},
      torch::optim::AdamWOptions(0.1));
  expect_kept<optim::AdamW>(
      torch::optim::AdamWOptions(0.1).eps(1e-3),
      optim::AdamWGroup{.lr = 1e-3, .weight_decay = 0},
      torch::optim::AdamWOptions().eps(1e-3).weight_decay(0));
}

// Returns what is said when a group is given to the constructor and later.
template <class Optimizer, class Defaults>
std::vector<std::string> said_of(const OptimizerParamGroup& group,
                                 const Defaults& defaults) {
  const c10::WarningUtils::WarnAlways always;
  const testing::KeptWarnings warnings;
  Optimizer(std::vector<OptimizerParamGroup>{group}, defaults);
  Optimizer(std::vector<at::Tensor>{}, defaults).add_param_group(group);
  return warnings.texts();
}

// SGDOptions(0.01) in a group got momentum 0 in silence, where LibTorch gives
// it the optimizer's 0.9, as Python does for {"lr": 0.01}.
TEST(FusedOptimizers, AGroupWhoseOptionsMayNotHaveBeenSetIsToldOf) {
  const std::vector<at::Tensor> p{torch::ones({2}).requires_grad_()};
  const auto of = [&]<class Options>(const Options& options) {
    return OptimizerParamGroup(p, std::make_unique<Options>(options));
  };
  const auto sgd =
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.5);
  EXPECT_THAT(
      said_of<optim::SGD>(of(torch::optim::SGDOptions(0.01)), sgd),
      ElementsAre(
          StartsWith("SGD: a parameter group of LibTorch's has momentum 0 (the "
                     "optimizer has 0.9), weight_decay 0 (the optimizer has "
                     "0.5); "),
          HasSubstr("Give a lockstep::optim::SGDGroup: ")));
  const auto adam = torch::optim::AdamOptions(0.1).betas({0.5, 0.6});
  EXPECT_THAT(
      said_of<optim::Adam>(of(torch::optim::AdamOptions(0.2)), adam),
      AllOf(SizeIs(2),
            Each(HasSubstr("has betas 0.9 and 0.999 (the optimizer has 0.5 "
                           "and 0.6); "))));
  EXPECT_THAT(said_of<optim::AdamW>(of(torch::optim::AdamWOptions()),
                                    torch::optim::AdamWOptions(0.1)),
              AllOf(SizeIs(2),
                    Each(HasSubstr("has lr 0.001 (the optimizer has 0.1); "))));

  // Nothing is said of what is meant, or makes no difference.
  EXPECT_THAT(
      said_of<optim::SGD>(of(torch::optim::SGDOptions(0.01).momentum(0.5)),
                          torch::optim::SGDOptions(0.1).momentum(0.9)),
      IsEmpty());
  EXPECT_THAT(said_of<optim::SGD>(OptimizerParamGroup(p), sgd), IsEmpty());
  EXPECT_THAT(
      said_of<optim::SGD>(
          optim::SGDGroup{.params = p, .momentum = 0}.to_torch(sgd), sgd),
      IsEmpty());
  EXPECT_THAT(
      said_of<optim::Adam>(
          optim::AdamGroup{.params = p, .lr = 1e-3}.to_torch(adam), adam),
      IsEmpty());
  const c10::WarningUtils::WarnAlways always;
  const testing::KeptWarnings warnings;
  optim::SGD ours(std::vector<optim::SGDGroup>{{.params = p, .momentum = 0}},
                  optim::SGDOptions{.momentum = 0.9});
  optim::SGD same(ours.param_groups(), optim::SGDOptions{.momentum = 0.9});
  EXPECT_THAT(warnings.texts(), IsEmpty());
}

TEST(FusedOptimizers, AGroupWithOptionsOfAnotherOptimizerIsRefused) {
  const auto p = torch::ones({2}).requires_grad_();
  const OptimizerParamGroup group(
      {p}, std::make_unique<torch::optim::AdamOptions>());
  const auto refuses = ThrowsMessage<std::invalid_argument>(
      AllOf(HasSubstr("AdamW: a parameter group has options of type "
                      "torch::optim::AdamOptions; give it "
                      "torch::optim::AdamWOptions")));
  EXPECT_THAT([&] { optim::AdamW(std::vector<OptimizerParamGroup>{group}); },
              refuses);
  optim::AdamW optimizer(std::vector<at::Tensor>{});
  EXPECT_THAT([&] { optimizer.add_param_group(group); }, refuses);
  EXPECT_EQ(optimizer.param_groups().size(), 1);
}

template <class Optimizer, class Options>
void expect_pairs_of_reals(const Options& options, at::ScalarType dtype) {
  torch::manual_seed(6);
  const auto start = torch::randn({5, 7}, at::kComplexDouble).to(dtype);
  auto complex = start.clone().requires_grad_();
  auto real = torch::view_as_real(start).clone().requires_grad_();
  auto beside = torch::ones({9}, real.options()).requires_grad_();
  Optimizer ours(std::vector<at::Tensor>{complex, beside}, options);
  Optimizer pairs(std::vector<at::Tensor>{real}, options);
  for (int step = 0; step < 6; ++step) {
    auto gradient = torch::randn({5, 7}, at::kComplexDouble).to(dtype);
    // A lazy conjugate in other strides.
    if (step % 2 == 1) gradient = gradient.t().contiguous().t();
    if (step > 2) gradient = gradient.conj();
    complex.mutable_grad() = gradient;
    beside.mutable_grad() = torch::ones_like(beside);
    real.mutable_grad() = torch::view_as_real(gradient.resolve_conj());
    ours.step();
    pairs.step();
    EXPECT_TRUE(torch::view_as_real(complex.detach()).equal(real)) << step;
    if (step != 3) continue;
    const auto state = state_dict(ours);
    for (const auto& tensor : state_tensors(ours)) {
      EXPECT_TRUE(tensor.scalar_type() == dtype || tensor.size(0) == 9);
    }
    load_state_dict(ours, state);
  }
  EXPECT_TRUE(torch::imag(complex.detach() - start).ne(0).all().item<bool>());
}

// They were refused with the advice to take LibTorch's optimizers, which never
// step the imaginary part as Python does.
TEST(FusedOptimizers, ComplexNumbersStepAsPairsOfReals) {
  for (const auto dtype : {at::kComplexFloat, at::kComplexDouble}) {
    expect_pairs_of_reals<optim::SGD>(
        torch::optim::SGDOptions(0.1).weight_decay(0.1), dtype);
    expect_pairs_of_reals<optim::SGD>(
        torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true), dtype);
    expect_pairs_of_reals<optim::Adam>(
        optim::AdamOptions{.weight_decay = 0.1, .amsgrad = true}, dtype);
    expect_pairs_of_reals<optim::AdamW>(optim::AdamWOptions{}, dtype);
  }
  expect_pairs_of_reals<optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9),
                                    at::kComplexHalf);
}

// The sharded optimizer relies on this.
template <class Optimizer>
void expect_same_in_pieces(at::ScalarType dtype) {
  torch::manual_seed(5);
  const auto start = torch::randn({1000}).to(dtype);
  auto whole = start.clone().requires_grad_();
  auto memory = start.clone();
  std::vector<at::Tensor> pieces;
  for (const auto& [from, to] :
       {std::pair{0, 64}, {64, 640}, {640, 704}, {704, 1000}}) {
    pieces.push_back(memory.slice(0, from, to).detach().requires_grad_());
  }
  Optimizer one({whole}), several(pieces);
  for (int step = 0; step < 10; ++step) {
    whole.mutable_grad() = torch::randn({1000}).to(dtype);
    int64_t at = 0;
    for (auto& piece : pieces) {
      piece.mutable_grad() = whole.grad().narrow(0, at, piece.numel());
      at += piece.numel();
    }
    one.step();
    several.step();
  }
  EXPECT_TRUE(whole.detach().equal(memory)) << dtype;
}

TEST(FusedOptimizers, PiecesStepLikeTheWhole) {
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    expect_same_in_pieces<optim::SGD>(dtype);
    expect_same_in_pieces<optim::Adam>(dtype);
    expect_same_in_pieces<optim::AdamW>(dtype);
  }
}

TEST(FusedOptimizers, StateGoesOnThroughSnapshotsAndArchives) {
  Net through, second, third;
  optim::AdamW straight(through.parameters(), {.lr = 0.02, .amsgrad = true});
  through.train(straight, 0, 3);
  const auto state = state_dict(straight);
  std::stringstream archive;
  torch::save(straight, archive);
  for (Net* net : {&second, &third}) {
    torch::NoGradGuard no_grad;
    torch::nn::utils::vector_to_parameters(through.flat(), net->parameters());
  }
  // The state includes the options.
  optim::AdamW restored(second.parameters());
  load_state_dict(restored, state);
  optim::AdamW loaded(third.parameters());
  torch::load(loaded, archive);
  through.train(straight, 3, 6);
  second.train(restored, 3, 6);
  third.train(loaded, 3, 6);
  EXPECT_TRUE(second.flat().equal(through.flat()));
  EXPECT_TRUE(third.flat().equal(through.flat()));
}

template <class Optimizer>
void expect_saved_maximize(typename Optimizer::Options options = {}) {
  Net net;
  options.maximize = true;
  Optimizer up(net.parameters(), options);
  const OptimizerState state = state_dict(up);
  EXPECT_TRUE(std::get<bool>(state.param_groups[0].options.at("maximize")));
  load_state_dict(up, state);
  options.maximize = false;
  Optimizer down(net.parameters(), options);
  EXPECT_THAT([&] { load_state_dict(down, state); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("it was saved with maximize=True"),
                        HasSubstr("lockstep::optim::SGDOptions"))));
  EXPECT_THAT([&] { load_state_dict(up, state_dict(down)); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("it was saved with maximize=False")));
}

// Every snapshot had False, and one that had True could not be loaded.
TEST(FusedOptimizers, SnapshotsHoldMaximize) {
  expect_saved_maximize<optim::SGD>();
  expect_saved_maximize<optim::Adam>();
  expect_saved_maximize<optim::AdamW>();
}

TEST(FusedOptimizers, StateGoesToLibTorchsOwn) {
  Net net;
  optim::Adam ours(net.parameters());
  net.train(ours, 0, 2);
  torch::optim::Adam theirs(net.parameters());
  load_state_dict(theirs, state_dict(ours));
  EXPECT_EQ(theirs.state().size(), 4);
}

}  // namespace
}  // namespace lockstep::internal
