// Folders of snapshots that go back and forth between PyTorch's distributed
// checkpoint and this library (dcp_peer.py is the other half).

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <filesystem>

#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/tensor_reader.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/checkpoint/sharded/written_folder.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
namespace fs = std::filesystem;
using AdamW = lockstep::optim::AdamW;
using Zero = ZeroRedundancyOptimizer<AdamW>;
using Options = ShardingTraits<AdamW>::Options;

constexpr double kBound = 1e-12;

// The large weights are cut, the second one in the middle of a row.
torch::nn::Sequential build_net() {
  torch::nn::Sequential net(torch::nn::Linear(8, 1027), torch::nn::Tanh(),
                            torch::nn::Linear(1027, 9));
  net->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    parameter.copy_((torch::arange(parameter.numel(), torch::kDouble) / 7)
                        .sin()
                        .view_as(parameter) /
                    10);
  }
  return net;
}

const Options kOptions{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true};

// Every rank has the same batches.
void train_net(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer,
               int from, int to) {
  for (int step = from; step < to; ++step) {
    const auto data =
        torch::linspace(-1, 1 + step / 8.0, 32, torch::kDouble).view({4, 8});
    optimizer.zero_grad();
    net->forward(data).square().mean().backward();
    optimizer.step();
  }
}

void expect_close(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    EXPECT_TRUE(torch::allclose(a[i].second, b[i].second, kBound, kBound))
        << a[i].first;
  }
}

// Leaves of each parameter only this rank's part: elements, or the half of the
// last dimension.
void divide(torch::nn::Sequential& net, const ProcessGroupPtr& group) {
  bool by_elements = true;
  for (auto& parameter : net->parameters()) {
    const Sizes shape = parameter.sizes().vec();
    TensorLayout layout{
        .shape = shape, .box = whole_box(shape), .groups = {group}};
    if (by_elements) {
      const int64_t half = parameter.numel() / 2;
      layout.range =
          group->rank() == 0 ? Range{0, half} : Range{half, parameter.numel()};
    } else {
      layout.box = chunk_box(shape, shape.size() - 1, group->rank(), 2);
    }
    by_elements = !by_elements;
    parameter.set_data(part_of(parameter.detach(), layout).clone());
    set_layout(parameter, layout);
  }
}

NamedTensors various() {
  const auto numbers = [](int64_t count) { return torch::arange(count); };
  return {
      {"bfloat16", numbers(35).view({5, 7}).to(torch::kBFloat16)},
      {"bool", (numbers(12).view({4, 3}) % 2).eq(0)},
      {"float16", numbers(24).view({2, 3, 4}).to(torch::kHalf)},
      {"int64", numbers(5)},
      {"row", numbers(3).to(torch::kFloat).view({1, 3})},
      {"scalar", torch::tensor(2.5f)},
      {"uint8", numbers(9).view({3, 3}).to(torch::kByte)},
  };
}

bool python_has_safetensors() {
  static const bool has = std::system(LOCKSTEP_TORCH_PYTHON
                                      " -c 'import safetensors'"
                                      " >/dev/null 2>&1") == 0;
  return has;
}

// Runs the peer, started by rank 0.
void run_python(const World& world, const std::string& what,
                const fs::path& folder) {
  if (world.rank == 0) {
    run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/parallel/dcp_peer.py", what,
                       folder.string()}});
  }
  barrier();
}

// Runs the peer's `save`, unless this world has done so.
fs::path saved_by_python(const World& world) {
  const fs::path folder = world.folder / "saved";
  const bool missing = !fs::exists(folder);
  barrier();
  if (!missing) return folder;
  if (world.rank == 0) fs::create_directory(folder);
  run_python(world, "save", folder);
  return folder;
}

WORLD_TEST(DcpInterop, WhatPythonsRanksSavedGoesOnHere, 2) {
  const auto group = init_process_group();
  if (!python_has_safetensors()) GTEST_SKIP() << "no Python with safetensors";
  const fs::path folder = saved_by_python(world);
  const NamedTensors expected = load_tensors(folder / "python-end.pt");
  const std::string path = (folder / "python").string() + "/";
  const auto alone = new_group({0});
  {
    auto net = build_net();
    Zero optimizer(net->parameters());
    TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
    const auto loaded = load_snapshot(path, state, {.will_save = false});
    EXPECT_TRUE(loaded);
    EXPECT_EQ(loaded.path + "/", path);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01);
    train_net(net, optimizer, 5, 10);
    expect_close(state_dict(*net), expected);
  }
  if (alone) {
    auto net = build_net();
    AdamW optimizer(net->parameters(), Options{.lr = 3});
    TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
    EXPECT_TRUE(
        load_snapshot(path, state, {.group = alone, .will_save = false}));
    train_net(net, optimizer, 5, 10);
    expect_close(state_dict(*net), expected);
  }
  // Into parameters that are divided over the ranks.
  {
    const TensorFiles files = TensorFiles::open_folder(path);
    auto net = build_net();
    divide(net, group);
    AdamW optimizer(net->parameters(), Options{.lr = 3});
    TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
    EXPECT_TRUE(load_snapshot(path, state, {.will_save = false}));
    const auto moments = state_dict(optimizer).state;
    int64_t number = 0;
    for (const auto& item : net->named_parameters()) {
      const auto part = [&](const std::string& name) {
        return part_of(read_tensor(files, name), *layout_of(item.value()));
      };
      EXPECT_TRUE(item.value().equal(part("model." + item.key())));
      EXPECT_TRUE(
          std::get<at::Tensor>(moments.at(number++).at("exp_avg"))
              .equal(part("optimizer.state." + item.key() + ".exp_avg")));
    }
  }
  // Weights alone, from all layouts.
  for (const char* name : {"python", "bare"}) {
    auto net = build_net();
    load_model(folder / name, *net);
    auto other = build_net();
    TrainingState state{.model = other.ptr()};
    EXPECT_TRUE(load_snapshot((folder / name).string() + "/", state,
                              {.will_save = false}));
    expect_close(state_dict(*net), state_dict(*other));
    EXPECT_FALSE(
        state_dict(*net)[0].second.equal(state_dict(*build_net())[0].second));
  }
  for (const char* name : {"index", "index/model.safetensors.index.json",
                           "consolidated", "consolidated/sharded"}) {
    auto net = build_net();
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.zero_();
    load_model(folder / name, *net);
    expect_close(state_dict(*net), state_dict(*build_net()));
    for (auto& parameter : net->parameters()) parameter.zero_();
    load_model(folder / name, *net, {.mmap = true});
    expect_close(state_dict(*net), state_dict(*build_net()));
  }
  barrier();
}

// Two groups of Python's were merged in one, which had the options of its first
// parameter.
WORLD_TEST(DcpInterop, GroupsOfPythonsAreNotMerged, 2) {
  const auto group = init_process_group();
  if (!python_has_safetensors()) GTEST_SKIP() << "no Python with safetensors";
  const std::string path = (saved_by_python(world) / "groups").string() + "/";
  auto net = build_net();
  AdamW merged(net->parameters(), Options{.lr = 3});
  TrainingState state{
      .model = net.ptr(), .optimizer = &merged, .epochs_run = 4, .step = 9};
  EXPECT_THAT(
      message_of([&] { load_snapshot(path, state, {.will_save = false}); }),
      HasSubstr("the optimizer's group 0 has 0.weight and 0.bias, which "
                "were saved with different weight_decay, in two "
                "groups"));
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const int64_t dim : {2, 1}) {
    std::vector<at::Tensor> parameters;
    for (const auto& parameter : net->parameters()) {
      if (parameter.dim() == dim) parameters.push_back(parameter);
    }
    groups.emplace_back(parameters,
                        std::make_unique<torch::optim::AdamWOptions>(3));
  }
  torch::optim::AdamW two(groups, torch::optim::AdamWOptions(3));
  state.optimizer = &two;
  const auto loaded = load_snapshot(path, state, {.will_save = false});
  const auto decay = [&](size_t of) {
    return static_cast<torch::optim::AdamWOptions&>(
               two.param_groups()[of].options())
        .weight_decay();
  };
  EXPECT_EQ(decay(0), 0.1);
  EXPECT_EQ(decay(1), 0);
  // The folder has no numbers.
  EXPECT_THAT(loaded.not_restored,
              ElementsAre("generator", "epochs_run", "step", "sampler_state"));
  EXPECT_EQ(state.epochs_run, 4);
  EXPECT_EQ(state.step, 9);
}

WORLD_TEST(DcpInterop, EveryDivisionOfPythonsIsRead, 2) {
  const auto group = init_process_group();
  if (!python_has_safetensors()) GTEST_SKIP() << "no Python with safetensors";
  const TensorFiles files =
      TensorFiles::open_folder(saved_by_python(world) / "various");
  for (const auto& [name, tensor] : various()) {
    EXPECT_TRUE(read_tensor(files, name).equal(tensor)) << name;
    EXPECT_TRUE(read_tensor(files, name + ".plain").equal(tensor)) << name;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      const std::string divided = name + "." + std::to_string(dim);
      const at::Tensor read = read_tensor(files, divided);
      EXPECT_EQ(read.scalar_type(), tensor.scalar_type());
      EXPECT_TRUE(read.equal(tensor)) << divided;
    }
  }
  barrier();
}

WORLD_TEST(DcpInterop, WhatWeSavedGoesOnInPython, 2) {
  const auto group = init_process_group();
  if (!python_has_safetensors()) GTEST_SKIP() << "no Python with safetensors";
  const fs::path folder = world.folder / "checked";
  const auto run = [&](const std::string& name, torch::nn::Sequential& net,
                       torch::optim::Optimizer& optimizer) {
    optimizer.param_groups()[0].options().set_lr(0.02);
    train_net(net, optimizer, 0, 5);
    TrainingState state{.model = net.ptr(), .optimizer = &optimizer};
    state.step = 5;
    state.epochs_run = 3;
    state.sampler_state = {{"epoch", 4}};
    save_snapshot((folder / ("cpp-" + name)).string() + "/", state);
    train_net(net, optimizer, 5, 10);
    if (world.rank == 0) {
      save_model(folder / ("cpp-" + name + "-end.pt"), *net);
    }
  };
  auto net = build_net();
  Zero zero(net->parameters(), kOptions);
  run("zero", net, zero);
  net = build_net();
  AdamW plain(net->parameters(), kOptions);
  run("plain", net, plain);
  {
    // Parts of a model that was trained whole.
    net = build_net();
    AdamW whole(net->parameters(), kOptions);
    whole.param_groups()[0].options().set_lr(0.02);
    train_net(net, whole, 0, 5);
    auto divided = build_net();
    divide(divided, group);
    AdamW optimizer(divided->parameters());
    load_state_dict(*divided, state_dict(*net));
    load_state_dict(optimizer, state_dict(whole));
    TrainingState state{.model = divided.ptr(), .optimizer = &optimizer};
    state.step = 5;
    state.epochs_run = 3;
    state.sampler_state = {{"epoch", 4}};
    save_snapshot((folder / "cpp-layouts").string() + "/", state);
    train_net(net, whole, 5, 10);
    if (world.rank == 0) save_model(folder / "cpp-layouts-end.pt", *net);
  }
  if (world.rank == 0) {
    // The elements that the flat pieces hold together.
    NamedTensors moments;
    const auto whole = load_snapshot_file(folder / "cpp-zero");
    const auto names = state_dict(*net);
    for (size_t i = 0; i < names.size(); ++i) {
      moments.emplace_back(names[i].first,
                           std::get<at::Tensor>(whole.optimizer_state->state
                                                    .at(static_cast<int64_t>(i))
                                                    .at("exp_avg")));
    }
    save_tensors(folder / "cpp-zero-moments.pt", moments);
    // Two ranks that divide each tensor within rows.
    std::vector<std::vector<TensorShard>> by_rank(2);
    for (const auto& [name, tensor] : various()) {
      const int64_t cut = tensor.numel() * 2 / 5;
      for (const bool second : {false, true}) {
        const Range range{second ? cut : 0, second ? tensor.numel() : cut};
        by_rank[second].push_back(
            {"model." + name, tensor.sizes().vec(),
             FlatShard{range, memory_order(tensor)},
             tensor.flatten().slice(0, range.begin, range.end)});
      }
    }
    write_folder(folder / "cpp-various", by_rank);
  }
  barrier();
  run_python(world, "check", folder);
}

}  // namespace
}  // namespace lockstep::internal
