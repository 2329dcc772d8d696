// Compares groups and places with those of Python's init_device_mesh
// (mesh_peer.py), both on a backend "fake".

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/mesh/device_mesh.h"
#include "tests/harness/python_peer.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

json all_cases() {
  return json::parse(R"([
    {"axes": [["data", 2], ["tensor", 2]], "flatten": [["data", "tensor"]]},
    {"axes": [["data", 2], ["tensor", 3]], "flatten": []},
    {"axes": [["data", 1], ["tensor", 4]], "flatten": [["data", "tensor"]]},
    {"axes": [["data", 4], ["tensor", 1]], "flatten": []},
    {"axes": [["data", 6]], "flatten": []},
    {"axes": [["data", 2], ["context", 2], ["tensor", 2]],
     "flatten": [["data", "context"], ["data", "tensor"],
                 ["context", "tensor"], ["data", "context", "tensor"]]},
    {"axes": [["pipeline", 2], ["data", 3], ["shard", 2], ["tensor", 2]],
     "flatten": [["data", "shard"], ["pipeline", "shard"],
                 ["pipeline", "data", "tensor"]]}
  ])");
}

json from_python(const json& cases) {
  return json::parse(testing::run_python_peer(
      {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/parallel/mesh/mesh_peer.py",
                     cases.dump()},
       .allowed = std::chrono::seconds(60)}));
}

json from_lockstep(const json& test, int rank, int world_size) {
  auto group =
      init_process_group("fake", {.world_size = world_size, .rank = rank});
  std::vector<MeshAxis> axes;
  for (const auto& axis : test["axes"]) axes.push_back({axis[0], axis[1]});
  auto mesh = init_device_mesh(axes);
  auto names = mesh.names();
  json said{{"rank", rank},
            {"coordinate", mesh.coordinate()},
            {"axes", json::object()},
            {"parts", json::object()}};
  for (size_t i = 0; i < names.size(); ++i) {
    for (size_t j = i + 1; j < names.size(); ++j) {
      said["parts"][names[i] + "_" + names[j]] =
          mesh[{names[i], names[j]}].ranks();
    }
  }
  for (const auto& flat : test["flatten"]) {
    std::string joined;
    for (const std::string name : flat) {
      joined += (joined.empty() ? "" : "_") + name;
    }
    mesh.flatten(flat.get<std::vector<std::string>>(), joined);
    names.push_back(joined);
  }
  for (const auto& name : names) {
    said["axes"][name] = {{"ranks", mesh[name].group()->global_ranks()},
                          {"place", mesh[name].local_rank()},
                          {"size", mesh[name].size()}};
  }
  return said;
}

TEST(MeshInterop, GroupsAndPlacesAreThoseOfPython) {
  const auto cases = all_cases();
  const auto python = from_python(cases);
  ASSERT_EQ(python.size(), cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    int world_size = 1;
    for (const auto& axis : cases[i]["axes"]) world_size *= axis[1].get<int>();
    ASSERT_EQ(python[i].size(), static_cast<size_t>(world_size));
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(from_lockstep(cases[i], rank, world_size), python[i][rank])
          << cases[i]["axes"];
    }
  }
}

}  // namespace
}  // namespace lockstep::internal
