#include "lockstep/parallel/mesh/dry_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

struct Row {
  std::string axis;
  std::string operation;
  int64_t calls;
  int64_t bytes;
  int64_t sent;
  bool operator==(const Row&) const = default;
};
void PrintTo(const Row& row, std::ostream* out) {
  *out << row.axis << ' ' << row.operation << ' ' << row.calls << ' '
       << row.bytes << ' ' << row.sent;
}

std::vector<Row> rows(const DryRun& run) {
  std::vector<Row> rows;
  for (const auto& each : run.traffic) {
    rows.push_back(
        {each.axis, each.operation, each.calls, each.bytes, each.sent});
  }
  return rows;
}

// The example of the paper: 7.5 billion parameters, mixed precision with Adam
// (2 + 2 + 12 bytes), 64 ranks (figure 1), and its table 1 for other numbers of
// ranks, in GB (10^9 bytes).
TEST(DryRun, MemoryIsThatOfThePaper) {
  struct Figure {
    int ranks;
    double stages[4];
  };
  for (const auto& [ranks, stages] : std::vector<Figure>{
           {1, {120, 120, 120, 120}},
           {4, {120, 52.5, 41.3, 30}},
           {16, {120, 35.6, 21.6, 7.5}},
           {64, {120, 31.4, 16.6, 1.88}},
           {256, {120, 30.4, 15.4, 0.47}},
           {1024, {120, 30.1, 15.1, 0.12}},
       }) {
    for (int stage = 0; stage < 4; ++stage) {
      const auto run = dry_run(MeshLayout({{"shard", ranks}}, ranks),
                               {.parameters = 7'500'000'000,
                                .parameter_bytes = 2,
                                .gradient_bytes = 2,
                                .optimizer_bytes = 12,
                                .zero_stage = stage});
      EXPECT_NEAR(static_cast<double>(run.memory.total()) / 1e9, stages[stage],
                  stages[stage] < 10 ? 0.01 : 0.06)
          << ranks << " ranks, stage " << stage;
    }
  }
}

// 1,000 parameters of float32 on four ranks: 4,000 bytes, of which a ring sends
// 3 parts of 1,000 to gather or to reduce and scatter them. By section 7 of the
// paper stage 2 communicates what an all_reduce does, and stage 3 half as much
// more; stage 1 does so here, too, because it reduces to all ranks.
TEST(DryRun, ShardingSendsWhatThePaperSays) {
  const auto traffic = [](int stage, int64_t units = 1) {
    return rows(
        dry_run(MeshLayout({{"shard", 4}}, 4),
                {.parameters = 1000, .zero_stage = stage, .units = units}));
  };
  const Row reduced{"shard", "all_reduce", 1, 4000, 6000};
  const Row gathered{"shard", "all_gather_into_tensor", 1, 4000, 3000};
  const Row scattered{"shard", "reduce_scatter_tensor", 1, 4000, 3000};
  EXPECT_EQ(traffic(0), (std::vector<Row>{reduced}));
  EXPECT_EQ(traffic(1), (std::vector<Row>{reduced, gathered}));
  EXPECT_EQ(traffic(2), (std::vector<Row>{gathered, scattered}));
  EXPECT_EQ(traffic(3), (std::vector<Row>{gathered, gathered, scattered}));
  // Units change the number of calls only.
  auto units = traffic(3, 5);
  for (auto& row : units) EXPECT_EQ(std::exchange(row.calls, 1), 5);
  EXPECT_EQ(units, traffic(3));
}

// Two layers of 16 features for 8 tokens: activations of 512 bytes. Each of the
// four all_reduces of a layer is a gather and a reduction to parts, and two
// biases and two norms (weight and bias) of 16 features are added up.
TEST(DryRun, SequenceParallelLayersGatherAndScatter) {
  EXPECT_EQ(rows(dry_run(MeshLayout({{"tensor", 2}}, 2),
                         {.parameters = 100,
                          .layers = 2,
                          .hidden = 16,
                          .sequence = 8,
                          .sequence_parallel = true})),
            (std::vector<Row>{
                {"tensor", "all_gather_into_tensor", 8, 8 * 512, 4 * 512},
                {"tensor", "reduce_scatter_tensor", 8, 8 * 512, 4 * 512},
                {"tensor", "all_reduce", 4, 4 * 64, 4 * 64},
                {"tensor", "all_reduce_coalesced", 4, 8 * 64, 8 * 64},
            }));
}

// Worked out by hand. 9,600 parameters: a rank has 9600 / (tensor 2 * pipeline
// 3) = 1,600, and of these 800 after sharding. The replicas are data 2 x
// context 2, a ring of four. A rank's activations are 2 sequences * 8 / 2
// tokens * 16 * 4 bytes = 512 bytes; a rank has 6 / 3 = 2 layers and sees 5
// micro-batches.
TEST(DryRun, EachAxisHasItsOwnTraffic) {
  const MeshLayout layout({{"pipeline", 3},
                           {"data", 2},
                           {"shard", 2},
                           {"context", 2},
                           {"tensor", 2}},
                          48);
  const auto run = dry_run(layout, {.parameters = 9600,
                                    .zero_stage = 2,
                                    .layers = 6,
                                    .hidden = 16,
                                    .sequence = 8,
                                    .micro_batch = 2,
                                    .micro_batches = 5});
  EXPECT_EQ(run.memory.parameters, 1600 * 4);
  EXPECT_EQ(run.memory.gradients, 800 * 4);
  EXPECT_EQ(run.memory.optimizer, 800 * 8);
  EXPECT_EQ(rows(run),
            (std::vector<Row>{
                {"shard", "all_gather_into_tensor", 1, 6400, 3200},
                {"shard", "reduce_scatter_tensor", 1, 6400, 3200},
                {"data x context", "all_reduce", 1, 3200, 4800},
                // 4 in each of 2 layers and 5 micro-batches; two ranks send as
                // much as they reduce.
                {"tensor", "all_reduce", 40, 40 * 512, 40 * 512},
                // 5 forward, 5 backward.
                {"pipeline", "isend", 10, 10 * 512, 10 * 512},
                // Keys and values of half of the heads: 2 * 256 bytes.
                {"context", "isend", 10, 10 * 512, 10 * 512},
                {"context", "isend", 10, 10 * 512, 10 * 512},
                {"context", "isend", 20, 20 * 512, 20 * 512},
            }));
}

TEST(DryRun, OneRankCommunicatesNothing) {
  const auto run =
      dry_run(MeshLayout({{"data", 1}, {"shard", 1}, {"tensor", 1}}, 1),
              {.parameters = 10, .layers = 2, .hidden = 4, .sequence = 4});
  EXPECT_THAT(run.traffic, IsEmpty());
  EXPECT_EQ(run.memory.total(), 160);
  EXPECT_THAT(run.to_string(), HasSubstr("nothing is communicated"));
}

TEST(DryRun, WhatDoesNotDivideIsRoundedUp) {
  const auto run = dry_run(MeshLayout({{"shard", 4}}, 4), {.parameters = 10});
  EXPECT_EQ(run.memory.parameters, 3 * 4);
  EXPECT_EQ(run.traffic[0].bytes, 40);
  EXPECT_EQ(run.traffic[0].sent, 30);
}

TEST(DryRun, PrintsATable) {
  const auto run = dry_run(
      MeshLayout({{"data", 16}, {"shard", 8}, {"tensor", 8}}, 1024),
      {.parameters = 8'000'000, .layers = 2, .hidden = 64, .sequence = 32});
  EXPECT_EQ(
      run.to_string(),
      R"(mesh data 16 x shard 8 x tensor 8, 1,024 ranks; 8,000,000 parameters, ZeRO stage 3

axis    group of rank 0                    size  groups
data    {0, 64, 128, ..., 960} (16 ranks)    16      64
shard   {0, 8, 16, 24, 32, 40, 48, 56}        8     128
tensor  {0, 1, 2, 3, 4, 5, 6, 7}              8     128

memory of a rank      bytes
parameters          500,000
gradients           500,000
optimizer         1,000,000
together          2,000,000

axis    operation               of                    calls of a step      bytes  sent by a rank
shard   all_gather_into_tensor  parameters, forward                 1  4,000,000       3,500,000
shard   all_gather_into_tensor  parameters, backward                1  4,000,000       3,500,000
shard   reduce_scatter_tensor   gradients                           1  4,000,000       3,500,000
data    all_reduce              gradients                           1    500,000         937,500
tensor  all_reduce              activations                         8     65,536         114,688
)");
}

TEST(DryRun, MistakesAreOneLine) {
  const MeshLayout layout({{"data", 2}}, 2);
  const auto expect = [&](const DryRunModel& model, const std::string& line) {
    EXPECT_THAT([&] { dry_run(layout, model); },
                ThrowsMessage<std::invalid_argument>(line));
  };
  expect({}, "dry_run: parameters is 0; give at least 1");
  expect({.parameters = 1, .zero_stage = 4},
         "dry_run: zero_stage is 4; allowed are 0, 1, 2 and 3");
  expect({.parameters = 1, .units = 0}, "dry_run: units is 0; give at least 1");
  expect({.parameters = 1, .layers = 2},
         "dry_run: hidden is 0; give at least 1");
}

}  // namespace
}  // namespace lockstep::internal
