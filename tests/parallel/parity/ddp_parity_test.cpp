// Parity with Python's DistributedDataParallel: from the same initial
// parameters, data and sampler seed both reach the same losses, parameters and
// buffers, whatever the features, on either backend. cases.cpp has the table of
// trainings. peer.py, the Python side, runs under torchrun once per world for
// all of its cases.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"
#include "tests/parallel/parity/cases.h"
#include "tests/parallel/parity/training.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

// How far the two sides may differ: rounding in the order of the same
// operations (Python's Adam interpolates its moments, LibTorch's multiplies and
// adds), over 20 steps.
constexpr double kFloatBound = 1e-6;
constexpr double kDoubleBound = 1e-12;

// Trains all cases in Python, started by rank 0, unless this world has trained
// them already. Collective.
fs::path python_records(const World& world) {
  fs::path folder = world.folder / "python";
  if (world.rank == 0 && fs::create_directory(folder)) {
    write_cases(folder / "cases.json", world.size);
    run_python_peer(
        {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/parallel/parity/peer.py",
                       folder / "cases.json"},
         .ranks = world.size,
         .environment = {"TMPDIR=" + folder.string()},
         .allowed = std::chrono::seconds(100)});
  }
  barrier();
  return folder;
}

Record read_record(const fs::path& path) {
  auto tensors = load_snapshot_file(path).model_state;
  return {tensors.begin(), tensors.end()};
}

// NaN and infinity are equal to themselves if both sides have them.
double difference(const at::Tensor& ours, const at::Tensor& python) {
  EXPECT_EQ(ours.sizes(), python.sizes());
  EXPECT_EQ(ours.scalar_type(), python.scalar_type());
  auto same = (ours == python) | (ours.isnan() & python.isnan());
  return (ours - python).abs().masked_fill(same, 0).max().item<double>();
}

double bound_of(const Case& test) {
  if (test.bound > 0) return test.bound;
  return test.dtype == "float64" ? kDoubleBound : kFloatBound;
}

void expect_same(const Case& test, const Record& ours, const Record& python) {
  bool trained = false;
  for (const auto& [name, value] : python) {
    if (name == "data" || name == "target") continue;
    if (test.losses_only && name != "losses") continue;
    if (name.starts_with("initial.")) {
      auto end = ours.find("final." + name.substr(8));
      trained |= end != ours.end() && !end->second.equal(value);
      continue;
    }
    auto found = ours.find(name);
    ASSERT_NE(found, ours.end()) << "only Python has " << name;
    EXPECT_LE(difference(found->second, value), bound_of(test)) << name;
  }
  EXPECT_TRUE(trained || test.losses_only);
}

void expect_parity(const World& world, const Case& test) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  for (const std::string& backend : test.backends) {
    SCOPED_TRACE(backend);
    auto group = init_process_group(backend);
    auto file = test.name + "." + std::to_string(world.rank) + ".pt";
    auto python = read_record(python_records(world) / file);
    expect_same(test, train(test, python), python);
  }
}

const bool registered = [] {
  for (const Case& test : all_cases()) {
    register_world_test(
        "DdpParity", test.name, {test.ranks},
        [test](const World& world) { expect_parity(world, test); }, __FILE__,
        __LINE__);
  }
  return true;
}();

}  // namespace
}  // namespace lockstep::internal::testing
