// The sharded optimizer over a list of parameters whose gradients are whole on
// every rank: the same bits as the plain optimizer.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/zero_training.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::optim::OptimizerParamGroup;
using namespace lockstep::internal::testing;

template <class Optimizer>
void expect_same_bits(const ProcessGroupPtr& group,
                      typename ShardingTraits<Optimizer>::Options options,
                      ZeroRedundancyOptions zero = {},
                      torch::Dtype dtype = torch::kFloat) {
  ZeroNet plain_net(dtype), sharded_net(dtype);
  Optimizer plain(plain_net->parameters(), options);
  ZeroRedundancyOptimizer<Optimizer> sharded(sharded_net->parameters(), options,
                                             zero);
  averaged_steps(plain_net, plain, 0, kZeroSteps, group);
  averaged_steps(sharded_net, sharded, 0, kZeroSteps, group);
  EXPECT_TRUE(flat_parameters(*sharded_net).equal(flat_parameters(*plain_net)));
  EXPECT_FALSE(
      flat_parameters(*plain_net).equal(flat_parameters(*ZeroNet(dtype))));
}

WORLD_TEST(ZeroOptimizer, FusedKindsGiveTheSameBits, 1, 2, 3) {
  auto group = init_process_group();
  expect_same_bits<optim::SGD>(group.get(),
                               {.lr = 0.05, .momentum = 0.9, .nesterov = true});
  expect_same_bits<optim::SGD>(group.get(), {.lr = 0.05, .maximize = true});
  expect_same_bits<optim::Adam>(group.get(), {.amsgrad = true});
  expect_same_bits<optim::AdamW>(group.get(), {.weight_decay = 0.1});
  expect_same_bits<optim::AdamW>(group.get(), {}, {}, torch::kBFloat16);
  expect_same_bits<optim::AdamW>(group.get(), {}, {}, torch::kDouble);
}

WORLD_TEST(ZeroOptimizer, LibTorchsKindsGiveTheSameBits, 2, 3) {
  auto group = init_process_group();
  expect_same_bits<torch::optim::SGD>(
      group.get(), torch::optim::SGDOptions(0.05).momentum(0.9));
  expect_same_bits<torch::optim::Adam>(group.get(), {});
  expect_same_bits<torch::optim::AdamW>(group.get(), {});
  expect_same_bits<torch::optim::RMSprop>(
      group.get(), torch::optim::RMSpropOptions(1e-3).centered(true));
  expect_same_bits<torch::optim::Adagrad>(
      group.get(),
      torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1));
}

WORLD_TEST(ZeroOptimizer, UncutParametersGiveTheSameBits, 2, 3) {
  auto group = init_process_group();
  expect_same_bits<optim::AdamW>(group.get(), {}, {.cut_parameters = false});
}

WORLD_TEST(ZeroOptimizer, WorksOverGloo, 2) {
  auto group = init_process_group("gloo");
  expect_same_bits<optim::AdamW>(group.get(), {});
}

// Needs the norm and the shape of the whole parameter.
class Trust : public torch::optim::Optimizer {
 public:
  using Options = torch::optim::SGDOptions;
  Trust(const std::vector<OptimizerParamGroup>& groups, const Options& options)
      : Optimizer(groups, std::make_unique<Options>(options)) {}
  Trust(const std::vector<at::Tensor>& parameters, const Options& options)
      : Trust(std::vector<OptimizerParamGroup>{parameters}, options) {}
  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      const double lr = group.options().get_lr();
      for (auto& p : group.params()) {
        if (!p.grad().defined()) continue;
        if (p.sizes() != p.grad().sizes()) throw std::logic_error("shape");
        p.sub_(p.grad() * (lr * (p.norm() / (p.grad().norm() + 1e-6))));
      }
    }
    return {};
  }
};

WORLD_TEST(ZeroOptimizer, KindsThatLookAtWholeParametersGetThem, 1, 2, 3) {
  auto group = init_process_group();
  expect_same_bits<Trust>(group.get(), torch::optim::SGDOptions(0.01));
}

WORLD_TEST(ZeroOptimizer, LargeUncutParametersAreBroadcast, 2) {
  auto group = init_process_group();
  auto a = torch::ones({1 << 19}).requires_grad_();
  auto b = torch::ones({1 << 18}).requires_grad_();
  ZeroRedundancyOptimizer<optim::SGD> optimizer(
      std::vector<at::Tensor>{a, b}, {.lr = 0.5}, {.cut_parameters = false});
  a.mutable_grad() = torch::ones_like(a);
  b.mutable_grad() = torch::ones_like(b);
  optimizer.step();
  EXPECT_TRUE(a.detach().equal(torch::full({1 << 19}, 0.5)));
  EXPECT_TRUE(b.detach().equal(torch::full({1 << 18}, 0.5)));
}

WORLD_TEST(ZeroOptimizer, StateIsDividedByTheRanks, 2, 3) {
  auto group = init_process_group();
  ZeroNet net;
  ZeroRedundancyOptimizer<optim::AdamW> optimizer(net->parameters());
  averaged_steps(net, optimizer, 0, 1, group.get());
  const int64_t whole = 2 * flat_parameters(*net).nbytes();
  const int64_t mine = state_bytes(optimizer.local_optimizer());
  EXPECT_NEAR(static_cast<double>(mine),
              static_cast<double>(whole) / world.size, 0.02 * whole);
  auto all = torch::full({}, mine);
  all_reduce(all);
  EXPECT_EQ(all.item<int64_t>(), whole);
  EXPECT_TRUE(optimizer.state().empty());
}

std::vector<OptimizerParamGroup> two_groups(const ZeroNet& net) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(net->first->parameters());
  groups.emplace_back(net->second->parameters(),
                      std::make_unique<torch::optim::AdamWOptions>(
                          torch::optim::AdamWOptions(0.02).weight_decay(0.3)));
  return groups;
}

template <class Optimizer>
void steps_with_groups(const ZeroNet& net, Optimizer& optimizer,
                       const ProcessGroupPtr& group) {
  net->first->bias.set_requires_grad(false);
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  for (int step = 0; step < kZeroSteps; ++step) {
    if (step == 5) {
      optimizer.add_param_group(OptimizerParamGroup(net->last->parameters()));
    }
    averaged_steps(net, optimizer, step, step + 1, group);
    // LibTorch's schedulers keep as many rates as there were groups at first.
    if (step < 5) scheduler.step();
  }
  EXPECT_LT(optimizer.param_groups()[1].options().get_lr(), 0.02);
}

WORLD_TEST(ZeroOptimizer, GroupsSchedulersAndFrozenParameters, 1, 2, 3) {
  auto group = init_process_group();
  ZeroNet plain_net, sharded_net;
  optim::AdamW plain(two_groups(plain_net), {.lr = 0.01});
  ZeroRedundancyOptimizer<optim::AdamW> sharded(two_groups(sharded_net),
                                                {.lr = 0.01});
  steps_with_groups(plain_net, plain, group.get());
  steps_with_groups(sharded_net, sharded, group.get());
  EXPECT_EQ(sharded.param_groups().size(), 3);
  EXPECT_TRUE(flat_parameters(*sharded_net).equal(flat_parameters(*plain_net)));
  EXPECT_TRUE(sharded_net->first->bias.equal(ZeroNet()->first->bias));
}

template <class Optimizer, class Options>
void expect_groups_of_the_class(const Options& defaults,
                                const ProcessGroupPtr& group) {
  const auto last = [](const ZeroNet& net) {
    return OptimizerParamGroup(net->last->parameters(),
                               std::make_unique<torch::optim::AdamWOptions>(
                                   torch::optim::AdamWOptions(0.03)));
  };
  const auto groups = [&](const ZeroNet& net) {
    auto both = two_groups(net);
    auto& second = static_cast<torch::optim::AdamWOptions&>(both[1].options());
    second.weight_decay(0.01);  // as in options that were not set
    return both;
  };
  ZeroNet plain_net, net;
  Optimizer plain(groups(plain_net), defaults);
  ZeroRedundancyOptimizer<Optimizer> sharded(groups(net), defaults);
  plain.add_param_group(last(plain_net));
  sharded.add_param_group(last(net));
  averaged_steps(plain_net, plain, 0, 3, group);
  averaged_steps(net, sharded, 0, 3, group);
  EXPECT_TRUE(flat_parameters(*net).equal(flat_parameters(*plain_net)));
  // A scheduler may come to the rate of options that were not set.
  sharded.param_groups()[0].options().set_lr(1e-3);
  sharded.consolidate_state_dict(0);
  if (get_rank() != 0) return;
  const auto& options = sharded.state_dict().param_groups[0].options;
  EXPECT_EQ(std::get<double>(options.at("lr")), 1e-3);
}

// Groups whose options equal the defaults of their class had the optimizer's,
// where the optimizer alone keeps them, and snapshots had other rates.
WORLD_TEST(ZeroOptimizer, GroupsHaveTheOptionsThatTheirClassGivesThem, 1, 2) {
  auto group = init_process_group();
  expect_groups_of_the_class<optim::AdamW>(
      optim::AdamWOptions{.lr = 0.01, .weight_decay = 0.5}, group.get());
  expect_groups_of_the_class<torch::optim::AdamW>(
      torch::optim::AdamWOptions(0.01).weight_decay(0.5), group.get());
}

WORLD_TEST(ZeroOptimizer, GroupsAddedToTheBaseClassAreTakenUp, 2) {
  auto group = init_process_group();
  ZeroNet plain_net, net;
  torch::optim::Adagrad plain(plain_net->parameters());
  ZeroRedundancyOptimizer<torch::optim::Adagrad> optimizer(
      net->first->parameters());
  torch::optim::Optimizer& base = optimizer;
  base.add_param_group(OptimizerParamGroup(net->second->parameters()));
  base.add_param_group(OptimizerParamGroup(net->last->parameters()));
  averaged_steps(plain_net, plain, 0, 3, group.get());
  averaged_steps(net, optimizer, 0, 3, group.get());
  EXPECT_TRUE(flat_parameters(*net).equal(flat_parameters(*plain_net)));
}

WORLD_TEST(ZeroOptimizer, ShardsAreTheGradientsOnceOverAllRanks, 1, 2, 3) {
  auto group = init_process_group();
  ZeroNet net;
  ZeroRedundancyOptimizer<optim::SGD> optimizer(net->parameters(), {.lr = 1});
  EXPECT_TRUE(optimizer.gradient_shards().empty());
  averaged_backward(net, 0, group.get());
  auto squares = torch::zeros({}, torch::kDouble);
  for (auto& shard : optimizer.gradient_shards()) {
    squares += shard.to(torch::kDouble).square().sum();
  }
  all_reduce(squares);
  double expected = 0;
  for (const auto& p : net->parameters()) {
    expected += p.grad().to(torch::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(squares.item<double>(), expected, 1e-12 * expected);
  // step() uses the values that are written into the shards.
  for (auto& shard : optimizer.gradient_shards()) shard.zero_();
  optimizer.step();
  EXPECT_TRUE(flat_parameters(*net).equal(flat_parameters(*ZeroNet())));
}

WORLD_TEST(ZeroOptimizer, StepWithoutGradientsChangesNothing, 2) {
  auto group = init_process_group();
  ZeroNet net;
  ZeroRedundancyOptimizer<optim::AdamW> optimizer(net->parameters());
  optimizer.step();
  EXPECT_TRUE(flat_parameters(*net).equal(flat_parameters(*ZeroNet())));
  EXPECT_TRUE(optimizer.local_optimizer().state().empty());
}

WORLD_TEST(ZeroOptimizer, GradientsOfOtherStridesAreStepped, 2) {
  auto group = init_process_group();
  auto p = torch::zeros({200, 300}).requires_grad_();
  ZeroRedundancyOptimizer<optim::SGD> optimizer(std::vector<at::Tensor>{p},
                                                {.lr = 1});
  const auto gradient = torch::arange(60000.0).view({200, 300});
  p.mutable_grad() = gradient.t().contiguous().t();
  optimizer.step();
  EXPECT_TRUE(p.detach().equal(-gradient));
}

WORLD_TEST(ZeroOptimizer, ParametersThatWereMovedAreFollowed, 2) {
  auto group = init_process_group();
  ZeroNet plain_net, net;
  optim::AdamW plain(plain_net->parameters());
  ZeroRedundancyOptimizer<optim::AdamW> optimizer(net->parameters());
  averaged_steps(plain_net, plain, 0, 2, group.get());
  averaged_steps(net, optimizer, 0, 2, group.get());
  for (auto& p : net->parameters()) p.set_data(p.detach().clone());
  averaged_steps(plain_net, plain, 2, 4, group.get());
  averaged_steps(net, optimizer, 2, 4, group.get());
  EXPECT_TRUE(flat_parameters(*net).equal(flat_parameters(*plain_net)));
}

WORLD_TEST(ZeroOptimizer, AGraphThatHoldsSteppedParametersNotices, 2) {
  auto group = init_process_group();
  ZeroNet net;
  ZeroRedundancyOptimizer<optim::SGD> optimizer(net->parameters());
  auto loss = zero_loss(net(zero_batch(0, 0, torch::kFloat)));
  loss.backward({}, true);
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

// Notes the versions of the whole parameters that are stepped.
struct WatchingSgd : torch::optim::SGD {
  using Options = torch::optim::SGDOptions;
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    for (const at::Tensor& piece : param_groups()[0].params()) {
      if (!piece.grad().defined()) continue;
      for (const at::Tensor& whole : watched) {
        if (whole.const_data_ptr() != piece.const_data_ptr()) continue;
        versions.push_back(whole._version());
      }
    }
    return torch::optim::SGD::step(std::move(closure));
  }
  inline static std::vector<at::Tensor> watched;
  inline static std::vector<int64_t> versions;
};

// The versions were raised after the step: a snapshot whose copy ended during
// the step was torn and counted as good.
WORLD_TEST(ZeroOptimizer, VersionsAreRaisedBeforeAnythingIsWritten, 1) {
  auto group = init_process_group();
  const auto expect_raised = [](torch::optim::Optimizer& optimizer,
                                const std::vector<at::Tensor>& parameters,
                                const auto& backward) {
    WatchingSgd::watched = parameters;
    WatchingSgd::versions.clear();
    const auto before = parameters[0]._version();
    backward();
    optimizer.step();
    EXPECT_EQ(WatchingSgd::versions.size(), parameters.size());
    for (const auto version : WatchingSgd::versions) EXPECT_GT(version, before);
    EXPECT_GT(parameters[0]._version(), before);
    WatchingSgd::watched.clear();
  };
  using Zero = ZeroRedundancyOptimizer<WatchingSgd>;
  ZeroNet net;
  Zero plain(net->parameters(), torch::optim::SGDOptions(0.1));
  expect_raised(plain, net->parameters(),
                [&] { averaged_backward(net, 0, group.get()); });
  for (const bool in_backward : {false, true}) {
    DistributedDataParallel<ZeroNet> model(ZeroNet{});
    Zero of_ddp(model, torch::optim::SGDOptions(0.1),
                {.step_in_backward = in_backward});
    expect_raised(of_ddp, model->parameters(), [&] {
      zero_loss(model(zero_batch(0, 0, torch::kFloat))).backward();
    });
  }
}

// The state of an element was that of another one afterwards.
WORLD_TEST(ZeroOptimizer, AnotherOrderInMemoryIsRefused, 2) {
  auto group = init_process_group();
  auto p = torch::ones({80, 30, 3, 3}).requires_grad_();
  auto thin = torch::ones({80, 30, 1, 1}).requires_grad_();
  ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      std::vector<at::Tensor>{p, thin}, torch::optim::AdamWOptions(0.1));
  const auto step = [&] {
    for (auto* each : {&p, &thin})
      each->mutable_grad() = torch::ones_like(*each);
    optimizer.step();
  };
  step();
  // The same order: strides of dimensions of size 1 do not matter.
  thin.set_data(
      thin.detach().clone().as_strided({80, 30, 1, 1}, {30, 1, 7, 9}));
  step();
  const auto before = p.detach().contiguous(at::MemoryFormat::ChannelsLast);
  p.set_data(before.clone());
  EXPECT_THAT(step, ThrowsMessage<std::invalid_argument>(
                        AllOf(HasSubstr("strides [270, 1, 90, 30]"),
                              HasSubstr("convert the module before"))));
  EXPECT_TRUE(p.detach().equal(before));
  p.set_data(torch::ones({80, 30, 3, 4}));
  EXPECT_THAT(step, ThrowsMessage<std::invalid_argument>(
                        HasSubstr("sizes [80, 30, 3, 4]")));
}

static_assert(!Shardable<torch::optim::LBFGS>);
static_assert(std::is_same_v<DistributedOptimizer<optim::SGD>,
                             ZeroRedundancyOptimizer<optim::SGD>>);

// module->parameters() names a tied tensor twice; Python's names it once.
WORLD_TEST(ZeroOptimizer, AParameterListedTwiceIsSteppedOnce, 1, 2) {
  auto group = init_process_group();
  using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  ZeroNet net, same;
  auto tied = net->parameters();
  tied.push_back(tied.front());
  Zero twice(tied, options);
  Zero once(same->parameters(), options);
  averaged_steps(net, twice, 0, 3, group.get());
  averaged_steps(same, once, 0, 3, group.get());
  EXPECT_TRUE(flat_parameters(*net).equal(flat_parameters(*same)));
  EXPECT_EQ(twice.param_groups()[0].params().size(), 6);
  twice.consolidate_state_dict();
  if (world.rank == 0) {
    EXPECT_EQ(twice.state_dict().param_groups[0].params.size(), 6);
    EXPECT_EQ(twice.state_dict().state.size(), 6);
  }
  auto more = torch::ones({8}).requires_grad_();
  twice.add_param_group(OptimizerParamGroup({more, more}));
  EXPECT_EQ(twice.param_groups()[1].params().size(), 1);
}

WORLD_TEST(ZeroOptimizer, MistakesAreRefusedOnAllRanks, 2) {
  auto group = init_process_group();
  using Zero = ZeroRedundancyOptimizer<optim::SGD>;
  ZeroNet net;
  const auto refused = [](const char* words) {
    return ThrowsMessage<std::invalid_argument>(HasSubstr(words));
  };
  EXPECT_THAT([&] { Zero(net->parameters(), {}, {.shared_parameters = true}); },
              refused("shared_parameters needs a DistributedDataParallel"));
  EXPECT_THAT([&] { Zero(net->parameters(), {}, {.step_in_backward = true}); },
              refused("step_in_backward needs a DistributedDataParallel"));
  auto some = net->parameters();
  if (world.rank == 1) some.pop_back();
  EXPECT_THAT([&] { Zero{some}; }, refused("nothing on rank 1"));
  // Each rank stepped its part with its own.
  EXPECT_THAT(
      [&] { Zero(net->parameters(), {.lr = world.rank == 0 ? 0.1 : 0.2}); },
      refused("the learning rate of group 0"));

  Zero optimizer(net->first->parameters());
  EXPECT_THAT(
      [&] {
        optimizer.add_param_group(OptimizerParamGroup(net->parameters()));
      },
      refused("more than one"));
  EXPECT_EQ(optimizer.param_groups().size(), 1);
  std::ostringstream stream;
  EXPECT_THROW(torch::save(optimizer, stream), std::logic_error);
  EXPECT_THROW(optimizer.state_dict(), std::logic_error);
  EXPECT_THAT([&] { optimizer.consolidate_state_dict(2); },
              refused("no rank 2"));

  auto sparse = torch::zeros({40000}).requires_grad_();
  Zero embedding(std::vector<at::Tensor>{sparse});
  sparse.mutable_grad() = torch::ones({40000}).to_sparse();
  EXPECT_THAT([&] { embedding.step(); }, refused("sparse gradient"));
}

}  // namespace
}  // namespace lockstep::internal
