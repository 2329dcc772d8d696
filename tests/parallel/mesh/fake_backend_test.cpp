// One process as a rank of worlds that do not exist.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/lockstep.h"
#include "lockstep/model_parallel.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/mesh/device_mesh.h"
#include "lockstep/parallel/mesh/dry_run.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

// A wait for ranks that do not exist would end in an error after this time.
constexpr std::chrono::seconds kAWait{20};

ProcessGroupGuard imagine(int rank, int world_size, bool check_calls = false) {
  return init_process_group("fake", {.timeout = kAWait,
                                     .world_size = world_size,
                                     .rank = rank,
                                     .check_calls = check_calls});
}

struct Counted {
  int calls = 0;
  uint64_t bytes = 0;
};

// Counts the operations of a group that move float32: the larger one of what
// goes in and what comes out.
Counted counted(const ProcessGroupPtr& group, const std::string& operation) {
  const auto& flight = *inside(group).flight();
  Counted sum;
  for (uint64_t id = 1; id <= flight.last_id(); ++id) {
    FlightRecord record{};
    EXPECT_TRUE(flight.read(id, record)) << id;
    if (record.call.operation != operation ||
        std::string(record.call.dtype) != "Float") {
      continue;
    }
    EXPECT_EQ(record.state, FlightState::completed);
    ++sum.calls;
    sum.bytes +=
        4 * std::max(record.call.in_elements, record.call.out_elements);
  }
  return sum;
}

TEST(FakeBackend, OneProcessIsARankOfAThousand) {
  auto group = imagine(5, 1024);
  EXPECT_EQ(get_rank(), 5);
  EXPECT_EQ(get_world_size(), 1024);
  EXPECT_TRUE(imagines_peers(*group.get()));
  auto some = new_group({1, 5, 1023});
  EXPECT_EQ(some->rank(), 1);
  EXPECT_EQ(some->size(), 3);
  EXPECT_EQ(some->backend_config(), group->backend_config());
  EXPECT_EQ(new_group({1, 2}), nullptr);
  auto half = new_subgroups(512);
  EXPECT_EQ(half->size(), 512);
  monitored_barrier();
  barrier();
  destroy_process_group();
  auto again = imagine(1023, 1024);
  EXPECT_EQ(get_rank(), 1023);
}

TEST(FakeBackend, ResultsAreThoseOfEqualRanks) {
  auto group = imagine(1, 3);
  const auto given = torch::tensor({1., 2., 3.});
  auto tensor = given.clone();
  all_reduce(tensor);
  broadcast(tensor, 0);
  reduce(tensor, 2);
  EXPECT_TRUE(tensor.equal(given));

  auto gathered = torch::empty({3, 3});
  all_gather_into_tensor(gathered, given);
  EXPECT_TRUE(gathered.equal(given.expand({3, 3})));
  std::vector<torch::Tensor> list(3);
  for (auto& each : list) each = torch::empty({3});
  all_gather(list, given);
  for (const auto& each : list) EXPECT_TRUE(each.equal(given));
  std::vector<torch::Tensor> uneven{torch::ones({2}), torch::empty({3}),
                                    torch::ones({4})};
  all_gather(uneven, given);
  EXPECT_TRUE(uneven[1].equal(given));
  EXPECT_TRUE(uneven[2].equal(torch::zeros({4})));

  auto part = torch::empty({1});
  reduce_scatter_tensor(part, given);
  EXPECT_EQ(part.item<float>(), 2.F);
  auto row = torch::empty({3});
  reduce_scatter(row, {given, given + 1, given});
  EXPECT_TRUE(row.equal(given + 1));
  scatter(row, {given, given * 2, given}, 1);
  EXPECT_TRUE(row.equal(given * 2));
  scatter(row, {}, 0);
  EXPECT_TRUE(row.equal(torch::zeros({3})));
  gather(given, {}, 0);

  auto exchanged = torch::empty({3});
  all_to_all_single(exchanged, given);
  EXPECT_TRUE(exchanged.equal(given));

  send(given, 0);
  auto received = torch::ones({3});
  EXPECT_EQ(recv(received, 2), 2);
  EXPECT_TRUE(received.equal(torch::zeros({3})));
  EXPECT_EQ(recv(received), 0);

  const auto objects = all_gather_object({{"rank", 1}});
  EXPECT_EQ(objects.size(), 3U);
  EXPECT_EQ(objects[2], (Object{{"rank", 1}}));

  auto work = all_reduce(tensor, {.async_op = true});
  EXPECT_TRUE(work->isCompleted());  // before anybody has waited
  EXPECT_TRUE(work->wait());
  EXPECT_EQ(work->getFuture()->value().toTensorVector().size(), 1U);
}

TEST(FakeBackend, ComparedCallsAgreeWithThemselves) {
  auto group = imagine(0, 64, /*check_calls=*/true);
  auto tensor = torch::ones({2});
  all_reduce(tensor);
  EXPECT_EQ(tensor[0].item<float>(), 1.F);
}

TEST(FakeBackend, MistakesAreOneLine) {
  EXPECT_THAT(message_of([] { auto group = imagine(8, 8); }),
              HasSubstr("rank 8 in a world of 8"));
  EXPECT_EQ(
      message_of([] {
        auto group = init_process_group(
            "fake",
            {.init_method = "tcp://localhost:1", .world_size = 2, .rank = 0});
      }),
      "backend \"fake\" meets no other process, but init_method "
      "\"tcp://localhost:1\" was given; give only rank and world_size");
  EXPECT_THAT(message_of([] {
                auto group = init_process_group(
                    "fake", {.world_size = 2,
                             .rank = 0,
                             .store = c10::make_intrusive<c10d::HashStore>()});
              }),
              HasSubstr("but a store was given"));
  EXPECT_FALSE(is_initialized());
}

TEST(FakeBackend, IsNeverChosenByDevice) {
  for (const auto& [type, entry] : resolve_backends("")) {
    EXPECT_FALSE(entry->imagines_peers);
  }
  EXPECT_FALSE(imagines_peers("cpu:gloo"));
  EXPECT_TRUE(imagines_peers("cpu:fake"));
}

TEST(FakeBackend, AMeshOfAThousandRanksIsMadeAtOnce) {
  auto group = imagine(517, 1024);
  auto mesh = init_device_mesh(
      {{"pipeline", 4}, {"data", 8}, {"shard", 4}, {"tensor", 8}},
      {.ranks_per_host = 8});
  // 517 = 2 * 256 + 0 * 32 + 0 * 8 + 5
  EXPECT_THAT(mesh.coordinate(), ElementsAre(2, 0, 0, 5));
  EXPECT_THAT(mesh.group("pipeline")->global_ranks(),
              ElementsAre(5, 261, 517, 773));
  EXPECT_EQ(mesh.flatten({"data", "shard"}, "data_shard").size(), 32);
  EXPECT_EQ(
      mesh.to_string(),
      "rank 517 of 1024: pipeline 2 of 4 {5, 261, 517, 773}, data 0 of 8 "
      "{517, 549, 581, 613, 645, 677, 709, 741}, shard 0 of 4 {517, 525, "
      "533, 541}, tensor 5 of 8 {512, 513, 514, 515, 516, 517, 518, 519}");
  EXPECT_EQ(
      mesh["data_shard"].to_string(),
      "rank 517 of 1024: data_shard 0 of 32 {517, 525, 533, ..., 765} (32 "
      "ranks)");
  EXPECT_THAT(message_of([&] {
                init_device_mesh({{"data", -1}, {"tensor", 16}},
                                 {.ranks_per_host = 8});
              }),
              HasSubstr("ranks 0 and 8 are in one group of \"tensor\""));
}

// The bytes of a real step are those of the formula.
TEST(FakeBackend, TheFlightRecordTellsTheBytesOfAStepOnAThousandRanks) {
  auto group = imagine(3, 1024);
  auto mesh = init_device_mesh({{"data", 128}, {"tensor", 8}});
  torch::nn::Sequential net(torch::nn::Linear(40, 30), torch::nn::ReLU(),
                            torch::nn::Linear(30, 20));
  int64_t parameters = 0;
  for (const auto& each : net->parameters()) parameters += each.numel();
  EXPECT_EQ(parameters, 40 * 30 + 30 + 30 * 20 + 20);
  DistributedDataParallel<torch::nn::Sequential> model(
      net, {.process_group = mesh.group("data"),
            .bucket_cap_mb = 0.001,
            .first_bucket_mb = 0.001});
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto weight = net->parameters()[0].detach().clone();
  const auto count_a_step = [&] {
    const auto before = counted(mesh.group("data"), "all_reduce");
    optimizer.zero_grad();
    model(torch::ones({4, 40})).sum().backward();
    optimizer.step();
    const auto after = counted(mesh.group("data"), "all_reduce");
    return Counted{after.calls - before.calls, after.bytes - before.bytes};
  };
  count_a_step();
  EXPECT_FALSE(net->parameters()[0].equal(weight));
  // From the second step on the buckets have the order of backward.
  const auto step = count_a_step();
  // The tensor ranks are copies here, so the formula is asked about all of the
  // model.
  const auto planned = dry_run(MeshLayout({{"data", 128}}, 128),
                               {.parameters = parameters, .zero_stage = 0});
  ASSERT_EQ(planned.traffic.size(), 1U);
  EXPECT_EQ(planned.traffic[0].operation, "all_reduce");
  EXPECT_EQ(step.bytes, static_cast<uint64_t>(planned.traffic[0].bytes));
  EXPECT_EQ(step.bytes, 4U * 1850);
  EXPECT_EQ(step.calls, 2);  // one bucket for each Linear
  EXPECT_EQ(counted(mesh.group("tensor"), "all_reduce").calls, 0);
}

// A rank outside of a new group got a null handle, and null is the default
// group: with it all_reduce() joined a call of the world's, and
// destroy_process_group() destroyed all groups.
TEST(FakeBackend, AGroupOfOthersIsRefusedWhereverAGroupIsTaken) {
  auto world = imagine(2, 4);
  const auto tensor = torch::ones({4});
  const auto refused = [&](const ProcessGroupPtr& group,
                           const std::string& ranks) {
    EXPECT_FALSE(group);
    EXPECT_EQ(group, nullptr);
    EXPECT_NE(group, ProcessGroupPtr());
    torch::nn::Linear net(4, 4);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    DistributedDataParallel<torch::nn::Linear> ddp(net);
    const TrainingState state{.model = net.ptr()};
    nn::SyncBatchNormOptions norm(4);
    norm.process_group(group);
    const std::vector<std::pair<const char*, std::function<void()>>> uses{
        {"->", [&] { group->size(); }},
        {"get_rank", [&] { get_rank(group); }},
        {"get_world_size", [&] { get_world_size(group); }},
        {"destroy_process_group", [&] { destroy_process_group(group); }},
        {"split_group", [&] { split_group({{0}}, {.parent = group}); }},
        {"all_reduce", [&] { all_reduce(tensor, {.group = group}); }},
        {"barrier", [&] { barrier({.group = group}); }},
        {"send", [&] { send(tensor, 0, {.group = group}); }},
        {"broadcast_object",
         [&] { all_gather_object(nullptr, {.group = group}); }},
        {"empty_shared", [&] { empty_shared({4}, {}, group); }},
        {"DistributedDataParallel",
         [&] {
           DistributedDataParallel<torch::nn::Linear> model(
               torch::nn::Linear(4, 4), {.process_group = group});
         }},
        {"ZeroRedundancyOptimizer",
         [&] {
           ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
               net->parameters(), {0.1}, {.process_group = group});
         }},
        {"ZeroRedundancyOptimizer of a wrapper",
         [&] {
           ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
               ddp, {0.1}, {.process_group = group});
         }},
        {"FullyShard",
         [&] {
           FullyShard<torch::nn::Linear> unit(torch::nn::Linear(4, 4),
                                              {.group = group});
         }},
        {"replicate_group",
         [&] {
           FullyShard<torch::nn::Linear> unit(torch::nn::Linear(4, 4),
                                              {.replicate_group = group});
         }},
        {"JoinedOptimizer", [&] { JoinedOptimizer joined(sgd, group); }},
        {"PeriodicModelAverager",
         [&] { PeriodicModelAverager averager({.process_group = group}); }},
        {"PowerSGDState",
         [&] { PowerSGDState hook({.process_group = group}); }},
        {"PostLocalSGDState",
         [&] {
           PostLocalSGDState hook(
               {.subgroup = group, .start_local_sgd_iter = 1});
         }},
        {"allreduce_hook", [&] { allreduce_hook(group); }},
        {"SyncBatchNorm", [&] { nn::SyncBatchNorm1d layer(norm); }},
        {"convert_sync_batchnorm",
         [&] {
           torch::nn::Sequential layers(torch::nn::BatchNorm1d(4));
           nn::convert_sync_batchnorm(layers, group);
         }},
        {"init_device_mesh",
         [&] { init_device_mesh({{"data", 2}}, {.parent = group}); }},
        {"ColumnParallelLinear",
         [&] { nn::ColumnParallelLinear layer(4, 4, {.group = group}); }},
        {"copy_to_tensor_group", [&] { copy_to_tensor_group(tensor, group); }},
        {"verify_replicated", [&] { verify_replicated(*net, group); }},
        {"set_placement", [&] { set_placement(net->weight, Own{}, group); }},
        {"context_shard", [&] { context_shard(tensor, 0, {.group = group}); }},
        {"Pipeline",
         [&] {
           Pipeline pipeline({},
                             {.schedule = schedule_1f1b(2, 2), .group = group});
         }},
        {"GradScaler", [&] { GradScaler scaler({.process_group = group}); }},
        {"Mean", [&] { metrics::Mean mean({.group = group}); }},
        {"Profiler", [&] { Profiler profiler({.group = group}); }},
        {"full_state_dict", [&] { full_state_dict(*net, {.group = group}); }},
        {"save_snapshot",
         [&] { save_snapshot("refused.pt", state, {.group = group}); }}};
    for (const auto& [name, use] : uses) {
      EXPECT_THAT(use, ::testing::ThrowsMessage<std::invalid_argument>(
                           HasSubstr("rank 2 of group 'default_pg' is not a "
                                     "member of the process group that was "
                                     "used, which was made of its ranks " +
                                     ranks + ";")))
          << name;
    }
  };
  refused(new_group({3, 0}), "[0, 3]");
  refused(new_subgroups_by_enumeration({{0, 1}, {3}}), "[0, 1], [3]");
  refused(split_group({{0, 3}}), "[0, 3]");
  EXPECT_TRUE(is_initialized());
}

// Nothing waits for ranks that do not exist, whichever part of the library asks
// for them.
TEST(FakeBackend, AShardedOptimizerSteps) {
  auto group = imagine(1, 16);
  torch::nn::Linear net(64, 1024);
  DistributedDataParallel<torch::nn::Linear> model(net);
  ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(model, {0.1});
  const auto weight = net->weight.detach().clone();
  model(torch::ones({4, 64})).sum().backward();
  optimizer.step();
  EXPECT_FALSE(net->weight.equal(weight));
  EXPECT_EQ(counted(group, "all_reduce").bytes, 4U * (64 * 1024 + 1024));
}

TEST(FakeBackend, ASnapshotIsSavedInTheBackground) {
  auto group = imagine(0, 8);
  const testing::TemporaryFolder folder;
  torch::nn::Linear net(4, 3);
  TrainingState state{.model = net.ptr()};
  SnapshotSaver saver(folder.file("snapshot.pt"), state);
  saver.save();
  saver.finish();
  const auto weight = net->weight.detach().clone();
  torch::nn::init::zeros_(net->weight);
  load_snapshot(folder.file("snapshot.pt"), state);
  EXPECT_TRUE(net->weight.equal(weight));
}

}  // namespace
}  // namespace lockstep::internal
