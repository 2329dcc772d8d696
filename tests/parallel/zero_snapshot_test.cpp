// The sharded optimizer in folders of snapshots: each rank writes its pieces,
// and any number of ranks reads them.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/zero_training.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;

// Has parameters that 1 to 8 ranks cut in the middle of rows, one that is laid
// out in another order than its dimensions, and small ones.
struct SnapshotNetImpl : torch::nn::Module {
  SnapshotNetImpl() {
    torch::manual_seed(1);
    wide = register_module("wide", torch::nn::Linear(64, 777));
    back = register_module("back", torch::nn::Linear(777, 65));
    image = register_module(
        "image", torch::nn::Conv2d(torch::nn::Conv2dOptions(37, 101, 3)));
    image->weight.set_data(
        image->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    norm = register_module("norm", torch::nn::BatchNorm1d(777));
    scale = register_parameter("scale", torch::ones({}));
  }
  at::Tensor forward(const at::Tensor& x) {
    // Different everywhere, so that elements in a wrong order are noticed.
    const at::Tensor picture =
        x.sum() * torch::linspace(-1, 1, 333).view({1, 37, 3, 3});
    const at::Tensor hidden = norm->forward(wide->forward(x).tanh());
    return back->forward(hidden).tanh().sum(1) * scale +
           image->forward(picture).tanh().sum();
  }
  torch::nn::Linear wide{nullptr}, back{nullptr};
  torch::nn::Conv2d image{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(SnapshotNet);

// Every rank has the same batch, so the number of ranks makes no difference.
void train(const SnapshotNet& net, torch::optim::Optimizer& optimizer, int from,
           int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    net.ptr()
        ->forward(zero_batch(step, 0, torch::kFloat))
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
}

std::vector<at::Tensor> tensors_in(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state_dict(module)) {
    tensors.push_back(tensor);
  }
  return tensors;
}

void expect_equal_modules(const torch::nn::Module& a,
                          const torch::nn::Module& b) {
  const auto x = tensors_in(a);
  const auto y = tensors_in(b);
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_TRUE(x[i].isfinite().all().item<bool>()) << i;
    EXPECT_TRUE(x[i].equal(y[i])) << i;
  }
}

template <class Optimizer>
using OptionsOf = typename ShardingTraits<Optimizer>::Options;

// Returns the model that one process has after `steps` steps.
template <class Optimizer>
SnapshotNet trained(const OptionsOf<Optimizer>& options, int steps) {
  SnapshotNet net;
  Optimizer optimizer(net->parameters(), options);
  train(net, optimizer, 0, steps);
  return net;
}

// Saves with each of `savers`, loads with each of `loaders` (groups, null on
// ranks that are not in them), and trains on.
template <class Optimizer>
void expect_resharding(const World& world, const std::string& name,
                       const std::vector<ProcessGroupPtr>& savers,
                       const std::vector<ProcessGroupPtr>& loaders,
                       const OptionsOf<Optimizer>& options,
                       ZeroRedundancyOptions zero = {}) {
  const SnapshotNet expected = trained<Optimizer>(options, 6);
  int folders = 0;
  for (const auto& group : savers) {
    const std::string path =
        (world.folder / (name + std::to_string(folders++))).string() + "/";
    if (group) {
      SnapshotNet net;
      zero.process_group = group;
      ZeroRedundancyOptimizer<Optimizer> optimizer(net->parameters(), options,
                                                   zero);
      train(net, optimizer, 0, 3);
      save_snapshot(path, {.model = net.ptr(), .optimizer = &optimizer},
                    {.group = group});
    }
    barrier();
    for (const auto& loading : loaders) {
      if (!loading) continue;
      SnapshotNet net;
      zero.process_group = loading;
      ZeroRedundancyOptimizer<Optimizer> optimizer(net->parameters(), {}, zero);
      TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
      ASSERT_TRUE(load_snapshot(path, state, {.group = loading}));
      train(net, optimizer, 3, 6);
      expect_equal_modules(*net, *expected);
    }
    // The optimizer itself loads it, too, and what it saves, sharded ones load.
    if (world.rank == 0) {
      const auto alone = loaders.back();
      SnapshotNet net;
      Optimizer optimizer(net->parameters(), OptionsOf<Optimizer>());
      TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
      ASSERT_TRUE(load_snapshot(path, state, {.group = alone}));
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(),
                Optimizer(net->parameters(), options)
                    .param_groups()[0]
                    .options()
                    .get_lr());
      train(net, optimizer, 3, 6);
      expect_equal_modules(*net, *expected);
    }
    barrier();
  }
}

WORLD_TEST(ZeroSnapshot, AnyNumberOfRanksGoesOnAsOneProcess, 8) {
  auto group = init_process_group();
  // 8, 4, 3, 2 and 1 ranks; the last on rank 0 only.
  std::vector<ProcessGroupPtr> groups{group.get()};
  for (const std::vector<int>& ranks :
       {std::vector<int>{0, 1, 2, 3}, {0, 1, 2}, {0, 1}, {0}}) {
    groups.push_back(new_group(ranks));
  }
  expect_resharding<optim::AdamW>(world, "adamw", groups, groups,
                                  {.lr = 0.01, .amsgrad = true});
}

WORLD_TEST(ZeroSnapshot, EveryOptimizerIsResharded, 3) {
  auto group = init_process_group();
  const std::vector<ProcessGroupPtr> groups{group.get(), new_group({0, 1}),
                                            new_group({0})};
  expect_resharding<optim::SGD>(world, "sgd", groups, groups,
                                {.lr = 0.01, .momentum = 0.9});
  expect_resharding<torch::optim::Adagrad>(world, "adagrad", groups, groups,
                                           torch::optim::AdagradOptions(0.02));
  expect_resharding<torch::optim::RMSprop>(
      world, "rmsprop", groups, groups,
      torch::optim::RMSpropOptions(1e-3).momentum(0.9));
  expect_resharding<optim::AdamW>(world, "whole", groups, groups, {.lr = 0.01},
                                  {.cut_parameters = false});
}

// Sharded ranks load the state that one process saved.
WORLD_TEST(ZeroSnapshot, TheStateOfAPlainOptimizerIsTaken, 2, 3) {
  auto group = init_process_group();
  const std::string path = (world.folder / "plain").string() + "/";
  const auto options = optim::AdamWOptions{.lr = 0.01};
  SnapshotNet plain_net;
  optim::AdamW plain(plain_net->parameters(), options);
  train(plain_net, plain, 0, 3);
  save_snapshot(path, {.model = plain_net.ptr(), .optimizer = &plain});

  SnapshotNet net;
  ZeroRedundancyOptimizer<optim::AdamW> optimizer(net->parameters());
  TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
  ASSERT_TRUE(load_snapshot(path, state));
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01);
  train(net, optimizer, 3, 6);
  expect_equal_modules(*net, *trained<optim::AdamW>(options, 6));
}

// The state of a parameter without elements, which a plain optimizer has saved,
// was gone after a sharded one had loaded and saved it.
WORLD_TEST(ZeroSnapshot, StateWithoutElementsIsKept, 1, 2) {
  auto group = init_process_group();
  const std::string path = (world.folder / "empty").string() + "/";
  torch::nn::ParameterDict net;
  net->insert("empty", torch::zeros({0, 3}));
  net->insert("weight", torch::ones({5}));
  for (auto& parameter : net->parameters()) {
    parameter.mutable_grad() = torch::ones_like(parameter);
  }
  torch::optim::AdamW plain(net->parameters());
  plain.step();
  const auto names_in = [](const std::string& saved) {
    return TensorFiles::open_folder(saved).names_under("optimizer.state.");
  };
  const auto names =
      names_in(save_snapshot(path, {.model = net.ptr(), .optimizer = &plain}));
  EXPECT_EQ(names.size(), 6u);
  for (const bool cut : {true, false}) {
    ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
        net->parameters(), {}, {.cut_parameters = cut});
    TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
    ASSERT_TRUE(load_snapshot(path, state));
    optimizer.step();
    EXPECT_EQ(names_in(save_snapshot(path, state)), names);
    optimizer.consolidate_state_dict(world.size - 1);
    if (world.rank == world.size - 1) {
      EXPECT_EQ(optimizer.state_dict().state.size(), 2u);
    }
  }
}

// Each element of the state is in the files once, written by its owner.
WORLD_TEST(ZeroSnapshot, EachRankWritesItsOwnPieces, 2, 3) {
  auto group = init_process_group();
  const std::string path = (world.folder / "pieces").string() + "/";
  SnapshotNet net;
  ZeroRedundancyOptimizer<optim::AdamW> optimizer(net->parameters());
  train(net, optimizer, 0, 1);
  const std::string saved =
      save_snapshot(path, {.model = net.ptr(), .optimizer = &optimizer});
  if (world.rank == 0) {
    const TensorFiles files = TensorFiles::open_folder(saved);
    const auto& manifest = *files.manifest();
    EXPECT_EQ(manifest.world_size, world.size);
    const auto& tensor =
        files.tensors().at("optimizer.state.back.weight.exp_avg");
    EXPECT_EQ(
        manifest.tensors.at("optimizer.state.back.weight.exp_avg").placement,
        "flat");
    std::map<size_t, int64_t> elements;  // by rank
    for (const auto& part : tensor.parts) {
      const std::string name =
          std::filesystem::path(files.file(part.file).path()).filename();
      elements[std::stoul(name.substr(6, 5)) - 1] += part.box.numel();
    }
    EXPECT_EQ(elements.size(), static_cast<size_t>(world.size));
    const auto share = 65 * 777 / world.size;
    for (const auto& [rank, count] : elements) EXPECT_NEAR(count, share, 200);
  }
  barrier();
}

WORLD_TEST(ZeroSnapshot, TheOptimizerOfAWrapperIsSavedDirectly, 1, 2) {
  auto group = init_process_group();
  for (const bool shared : {false, true}) {
    const std::string path =
        (world.folder / (shared ? "shared" : "private")).string() + "/";
    const auto make = [&](const ZeroNet& net) {
      return std::make_unique<DistributedDataParallel<ZeroNet>>(net);
    };
    const auto steps = [&](DistributedDataParallel<ZeroNet>& model,
                           torch::optim::Optimizer& optimizer, int from,
                           int to) {
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        zero_loss(model(zero_batch(step, world.rank, torch::kFloat)))
            .backward();
        optimizer.step();
      }
    };
    using Optimizer = ZeroRedundancyOptimizer<optim::AdamW>;
    ZeroNet first;
    const auto first_model = make(first);
    Optimizer first_optimizer(*first_model, {.lr = 0.01},
                              {.shared_parameters = shared});
    steps(*first_model, first_optimizer, 0, 3);
    save_snapshot(path, {.model = first.ptr(), .optimizer = &first_optimizer});
    steps(*first_model, first_optimizer, 3, 6);
    first_optimizer.synchronize();

    ZeroNet second;
    const auto second_model = make(second);
    Optimizer second_optimizer(*second_model, {.lr = 7},
                               {.shared_parameters = shared});
    TrainingState state{.model = second.ptr(), .optimizer = &second_optimizer};
    ASSERT_TRUE(load_snapshot(path, state));
    steps(*second_model, second_optimizer, 3, 6);
    second_optimizer.synchronize();
    EXPECT_TRUE(flat_parameters(*first).equal(flat_parameters(*second)));
    barrier();
  }
}

WORLD_TEST(ZeroSnapshot, AFileIsRefusedWithWhatToDo, 2) {
  auto group = init_process_group();
  ZeroNet net;
  ZeroRedundancyOptimizer<optim::AdamW> optimizer(net->parameters());
  TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { save_snapshot(world.folder / "zero.pt", state); },
           [&] { load_snapshot(world.folder / "zero.pt", state); }}) {
    try {
      call();
      ADD_FAILURE() << "did not throw";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("end the path with \"/\""));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal
