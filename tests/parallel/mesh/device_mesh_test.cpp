#include "lockstep/parallel/mesh/device_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::World;

// Adds 2^rank over the ranks of `group`: the sum says which ranks are in it.
int members(const ProcessGroupPtr& group, int rank) {
  auto bits = torch::full({1}, 1 << rank, torch::kLong);
  all_reduce(bits, {.group = group});
  return static_cast<int>(bits.item<int64_t>());
}

int bits_of(const std::vector<int>& ranks) {
  int bits = 0;
  for (const int rank : ranks) bits += 1 << rank;
  return bits;
}

std::vector<MeshAxis> shape_for(int world_size) {
  switch (world_size) {
    case 1:
      return {{"data", 1}, {"context", 1}, {"tensor", 1}};
    case 2:
      return {{"data", 1}, {"context", 2}, {"tensor", 1}};
    case 4:
      return {{"data", 2}, {"context", 1}, {"tensor", 2}};
    default:
      return {{"data", 2}, {"context", 2}, {"tensor", 2}};
  }
}

WORLD_TEST(DeviceMesh, SumsAlongEveryAxis, 1, 2, 4, 8) {
  auto group = init_process_group();
  auto mesh = init_device_mesh(shape_for(world.size));
  mesh.flatten({"data", "context"}, "data_context");
  mesh.flatten({"data", "tensor"}, "outer");
  mesh[{"context", "tensor"}].flatten("inner");
  mesh.flatten({"data", "context", "tensor"}, "all");
  const auto layout = mesh.layout();
  for (const auto* name :
       {"data", "context", "tensor", "data_context", "outer", "inner", "all"}) {
    const auto ranks = layout.group_of(world.rank, name);
    EXPECT_EQ(mesh.group(name)->global_ranks(), ranks) << name;
    EXPECT_EQ(members(mesh.group(name), world.rank), bits_of(ranks)) << name;
    EXPECT_EQ(mesh.size(name), static_cast<int>(ranks.size()));
    EXPECT_EQ(mesh.group(name)->rank(), mesh.local_rank(name)) << name;
    EXPECT_EQ(ranks[mesh.local_rank(name)], world.rank) << name;
  }
}

// The numbers for one rank of 8, worked out by hand.
WORLD_TEST(DeviceMesh, TellsWhereARankIs, 8) {
  auto group = init_process_group();
  auto mesh = init_device_mesh({{"data", 2}, {"shard", 2}, {"tensor", 2}});
  EXPECT_EQ(mesh.size(), 8);
  if (world.rank != 5) return;
  EXPECT_THAT(mesh.coordinate(), ElementsAre(1, 0, 1));
  EXPECT_EQ(mesh.local_rank("data"), 1);
  EXPECT_EQ(mesh.local_rank("shard"), 0);
  EXPECT_THAT(mesh.group("data")->global_ranks(), ElementsAre(1, 5));
  EXPECT_THAT(mesh.group("shard")->global_ranks(), ElementsAre(5, 7));
  EXPECT_THAT(mesh.group("tensor")->global_ranks(), ElementsAre(4, 5));
  EXPECT_EQ(mesh.to_string(),
            "rank 5 of 8: data 1 of 2 {1, 5}, shard 0 of 2 {5, 7}, tensor 1 of "
            "2 {4, 5}");
  const auto part = mesh[{"data", "tensor"}];
  EXPECT_THAT(part.ranks(), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(part.names(), ElementsAre("data", "tensor"));
  EXPECT_EQ(part.size(), 4);
  EXPECT_EQ(part["tensor"].group(), mesh.group("tensor"));
  EXPECT_EQ(part["tensor"].local_rank(), 1);
  EXPECT_EQ(mesh["data"].to_string(), "rank 5 of 8: data 1 of 2 {1, 5}");
  EXPECT_THAT(message_of([&] { part.group("shard"); }),
              HasSubstr("has no axis \"shard\""));
  EXPECT_THAT(message_of([&] { part.group(); }),
              HasSubstr("has several axes; name one: group(\"data\")"));
}

WORLD_TEST(DeviceMesh, MakesNoGroupTwice, 4) {
  auto group = init_process_group();
  auto mesh = init_device_mesh({{"data", 2}, {"context", 2}, {"tensor", 1}});
  auto flat = mesh.flatten({"data", "context"}, "data_context");
  EXPECT_EQ(flat.group(), group.get());  // all ranks
  EXPECT_EQ(mesh.flatten({"data", "context"}, "data_context").group(),
            flat.group());
  EXPECT_EQ(mesh["data_context"].group(), flat.group());
  EXPECT_EQ(mesh.flatten({"data", "tensor"}, "data_tensor").group(),
            mesh.group("data"));
  auto line = init_device_mesh({{"pipeline", 1}, {"data", -1}, {"tensor", 1}});
  EXPECT_EQ(line.group("data"), group.get());
  EXPECT_EQ(line.group("pipeline"), line.group("tensor"));
  EXPECT_EQ(line.group("tensor")->size(), 1);
  auto own = init_device_mesh({{"data", 4}}, {.backend = "gloo"});
  EXPECT_NE(own.group(), group.get());
  EXPECT_EQ(own.group()->backend_config(), "cpu:gloo");
  EXPECT_EQ(members(own.group(), world.rank), 15);
  auto patient =
      init_device_mesh({{"data", 4}}, {.timeout = std::chrono::seconds(20)});
  EXPECT_EQ(patient.group()->timeout(), std::chrono::seconds(20));
}

WORLD_TEST(DeviceMesh, ArrangesTheRanksOfItsParent, 4) {
  auto group = init_process_group();
  auto parent = split_group({{0, 2}, {1, 3}});
  auto mesh =
      init_device_mesh({{"data", 2}, {"tensor", 1}}, {.parent = parent});
  EXPECT_EQ(mesh.group("data"), parent);
  EXPECT_EQ(mesh.local_rank("data"), world.rank / 2);
  EXPECT_EQ(mesh.group("tensor")->global_ranks(), std::vector<int>{world.rank});
  EXPECT_EQ(mesh.ranks(), parent->global_ranks());
}

WORLD_TEST(DeviceMesh, RanksThatGiveDifferentMeshesAreNamed, 2) {
  auto group = init_process_group();
  const bool odd = world.rank == 1;
  EXPECT_EQ(
      message_of([&] { init_device_mesh({{odd ? "tensor" : "data", 2}}); }),
      "init_device_mesh: the ranks gave different meshes: rank 0 data 2, "
      "rank 1 tensor 2; give the same on every rank");
  EXPECT_EQ(members(group, world.rank), 3);  // the group still works
}

WORLD_TEST(DeviceMesh, TensorGroupsLieWithinAHost, 4) {
  auto group = init_process_group();
  const std::vector<MeshAxis> wrong{{"tensor", 2}, {"data", 2}};
  EXPECT_EQ(
      message_of([&] { init_device_mesh(wrong, {.ranks_per_host = 2}); }),
      "init_device_mesh: in mesh tensor 2 x data 2 ranks 0 and 2 are in one "
      "group of \"tensor\" but on different hosts (2 ranks are on the first "
      "one's); make \"tensor\" the last axis and its size a divisor of the "
      "number of ranks on a host, or set allow_tensor_across_hosts");
  init_device_mesh(wrong);  // all ranks are on this host
  auto allowed = init_device_mesh(
      wrong, {.ranks_per_host = 2, .allow_tensor_across_hosts = true});
  EXPECT_EQ(allowed.size("tensor"), 2);
  init_device_mesh({{"data", 2}, {"tensor", 2}}, {.ranks_per_host = 2});
  EXPECT_THAT(message_of([&] {
                init_device_mesh({{"tensor", 4}}, {.ranks_per_host = 2});
              }),
              HasSubstr("ranks 0 and 2"));
  EXPECT_THAT(
      message_of([&] { init_device_mesh(wrong, {.ranks_per_host = -1}); }),
      HasSubstr("ranks_per_host is -1"));
}

WORLD_TEST(DeviceMesh, EachRankTellsItsHost, 4) {
  ::setenv("LOCKSTEP_HOST_ID", world.rank < 2 ? "first" : "second", 1);
  {
    auto group = init_process_group();
    EXPECT_THAT(
        message_of([&] { init_device_mesh({{"tensor", 2}, {"data", 2}}); }),
        HasSubstr("ranks 0 and 2 are in one group of \"tensor\""));
    auto mesh = init_device_mesh({{"data", 2}, {"tensor", 2}});
    EXPECT_EQ(members(mesh.group("data"), world.rank),
              world.rank % 2 == 0 ? 5 : 10);
  }
  ::unsetenv("LOCKSTEP_HOST_ID");
}

WORLD_TEST(DeviceMesh, WrongSizesNameTheWorld, 2) {
  auto group = init_process_group();
  EXPECT_THAT(message_of([&] { init_device_mesh({{"data", 3}}); }),
              HasSubstr("mesh data 3 for a world of 2 ranks: the product of "
                        "the sizes is 3; it must be 2"));
}

}  // namespace
}  // namespace lockstep::internal
