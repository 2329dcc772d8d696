#include "lockstep/parallel/module/wrapped_module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/fsdp/fully_shard.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/block_net.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::KeptWarnings;
using testing::World;

struct CalledNetImpl : torch::nn::Cloneable<CalledNetImpl> {
  CalledNetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(3, 5));
    norm = register_module("norm", torch::nn::BatchNorm1d(5));
    second = register_module("second", torch::nn::Linear(5, 2));
    to(torch::kDouble);
    norm->eval();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(norm(first(x)).tanh());
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(CalledNet);

CalledNet called_net() {
  torch::manual_seed(4);
  return {};
}

at::Tensor rows_of(int rank) {
  return torch::arange(12, torch::kDouble).reshape({4, 3}) * (rank + 1) / 20;
}

template <typename Module>
std::vector<at::Tensor> gradients_of(const Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module->parameters()) {
    gradients.push_back(parameter.grad().clone());
  }
  return gradients;
}

void expect_close(const std::vector<at::Tensor>& gradients,
                  const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(gradients.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(gradients[i], expected[i], 1e-12, 1e-12)) << i;
  }
}

// Returns the gradients of one process with the batches of all ranks.
std::vector<at::Tensor> mean_of_ranks(int size) {
  auto net = called_net();
  for (int rank = 0; rank < size; ++rank) {
    (net->forward(rows_of(rank)).pow(2).sum() / size).backward();
  }
  return gradients_of(net);
}

template <typename Wrapper>
void expect_both_average(Wrapper& model, const World& world) {
  const auto x = rows_of(world.rank);
  model->train();
  model.module()->children()[1]->eval();
  model->zero_grad();
  model->forward(x).pow(2).sum().backward();
  expect_close(gradients_of(model), mean_of_ranks(world.size));
  model->zero_grad();
  model(x).pow(2).sum().backward();
  expect_close(gradients_of(model), mean_of_ranks(world.size));
}

// A bug: model->forward(x) was the forward of the module, so nothing was
// averaged.
WORLD_TEST(WrappedModule, ForwardThroughTheArrowAverages, 1, 2, 3) {
  auto group = init_process_group();
  DistributedDataParallel<CalledNet> of_holder(called_net());
  expect_both_average(of_holder, world);
  DistributedDataParallel<CalledNetImpl> of_class(called_net().ptr());
  expect_both_average(of_class, world);
  DistributedDataParallel<std::shared_ptr<CalledNetImpl>> of_pointer(
      called_net().ptr());
  expect_both_average(of_pointer, world);
  auto net = called_net();
  const torch::nn::Sequential layers(net->first, net->norm, torch::nn::Tanh(),
                                     net->second);
  DistributedDataParallel of_layers(layers);
  expect_both_average(of_layers, world);
}

WORLD_TEST(WrappedModule, ASequentialOfAnyModulesAverages, 1, 2) {
  auto group = init_process_group();
  using torch::nn::AnyModule;
  const auto make_layers = [] {
    auto net = called_net();
    torch::nn::Sequential layers(AnyModule(net->first), AnyModule(net->norm));
    layers->push_back(AnyModule(torch::nn::Tanh()));
    layers->push_back(AnyModule(net->second));
    return layers;
  };
  DistributedDataParallel model(make_layers());
  expect_both_average(model, world);
  // The weights are not divided over the ranks of a group of one.
  FullyShard unit(make_layers(), {.group = split_group({{world.rank}})});
  unit(rows_of(0)).pow(2).sum().backward();
  expect_close(gradients_of(unit), mean_of_ranks(1));
  DataParallel replicas(make_layers(),
                        {.device_ids = {torch::kCPU, torch::kCPU}});
  replicas(rows_of(0)).pow(2).sum().backward();
  expect_close(gradients_of(replicas), mean_of_ranks(1));
}

// A bug: in modules of the user, block->forward(x) went past the unit.
template <template <typename> class Unit>
struct ArrowNetImpl : testing::BlockNetImpl<Unit> {
  using testing::BlockNetImpl<Unit>::BlockNetImpl;
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = this->embedding->forward(tokens);
    for (auto& block : this->blocks) x = block->forward(x);
    return this->head->forward(x);
  }
};

WORLD_TEST(WrappedModule, ForwardThroughTheArrowGathersAndReduces, 1, 2, 3) {
  testing::on_fsdp_paths(world, [&](const FullyShardOptions& options) {
    torch::manual_seed(3);
    const auto plain =
        std::make_shared<ArrowNetImpl<testing::PlainUnit>>(options);
    torch::manual_seed(3);
    FullyShard model(std::make_shared<ArrowNetImpl<FullyShard>>(options),
                     options);
    torch::optim::AdamW plain_optimizer(plain->parameters(), testing::adamw());
    torch::optim::AdamW optimizer(model->parameters(), testing::adamw());
    for (int step = 0; step < 3; ++step) {
      plain_optimizer.zero_grad();
      for (int rank = 0; rank < world.size; ++rank) {
        const auto tokens = testing::tokens_of(step, rank);
        (testing::loss_of(plain->forward(tokens), tokens) / world.size)
            .backward();
      }
      plain_optimizer.step();
      model->zero_grad();
      const auto tokens = testing::tokens_of(step, world.rank);
      testing::loss_of(model->forward(tokens), tokens).backward();
      optimizer.step();
    }
    testing::expect_equal(*model.module(), *plain, 1e-12);
  });
}

TEST(WrappedModule, ForwardThroughTheArrowUsesTheReplicas) {
  auto net = called_net();
  const auto x = rows_of(0);
  net->forward(x).pow(2).sum().backward();
  const auto expected = gradients_of(net);
  net->zero_grad();
  DataParallel model(net, {.device_ids = {torch::kCPU, torch::kCPU}});
  model->forward(x).pow(2).sum().backward();
  expect_close(gradients_of(model), expected);
  // A scalar of each replica.
  struct MeanImpl : torch::nn::Cloneable<MeanImpl> {
    MeanImpl() { reset(); }
    void reset() override {}
    at::Tensor forward(const at::Tensor& rows) { return rows.mean(); }
  };
  DataParallel<MeanImpl> mean(std::make_shared<MeanImpl>(),
                              {.device_ids = {torch::kCPU, torch::kCPU}});
  EXPECT_EQ(mean->forward(x).sizes(), at::IntArrayRef({2}));
}

WORLD_TEST(WrappedModule, HasTheMembersOfTheModule, 2) {
  auto group = init_process_group();
  auto net = called_net();
  DistributedDataParallel<CalledNet> model(net);
  const auto& constant = model;
  EXPECT_EQ(constant->named_parameters().keys(),
            net->named_parameters().keys());
  EXPECT_EQ(constant->parameters(/*recurse=*/false).size(), 0);
  EXPECT_EQ(constant->buffers().size(), net->buffers().size());
  EXPECT_EQ(constant->named_buffers().keys(), net->named_buffers().keys());
  EXPECT_EQ(constant->children().size(), 3);
  EXPECT_EQ(constant->named_children().keys(), net->named_children().keys());
  EXPECT_EQ(constant->modules().size(), 4);
  EXPECT_EQ(constant->named_modules("net").keys(),
            net->named_modules("net").keys());
  EXPECT_EQ(constant->name(), net->name());
  EXPECT_TRUE(constant.module() == net.ptr());
  EXPECT_EQ(c10::str(constant), c10::str(*net));
  model->eval();
  EXPECT_FALSE(net->is_training() || constant->is_training());
  model->train();
  EXPECT_TRUE(net->is_training() && constant->is_training());
  net->norm->eval();
  model->forward(rows_of(world.rank)).sum().backward();
  model->zero_grad();
  EXPECT_FALSE(net->second->weight.grad().defined());
  // The next forward makes buckets of the new dtype.
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    model->to(dtype);
    const auto x = rows_of(world.rank).to(dtype);
    model->forward(x).sum().backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    auto mean = net->second->weight.grad().clone();
    all_reduce(mean, {.op = ReduceOp::AVG});
    EXPECT_TRUE(torch::allclose(mean, net->second->weight.grad()));
    optimizer.step();
    optimizer.zero_grad();
  }
}

// A pointer to a wrapper is used as the wrapper itself.
WORLD_TEST(WrappedModule, IsReachedThroughAPointerToTheWrapper, 2) {
  auto group = init_process_group();
  const auto model =
      std::make_shared<DistributedDataParallel<CalledNet>>(called_net());
  torch::optim::Adam optimizer(model->parameters());
  model->forward(rows_of(world.rank)).pow(2).sum().backward();
  expect_close(gradients_of(model), mean_of_ranks(world.size));
  optimizer.step();
  torch::save(model->module(),
              (world.folder / "arrow").string() + std::to_string(world.rank));
}

template <typename Wrapper>
concept Moves = requires(Wrapper& wrapper) { wrapper->to(torch::kFloat); };
static_assert(Moves<DistributedDataParallel<CalledNet>>);
static_assert(!Moves<FullyShard<CalledNet>>);
// Otherwise a function that takes a module would train alone.
static_assert(!std::convertible_to<DistributedDataParallel<CalledNet>&,
                                   std::shared_ptr<torch::nn::Module>>);
static_assert(!std::convertible_to<FullyShard<CalledNet>&, torch::nn::Module&>);

struct Training {
  explicit Training(bool adam) : model(called_net()) {
    if (adam) {
      optimizer = std::make_unique<torch::optim::Adam>(
          model->parameters(), torch::optim::AdamOptions(0.1));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
    }
  }
  void wrapper() { model(x).sum().backward(); }
  void plain() { model.module()->forward(x).sum().backward(); }
  void step() {
    optimizer->step();
    optimizer->zero_grad();
  }
  const at::Tensor x = rows_of(1);
  DistributedDataParallel<CalledNet> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

WORLD_TEST(WrappedModule, ATrainingPastTheWrapperIsSaidOnce, 1, 2) {
  auto group = init_process_group();
  for (const bool adam : {false, true}) {
    for (const bool after_a_forward : {false, true}) {
      SCOPED_TRACE(c10::str("adam ", adam, ", forward ", after_a_forward));
      Training training(adam);
      const KeptWarnings kept;
      if (after_a_forward) {
        auto loss = training.model->forward(training.x).sum();
        training.plain();
        loss.backward();
        training.step();
      }
      EXPECT_TRUE(kept.texts().empty());
      for (int step = 0; step < 3; ++step) {
        training.plain();
        training.step();
      }
      EXPECT_THAT(
          kept.texts(),
          ElementsAre(AllOf(
              HasSubstr("DistributedDataParallel of "),
              HasSubstr("CalledNetImpl: a backward puts a gradient into "
                        "parameter 'second."),
              HasSubstr("model.module()->forward(x) is the plain module"))));
    }
  }
}

// Regression: nothing was said if another wrapper had some of the parameters.
WORLD_TEST(WrappedModule, ATrainingPastAWrapperBesideAnotherOneIsSaid, 2) {
  auto group = init_process_group();
  Training training(/*adam=*/true);
  DistributedDataParallel<torch::nn::Linear> other(
      training.model.module()->second);
  const KeptWarnings kept;
  training.wrapper();
  other(torch::ones({2, 5}, torch::kDouble)).sum().backward();
  training.step();
  other(torch::ones({2, 5}, torch::kDouble)).sum().backward();
  EXPECT_THAT(kept.texts(), ElementsAre());
  training.step();
  training.plain();
  EXPECT_THAT(kept.texts(), ElementsAre(HasSubstr("parameter 'norm.")));
}

WORLD_TEST(WrappedModule, APlainBackwardBesideAForwardIsNotSaid, 2) {
  auto group = init_process_group();
  Training training(/*adam=*/true);
  const KeptWarnings kept;
  for (int step = 0; step < 3; ++step) {
    auto loss = training.model->forward(training.x).sum();
    training.plain();
    loss.backward();
    training.step();
    {
      const auto guard = training.model->no_sync();
      training.wrapper();
      training.plain();
    }
    training.wrapper();
    training.step();
  }
  const torch::NoGradGuard no_grad;
  training.model.module()->forward(training.x);
  EXPECT_THAT(kept.texts(), ElementsAre());
}

// As a loss of another method of the module with a backward of its own.
// Regression: nothing was said, and each rank stepped by a gradient of its own.
WORLD_TEST(WrappedModule, APlainBackwardAfterTheAverageIsSaid, 2) {
  auto group = init_process_group();
  Training training(/*adam=*/true);
  const KeptWarnings kept;
  for (int step = 0; step < 2; ++step) {
    training.wrapper();
    training.plain();
    training.step();
  }
  EXPECT_THAT(kept.texts(),
              ElementsAre(HasSubstr("since the last average or step")));
}

}  // namespace
}  // namespace lockstep::internal
