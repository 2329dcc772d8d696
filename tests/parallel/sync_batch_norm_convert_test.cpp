#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/nn/convert_sync_batchnorm.h"
#include "lockstep/parallel/nn/sync_batch_norm.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using nn::convert_sync_batchnorm;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm1dImpl;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNorm2dImpl;
using torch::nn::BatchNorm3d;
using torch::nn::InstanceNorm1d;
using torch::nn::InstanceNorm1dImpl;
using torch::nn::Linear;
using torch::nn::ModuleDict;
using torch::nn::ModuleList;
using torch::nn::Sequential;

struct Tensors {
  std::vector<std::string> names;
  std::vector<at::Tensor> values;
};

Tensors tensors_of(const torch::nn::Module& module) {
  Tensors all;
  for (const auto& list : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : list) {
      all.names.push_back(item.key());
      all.values.push_back(item.value());
    }
  }
  return all;
}

void expect_same_tensors(const torch::nn::Module& module,
                         const Tensors& before) {
  auto after = tensors_of(module);
  ASSERT_EQ(after.names, before.names);
  for (size_t i = 0; i < after.values.size(); ++i) {
    EXPECT_TRUE(after.values[i].is_same(before.values[i])) << after.names[i];
  }
}

// A Sequential of LibTorch cannot contain another one; this one can be
// contained.
struct StackImpl : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  torch::Tensor forward(torch::Tensor x) { return SequentialImpl::forward(x); }
};
TORCH_MODULE(Stack);

template <typename Module>
bool is(const std::shared_ptr<torch::nn::Module>& module) {
  return module->as<Module>() != nullptr;
}

TEST(ConvertSyncBatchnorm, ReplacesChildrenOfContainersAtAnyDepth) {
  using namespace nn;
  Stack innermost(BatchNorm1d(4)), inner(innermost, InstanceNorm1d(4));
  Sequential net(Linear(4, 4), BatchNorm1d(4), inner);
  ModuleList deep(BatchNorm3d(5)), list(BatchNorm2d(2), deep);
  ModuleDict dict;
  dict->update({{"norm", BatchNorm1d(6).ptr()}, {"list", list.ptr()}});
  ModuleList all(net, dict);
  auto before = tensors_of(*all);
  auto input = torch::randn({3, 4});
  auto want = net->forward(input);

  convert_sync_batchnorm(*all);

  EXPECT_TRUE(is<SyncBatchNorm1dImpl>(net->ptr(1)));
  EXPECT_TRUE(is<SyncBatchNorm1dImpl>(innermost->ptr(0)));
  EXPECT_TRUE(is<InstanceNorm1dImpl>(inner->ptr(1)));
  EXPECT_TRUE(is<SyncBatchNorm2dImpl>(list->ptr(0)));
  EXPECT_TRUE(is<SyncBatchNorm3dImpl>(deep->ptr(0)));
  EXPECT_TRUE(is<SyncBatchNorm1dImpl>((*dict)["norm"]));
  expect_same_tensors(*all, before);
  // The registered modules are those that the containers hold and call.
  EXPECT_EQ(net->children()[1], net->ptr(1));
  EXPECT_EQ(list->children()[0], list->ptr(0));
  EXPECT_EQ(dict->named_children()["norm"], (*dict)["norm"]);
  EXPECT_EQ(net->at<SyncBatchNorm1dImpl>(1).forward(input).size(1), 4);
  EXPECT_TRUE(net->forward(input).equal(want));
  for (const auto& module : all->modules()) {
    EXPECT_FALSE(is<BatchNorm1dImpl>(module));
    EXPECT_FALSE(is<BatchNorm2dImpl>(module));
  }
}

TEST(ConvertSyncBatchnorm, KeepsNamesOptionsTensorsAndMode) {
  auto options = torch::nn::BatchNormOptions(4)
                     .eps(0.25)
                     .momentum(std::nullopt)
                     .track_running_stats(false);
  BatchNorm1d with_options(options), frozen(4);
  frozen->eval();
  frozen->weight.requires_grad_(false);
  frozen->to(torch::kDouble);
  Sequential net({{"first", with_options}, {"second", frozen}});
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  auto before = tensors_of(*net);

  auto returned = convert_sync_batchnorm(net);

  EXPECT_EQ(returned.ptr(), net.ptr());
  expect_same_tensors(*net, before);
  auto& first = net->at<nn::SyncBatchNorm1dImpl>(0);
  EXPECT_EQ(first.options.eps(), 0.25);
  EXPECT_EQ(first.options.momentum(), std::nullopt);
  EXPECT_FALSE(first.options.track_running_stats());
  EXPECT_FALSE(first.running_mean.defined());
  EXPECT_TRUE(first.weight.is_same(with_options->weight));
  EXPECT_TRUE(first.is_training());
  auto& second = net->at<nn::SyncBatchNorm1dImpl>(1);
  EXPECT_FALSE(second.is_training());
  EXPECT_FALSE(second.weight.requires_grad());
  EXPECT_TRUE(second.running_var.is_same(frozen->running_var));
  EXPECT_EQ(second.running_var.scalar_type(), torch::kDouble);
  // An optimizer made before the conversion steps the parameters that the
  // module has now.
  first.weight.mutable_grad() = torch::ones({4});
  optimizer.step();
  EXPECT_TRUE(first.weight.equal(torch::full({4}, 0.5)));
}

TEST(ConvertSyncBatchnorm, NoAffineHasNoParameters) {
  Sequential net(BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)));
  convert_sync_batchnorm(net);
  EXPECT_TRUE(net->parameters().empty());
  EXPECT_EQ(net->buffers().size(), 3U);
  EXPECT_EQ(net->forward(torch::randn({5, 4})).size(1), 4);
}

// A module that is in two places stays one module.
TEST(ConvertSyncBatchnorm, SharedModulesStayShared) {
  BatchNorm1d shared(4);
  Stack inner(shared);
  Sequential net(shared, Linear(4, 4), inner);
  convert_sync_batchnorm(net);
  EXPECT_TRUE(is<nn::SyncBatchNorm1dImpl>(net->ptr(0)));
  EXPECT_EQ(net->ptr(0), inner->ptr(0));
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    layers = register_module("layers", Sequential(Linear(4, 4), norm_in_it));
    norm = register_module("norm", BatchNorm2d(4));
  }
  torch::Tensor forward(torch::Tensor x) { return layers->forward(x); }
  BatchNorm1d norm_in_it{4};
  Sequential layers{nullptr};
  BatchNorm2d norm{nullptr};
};
TORCH_MODULE(Block);

TEST(ConvertSyncBatchnorm, TypedMembersAreNamedAndNothingIsChanged) {
  struct OwnNormImpl : torch::nn::BatchNorm1dImpl {
    OwnNormImpl() : BatchNorm1dImpl(4) {}
  };
  Sequential net(BatchNorm1d(4), Block(), std::make_shared<OwnNormImpl>());
  ModuleList all(net, Block());
  EXPECT_THAT([&] { convert_sync_batchnorm(*all); },
              ThrowsMessage<std::invalid_argument>(AllOf(
                  HasSubstr("cannot replace 0.1.norm (torch::nn::BatchNorm2d"),
                  HasSubstr(", 0.2 ("), HasSubstr("OwnNorm"),
                  HasSubstr(", 1.norm (torch::nn::BatchNorm2d"),
                  HasSubstr("Nothing was converted"), Not(HasSubstr("0.0")),
                  Not(HasSubstr("layers")))));
  EXPECT_TRUE(is<BatchNorm1dImpl>(net->ptr(0)));
  EXPECT_TRUE(is<BatchNorm1dImpl>(net->at<BlockImpl>(1).layers->ptr(1)));
}

TEST(ConvertSyncBatchnorm, ABatchNormItselfIsRefused) {
  EXPECT_THAT([] { convert_sync_batchnorm(BatchNorm2d(4)); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("cannot replace the module itself (torch::nn::")));
}

TEST(ConvertSyncBatchnorm, ModulesWithoutBatchNormStayAsTheyAre) {
  auto linear = std::make_shared<torch::nn::LinearImpl>(3, 4);
  EXPECT_EQ(convert_sync_batchnorm(linear), linear);
}

WORLD_TEST(ConvertSyncBatchnorm, GivesAllTheGroup, 2) {
  auto group = init_process_group();
  struct Net : torch::nn::Module {
    nn::SyncBatchNorm1d held = register_module("held", nn::SyncBatchNorm1d(4));
    Sequential layers = register_module("layers", Sequential(BatchNorm1d(4)));
  };
  auto net = std::make_shared<Net>();
  auto alone = new_group({world.rank == 0 ? 0 : 1});
  auto other = new_group({world.rank == 0 ? 1 : 0});
  auto own = alone ? alone : other;
  convert_sync_batchnorm(net, own);
  EXPECT_EQ(net->held->options.process_group(), own);
  EXPECT_EQ(net->layers->at<nn::SyncBatchNorm1dImpl>(0).options.process_group(),
            own);
}

}  // namespace
}  // namespace lockstep::internal
