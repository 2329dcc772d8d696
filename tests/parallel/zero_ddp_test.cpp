// The sharded optimizer over the gradients of a DistributedDataParallel, which
// then go only to the rank that steps them. The results have the same bits as
// those of the plain optimizer with a wrapper of its own.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
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

using Model = DistributedDataParallel<ZeroNet>;
using Zero = ZeroRedundancyOptimizer<optim::AdamW>;

// Several buckets, whose ends differ from those of the partition's parts.
const DistributedDataParallelOptions kBuckets{.bucket_cap_mb = 0.06,
                                              .first_bucket_mb = 0.002};

void train(Model& model, torch::optim::Optimizer& optimizer, int rank, int from,
           int to, bool set_to_none = true) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad(set_to_none);
    zero_loss(model(zero_batch(step, rank, torch::kFloat))).backward();
    optimizer.step();
  }
}

at::Tensor plainly_trained(int rank, int steps) {
  Model model(ZeroNet(), kBuckets);
  optim::AdamW optimizer(model->parameters(), {.lr = 0.01});
  train(model, optimizer, rank, 0, steps);
  return flat_parameters(*model.module());
}

void expect_same_bits(const World& world, const ZeroRedundancyOptions& options,
                      bool set_to_none = true) {
  Model model(ZeroNet(), kBuckets);
  Zero optimizer(model, {.lr = 0.01}, options);
  train(model, optimizer, world.rank, 0, kZeroSteps, set_to_none);
  optimizer.synchronize();
  EXPECT_TRUE(flat_parameters(*model.module())
                  .equal(plainly_trained(world.rank, kZeroSteps)));
}

WORLD_TEST(ZeroDdp, PrivateParametersGiveTheSameBits, 1, 2, 3) {
  auto group = init_process_group();
  expect_same_bits(world, {});
  expect_same_bits(world, {}, false);
  expect_same_bits(world, {.cut_parameters = false});
}
WORLD_TEST(ZeroDdp, SharedParametersGiveTheSameBits, 1, 2, 3) {
  auto group = init_process_group();
  expect_same_bits(world, {.shared_parameters = true});
  expect_same_bits(world, {.shared_parameters = true}, false);
}
WORLD_TEST(ZeroDdp, StepInBackwardGivesTheSameBits, 1, 2, 3) {
  auto group = init_process_group();
  expect_same_bits(world, {.step_in_backward = true});
}
// Uses `second` in even steps only.
struct SometimesImpl : torch::nn::Module {
  SometimesImpl() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(8, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x, int step) {
    const auto y = first->forward(x).tanh();
    return step % 2 == 0 ? second->forward(y).tanh() : y;
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Sometimes);

// Regression: with step_in_backward an unused parameter with a gradient of
// zeros was not stepped, so its moments and weight decay stood still.
WORLD_TEST(ZeroDdp, UnusedParametersAreSteppedIfTheyHaveAGradient, 1, 2, 3) {
  auto group = init_process_group();
  for (bool set_to_none : {false, true}) {
    const auto trained = [&](auto make) {
      DistributedDataParallel<Sometimes> model(
          Sometimes(),
          {.first_bucket_mb = 0.0001, .find_unused_parameters = true});
      auto optimizer = make(model);
      for (int step = 0; step < 5; ++step) {
        optimizer->zero_grad(set_to_none);
        torch::manual_seed(uint64_t{100} + static_cast<uint64_t>(step) * 10 +
                           static_cast<uint64_t>(world.rank));
        zero_loss(model(torch::randn({2, 8}), step)).backward();
        optimizer->step();
      }
      return flat_parameters(*model.module());
    };
    const auto plain = trained([](auto& model) {
      return std::make_unique<optim::AdamW>(model->parameters(),
                                            optim::AdamWOptions{.lr = 0.01});
    });
    for (bool in_backward : {false, true}) {
      const auto sharded = trained([&](auto& model) {
        return std::make_unique<Zero>(
            model, optim::AdamWOptions{.lr = 0.01},
            ZeroRedundancyOptions{.step_in_backward = in_backward});
      });
      EXPECT_TRUE(sharded.equal(plain)) << set_to_none << in_backward;
    }
  }
}

WORLD_TEST(ZeroDdp, WithoutSharedMemoryGradientsAreWhole, 2) {
  auto group = init_process_group("gloo");
  expect_same_bits(world, {});
}

WORLD_TEST(ZeroDdp, SharedParametersAreOneCopy, 2, 3) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  Zero optimizer(model, {}, {.shared_parameters = true});
  auto weight = model.module()->first->weight;
  barrier();
  if (world.rank == 0) {
    const torch::NoGradGuard no_grad;
    weight.fill_(3);
  }
  barrier();
  EXPECT_TRUE(weight.detach().equal(torch::full({201, 64}, 3.0)));
  EXPECT_TRUE(weight.requires_grad());
  barrier();
}

// The next forward of the other ranks waits for a rank that steps its part
// late.
WORLD_TEST(ZeroDdp, ForwardWaitsForRanksThatStepLate, 2, 3) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  Zero optimizer(model, {.lr = 0.01}, {.shared_parameters = true});
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    zero_loss(model(zero_batch(step, world.rank, torch::kFloat))).backward();
    if (step % world.size == world.rank) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    optimizer.step();
  }
  optimizer.synchronize();
  EXPECT_TRUE(
      flat_parameters(*model.module()).equal(plainly_trained(world.rank, 6)));
}

WORLD_TEST(ZeroDdp, SharedParametersOutliveOptimizerAndWrapper, 2) {
  auto group = init_process_group();
  ZeroNet net;
  {
    Model model(net, kBuckets);
    Zero optimizer(model, {.lr = 0.01}, {.shared_parameters = true});
    train(model, optimizer, world.rank, 0, 2);
    optimizer.synchronize();
  }
  EXPECT_TRUE(flat_parameters(*net).equal(plainly_trained(world.rank, 2)));
}

WORLD_TEST(ZeroDdp, StateIsDividedByTheRanks, 2, 3) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  Zero optimizer(model);
  train(model, optimizer, world.rank, 0, 1);
  const auto whole =
      static_cast<double>(2 * flat_parameters(*model.module()).nbytes());
  EXPECT_NEAR(static_cast<double>(state_bytes(optimizer.local_optimizer())),
              whole / world.size, 0.02 * whole);
}

WORLD_TEST(ZeroDdp, AccumulationClippingAndShards, 1, 2, 3) {
  auto group = init_process_group();
  const auto run = [&](bool sharded) {
    Model model(ZeroNet(), kBuckets);
    std::optional<Zero> zero;
    std::optional<optim::AdamW> plain;
    torch::optim::Optimizer* optimizer;
    if (sharded) {
      optimizer = &zero.emplace(model, optim::AdamWOptions{.lr = 0.01});
    } else {
      optimizer =
          &plain.emplace(model->parameters(), optim::AdamWOptions{.lr = 0.01});
    }
    for (int step = 0; step < 6; ++step) {
      optimizer->zero_grad();
      {
        auto local = model.no_sync();
        zero_loss(model(zero_batch(2 * step, world.rank, torch::kFloat)))
            .backward();
      }
      zero_loss(model(zero_batch(2 * step + 1, world.rank, torch::kFloat)))
          .backward();
      std::vector<at::Tensor> gradients;
      if (sharded) {
        gradients = zero->gradient_shards();
      } else {
        for (auto& p : model->parameters()) gradients.push_back(p.grad());
      }
      for (auto& gradient : gradients) gradient.clamp_(-1e-3, 1e-3);
      optimizer->step();
    }
    return flat_parameters(*model.module());
  };
  EXPECT_TRUE(run(true).equal(run(false)));
}

WORLD_TEST(ZeroDdp, GroupsFrozenParametersAndSchedulers, 1, 2, 3) {
  auto group = init_process_group();
  const auto groups = [](Model& model) {
    std::vector<OptimizerParamGroup> all;
    all.emplace_back(model.module()->first->parameters());
    all[0].params().pop_back();  // the bias is frozen
    all.emplace_back(model.module()->last->parameters(),
                     std::make_unique<torch::optim::AdamWOptions>(
                         torch::optim::AdamWOptions(0.03)));
    all.emplace_back(model.module()->second->parameters());
    return all;
  };
  const auto run = [&](Model& model, auto& optimizer) {
    torch::optim::StepLR scheduler(optimizer, 2, 0.5);
    for (int step = 0; step < 8; ++step) {
      train(model, optimizer, world.rank, step, step + 1);
      if (step < 4) scheduler.step();
    }
  };
  const auto frozen = [] {
    ZeroNet net;
    net->first->bias.set_requires_grad(false);
    return net;
  };
  Model plain_model(frozen(), kBuckets);
  optim::AdamW plain(groups(plain_model), {.lr = 0.01});
  run(plain_model, plain);
  const auto expected = flat_parameters(*plain_model.module());
  for (bool shared : {false, true}) {
    Model model(frozen(), kBuckets);
    Zero zero(model, groups(model), {.lr = 0.01},
              {.shared_parameters = shared});
    run(model, zero);
    zero.synchronize();
    EXPECT_TRUE(flat_parameters(*model.module()).equal(expected)) << shared;
  }
}

struct EmbeddedImpl : torch::nn::Module {
  EmbeddedImpl() {
    torch::manual_seed(1);
    rows = register_module(
        "rows",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(40, 64).sparse(true)));
    wide = register_module("wide", torch::nn::Linear(64, 201));
  }
  at::Tensor forward(const at::Tensor& ids) {
    return wide->forward(rows->forward(ids));
  }
  torch::nn::Embedding rows{nullptr};
  torch::nn::Linear wide{nullptr};
};
TORCH_MODULE(Embedded);
using EmbeddedModel = DistributedDataParallel<Embedded>;

// Regression: with shared_parameters, a sparse embedding outside of the groups
// was in the memory of all ranks, too, so that its own optimizer stepped it
// once for each rank.
WORLD_TEST(ZeroDdp, ASparseEmbeddingMayHaveAnOptimizerOfItsOwn, 1, 2, 3) {
  auto group = init_process_group();
  const auto trained = [&](auto make) {
    EmbeddedModel model{Embedded()};
    auto optimizer = make(model);
    torch::optim::SGD of_rows(model.module()->rows->parameters(), 0.5);
    for (int step = 0; step < 6; ++step) {
      optimizer->zero_grad();
      of_rows.zero_grad();
      zero_loss(model(torch::arange(4) + 3 * world.rank + step)).backward();
      // Either may come first.
      if (step % 2 == 0) of_rows.step();
      optimizer->step();
      if (step % 2 != 0) of_rows.step();
    }
    if (auto* zero = dynamic_cast<Zero*>(&*optimizer)) zero->synchronize();
    return flat_parameters(*model.module());
  };
  const auto expected = trained([](auto& model) {
    return std::make_unique<optim::AdamW>(model.module()->wide->parameters(),
                                          optim::AdamWOptions{.lr = 0.01});
  });
  for (const ZeroRedundancyOptions& options :
       {ZeroRedundancyOptions{},
        ZeroRedundancyOptions{.shared_parameters = true},
        ZeroRedundancyOptions{.step_in_backward = true}}) {
    const auto sharded = trained([&](auto& model) {
      std::vector<OptimizerParamGroup> groups;
      groups.emplace_back(model.module()->wide->parameters());
      return std::make_unique<Zero>(model, groups,
                                    optim::AdamWOptions{.lr = 0.01}, options);
    });
    EXPECT_TRUE(sharded.equal(expected)) << options.shared_parameters;
  }
}

// Regression: only the rank that owned the embedding refused its gradient; the
// others waited in step() until the timeout.
WORLD_TEST(ZeroDdp, ASparseGradientIsRefusedOnEveryRank, 2, 3) {
  auto group = init_process_group("", {.timeout = std::chrono::seconds(10)});
  const auto refused = ThrowsMessage<std::invalid_argument>(
      HasSubstr("leave its parameters out of the groups"));
  const auto ids = torch::arange(4);
  {
    EmbeddedModel model{Embedded()};
    Zero optimizer(model);
    zero_loss(model(ids)).backward();
    EXPECT_THAT([&] { optimizer.gradient_shards(); }, refused);
    EXPECT_THAT([&] { optimizer.step(); }, refused);
    barrier();
  }
  EmbeddedModel model{Embedded()};
  Zero optimizer(model, {}, {.step_in_backward = true});
  EXPECT_THAT([&] { zero_loss(model(ids)).backward(); }, refused);
  barrier();
}

// Regression: another optimizer got the gradients of parameters in no group,
// which are final in a part only, and the replicas drifted apart.
WORLD_TEST(ZeroDdp, GroupsThatLeaveOutADenseParameterAreRefused, 1, 2) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(model.module()->first->parameters());
  groups.emplace_back(model.module()->last->parameters());
  EXPECT_THAT([&] { Zero(model, groups); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("'second.weight'"),
                        HasSubstr("is in no parameter group"))));
}

WORLD_TEST(ZeroDdp, SharedStateGoesOnPlainly, 2) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  Zero zero(model, {.lr = 0.01}, {.shared_parameters = true});
  train(model, zero, world.rank, 0, 5);
  zero.consolidate_state_dict(1);
  if (world.rank != 1) return;
  EXPECT_EQ(zero.plain()->state().size(), 6);
}

WORLD_TEST(ZeroDdp, SteppingInBackwardRefusesWhatNeedsGradients, 1, 2) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  Zero optimizer(model, {}, {.step_in_backward = true});
  zero_loss(model(zero_batch(0, world.rank, torch::kFloat))).backward();
  EXPECT_THAT([&] { optimizer.gradient_shards(); },
              ThrowsMessage<std::logic_error>(HasSubstr("step_in_backward")));
  optimizer.step();
}

// The other ranks' parts of a gradient do not contain a gradient.
void expect_refusals(const World& world,
                     const DistributedDataParallelOptions& options) {
  Model model(ZeroNet(), options);
  Zero optimizer(model, {.lr = 0.01});
  const auto backward = [&](int step) {
    zero_loss(model(zero_batch(step, world.rank, torch::kFloat))).backward();
  };
  const auto refused =
      ThrowsMessage<std::logic_error>(HasSubstr("call zero_grad()"));
  // The buckets are rebuilt before the second step, but not before the third.
  for (int step = 0; step < 3; ++step) {
    backward(step);
    optimizer.step();
    if (step == 1) {
      auto local = model.no_sync();
      EXPECT_THAT([&] { backward(step + 1); }, refused);
    } else {
      EXPECT_THAT([&] { backward(step + 1); }, refused);
    }
    optimizer.zero_grad();
  }
  // zero_grad() may also come between forward and backward.
  auto loss = zero_loss(model(zero_batch(3, world.rank, torch::kFloat)));
  optimizer.zero_grad();
  loss.backward();
  optimizer.step();
  loss = zero_loss(model(zero_batch(4, world.rank, torch::kFloat)));
  optimizer.zero_grad(/*set_to_none=*/false);
  loss.backward();
  optimizer.step();
  EXPECT_TRUE(
      flat_parameters(*model.module()).equal(plainly_trained(world.rank, 5)));
}

WORLD_TEST(ZeroDdp, BackwardOnTopOfShardsIsRefused, 1, 2, 3) {
  auto group = init_process_group();
  expect_refusals(world, kBuckets);
  auto options = kBuckets;
  options.gradient_as_bucket_view = false;
  expect_refusals(world, options);
}

// A gradient that autograd has written twice counts as new like one written
// once.
WORLD_TEST(ZeroDdp, AFreshGradientOfIndexingIsNoLeftover, 1, 2) {
  struct RowsImpl : torch::nn::Module {
    RowsImpl() {
      first = register_parameter("first", torch::ones({300, 64}));
      last = register_parameter("last", torch::ones({300, 64}));
    }
    at::Tensor forward(const at::Tensor& ids) {
      // The gradient of `last` is ready first.
      return (first.index({ids}).sin() * last.index({ids})).sum();
    }
    at::Tensor first, last;
  };
  auto group = init_process_group();
  DistributedDataParallel<std::shared_ptr<RowsImpl>> model(
      std::make_shared<RowsImpl>());
  Zero optimizer(model, {.lr = 0.01});
  for (int step = 0; step < 5; ++step) {
    model(torch::arange(8)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

WORLD_TEST(ZeroDdp, AMistakeOfOneRankEndsAll, 2, 3) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(model->parameters());
  const bool errs = world.rank == world.size - 1;
  if (errs) groups.emplace_back(model.module()->first->parameters());
  EXPECT_THAT([&] { Zero(model, groups); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  errs ? "parameter group"
                       : c10::str("rank ", world.size - 1, ": Zero"))));
}

WORLD_TEST(ZeroDdp, OptionsThatDifferAreNamed, 2, 3) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  const bool last = world.rank == world.size - 1;
  EXPECT_THAT([&] { Zero(model, {}, {.step_in_backward = last}); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr(c10::str("rank ", world.size - 1)),
                        HasSubstr("step_in_backward"))));
}

WORLD_TEST(ZeroDdp, RanksWithoutInputsGoOnSteppingTheirParts, 2, 3) {
  auto group = init_process_group();
  const int steps = 3 + 2 * world.rank;
  Model plain_model(ZeroNet(), kBuckets);
  optim::AdamW plain(plain_model->parameters(), {.lr = 0.01});
  plain_model.join([&] { train(plain_model, plain, world.rank, 0, steps); });
  const auto expected = flat_parameters(*plain_model.module());
  for (bool shared : {false, true}) {
    Model model(ZeroNet(), kBuckets);
    Zero zero(model, {.lr = 0.01}, {.shared_parameters = shared});
    join({&model.joinable(), &zero},
         [&] { train(model, zero, world.rank, 0, steps); });
    zero.synchronize();
    EXPECT_TRUE(flat_parameters(*model.module()).equal(expected)) << shared;
  }
}

// Ranks without inputs would not take part in step().
WORLD_TEST(ZeroDdp, AJoinThatDoesNotNameTheOptimizerIsRefused, 2) {
  auto group = init_process_group();
  Model model(ZeroNet(), kBuckets);
  Zero zero(model, {.lr = 0.01});
  EXPECT_THAT(
      [&] { model.join([&] { train(model, zero, world.rank, 0, 1); }); },
      ThrowsMessage<std::logic_error>(HasSubstr("name both")));
}

WORLD_TEST(ZeroDdp, ImpossibleOptionsAreRefusedOnAllRanks, 2) {
  auto group = init_process_group("gloo");
  const auto refused = [](const char* words) {
    return ThrowsMessage<std::invalid_argument>(HasSubstr(words));
  };
  Model model(ZeroNet(), kBuckets);
  EXPECT_THAT([&] { Zero(model, {}, {.shared_parameters = true}); },
              refused("no memory that all its ranks share"));
  EXPECT_THAT(
      [&] {
        Zero(model, {}, {.shared_parameters = true, .step_in_backward = true});
      },
      refused("use one of the two"));
  std::vector<OptimizerParamGroup> foreign;
  foreign.emplace_back(ZeroNet()->parameters());
  EXPECT_THAT([&] { Zero(model, foreign); }, refused("is not trained by"));
  // Regression: the optimizer was made, and the next forward failed.
  model.module()->first->bias.requires_grad_(false);
  EXPECT_THAT([&] { Zero{model}; },
              refused("make the optimizer from a wrapper that is constructed "
                      "after such changes"));
  model.module()->first->bias.requires_grad_(true);
  Model hooked(ZeroNet(), kBuckets);
  hooked.register_comm_hook(
      [](GradBucket& bucket) { return completed_future(bucket.buffer()); });
  EXPECT_THAT([&] { Zero{hooked}; }, refused("communication hook"));
  const auto other = new_group();
  EXPECT_THAT([&] { Zero(model, {}, {.process_group = other}); },
              refused("is not the group of"));
  // The refusals changed nothing: gradients are whole, the wrapper trains as
  // before.
  optim::AdamW plain(model->parameters(), {.lr = 0.01});
  train(model, plain, world.rank, 0, 2);
  EXPECT_TRUE(
      flat_parameters(*model.module()).equal(plainly_trained(world.rank, 2)));
}

// An optimizer from a wrapper with a hook is refused; this is what the error
// advises.
WORLD_TEST(ZeroDdp, WithAHookItIsMadeFromTheParameters, 2) {
  auto group = init_process_group();
  Model hooked(ZeroNet(), kBuckets);
  hooked.register_comm_hook(allreduce_hook());
  Zero optimizer(hooked.module()->parameters(), {.lr = 0.01});
  train(hooked, optimizer, world.rank, 0, kZeroSteps);
  EXPECT_TRUE(flat_parameters(*hooked.module())
                  .allclose(plainly_trained(world.rank, kZeroSteps)));
}

}  // namespace
}  // namespace lockstep::internal
