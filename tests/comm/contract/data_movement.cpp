// The contract of lockstep/comm/collectives.h. All data arrives bit for bit,
// whatever its dtype.

#include "lockstep/comm/collectives.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/comm/contract/contract.h"
#include "tests/comm/contract/tensors.h"

namespace lockstep::internal::testing {
namespace {

// Returns the data that rank `from` has for rank `to` (0 means for all).
at::Tensor content(at::ScalarType dtype, const Shape& shape, int from,
                   int to = 0) {
  return some_content(dtype, shape, from + 1000 * to);
}

// Tensors in one layout, each in memory of its own.
struct PlacedList {
  PlacedList(const ContractWorld& world, Layout how)
      : device(world.device), layout(how) {}
  void add(const at::Tensor& values) {
    placed.emplace_back(values, layout, device);
    views.push_back(placed.back().view);
  }
  void add_empty_like(const at::Tensor& values) {
    placed.push_back(Placed::empty_like(values, layout, device));
    views.push_back(placed.back().view);
  }
  bool surroundings_intact() const {
    for (const auto& one : placed) {
      if (!one.surroundings_intact()) return false;
    }
    return true;
  }

  c10::Device device;
  Layout layout;
  std::vector<Placed> placed;
  std::vector<at::Tensor> views;
};

void expect_bits(const at::Tensor& have, const at::Tensor& want,
                 const std::string& where) {
  EXPECT_TRUE(same_bits(have, want)) << where;
}

// Returns the shape of the tensors of all ranks together: (2, 3) gives (2 *
// size, 3), and a shape without dimensions gives (size).
Shape joined(Shape shape, int64_t size) {
  if (shape.empty()) shape = {1};
  shape[0] *= size;
  return shape;
}

CONTRACT_TEST(DataMovement, BroadcastGivesThatOfSrc, 1, 2, 3, 5, 8) {
  auto group = world.init();
  int src = 0;
  for (const auto& point : grid(world.size, moved_dtypes())) {
    src = (src + 1) % world.size;
    Placed tensor(content(point.dtype, point.shape, world.rank), point.layout,
                  world.device);
    finish(broadcast(tensor.view, src, {.async_op = point.async_op}));
    expect_bits(tensor.view, content(point.dtype, point.shape, src),
                point.describe());
    EXPECT_TRUE(tensor.surroundings_intact()) << point.describe();
  }
}

CONTRACT_TEST(DataMovement, AllGatherIsInRankOrder, 1, 2, 3, 5, 8) {
  auto group = world.init();
  for (const auto& point : grid(world.size, moved_dtypes())) {
    auto own = content(point.dtype, point.shape, world.rank);
    Placed input(own, point.layout, world.device);
    PlacedList outputs(world, point.layout);
    for (int i = 0; i < world.size; ++i) outputs.add_empty_like(own);
    finish(all_gather(outputs.views, input.view, {.async_op = point.async_op}));
    for (int i = 0; i < world.size; ++i) {
      expect_bits(outputs.views[i], content(point.dtype, point.shape, i),
                  point.describe());
    }
    expect_bits(input.view, own, point.describe());
    EXPECT_TRUE(outputs.surroundings_intact()) << point.describe();
  }
}

CONTRACT_TEST(DataMovement, AllGatherTakesShapesThatDifferByRank, 1, 2, 3, 5,
              8) {
  auto group = world.init();
  for (auto dtype : moved_dtypes()) {
    for (auto layout : layouts()) {
      for (bool async_op : {false, true}) {
        auto shape_of = [](int rank) { return Shape{rank % 3, 2 * rank + 1}; };
        Placed input(content(dtype, shape_of(world.rank), world.rank), layout,
                     world.device);
        PlacedList outputs(world, layout);
        for (int i = 0; i < world.size; ++i) {
          outputs.add_empty_like(content(dtype, shape_of(i), i));
        }
        finish(all_gather(outputs.views, input.view, {.async_op = async_op}));
        for (int i = 0; i < world.size; ++i) {
          expect_bits(outputs.views[i], content(dtype, shape_of(i), i),
                      c10::toString(dtype));
        }
        EXPECT_TRUE(outputs.surroundings_intact()) << dtype;
      }
      if (world.size > 3) break;
    }
  }
}

CONTRACT_TEST(DataMovement, AllGatherMayReadWhatItWrites, 1, 2, 3) {
  auto group = world.init();
  auto own = content(at::kFloat, {3, 2}, world.rank);
  for (bool async_op : {false, true}) {
    // The input is this rank's own output; the outputs are columns of one
    // tensor.
    auto all = at::zeros({3, 2, world.size}, world.device);
    std::vector<at::Tensor> outputs;
    for (int i = 0; i < world.size; ++i) outputs.push_back(all.select(2, i));
    outputs[world.rank].copy_(own);
    finish(all_gather(outputs, outputs[world.rank], {.async_op = async_op}));
    for (int i = 0; i < world.size; ++i) {
      expect_bits(outputs[i], content(at::kFloat, {3, 2}, i), "columns");
    }
    // The input overlaps itself; this is allowed because it is only read.
    auto rows = at::empty({world.size, 4}, world.device);
    finish(
        all_gather(rows.unbind(),
                   at::full({1}, world.rank + 1.0f, world.device).expand({4}),
                   {.async_op = async_op}));
    EXPECT_TRUE(rows.cpu().equal(at::arange(1.0, world.size + 1.0, at::kFloat)
                                     .unsqueeze(1)
                                     .expand({world.size, 4})));
  }
}

CONTRACT_TEST(DataMovement, AllGatherIntoTensorConcatenatesAndStacks, 1, 2, 3,
              5, 8) {
  auto group = world.init();
  for (const auto& point : grid(world.size, moved_dtypes())) {
    std::vector<at::Tensor> contents;
    for (int i = 0; i < world.size; ++i) {
      contents.push_back(content(point.dtype, point.shape, i));
    }
    auto stacked = at::stack(contents);
    Placed input(contents[world.rank], point.layout, world.device);
    for (const auto& want :
         {stacked, stacked.reshape(joined(point.shape, world.size)),
          stacked.flatten()}) {
      auto output = Placed::empty_like(want, point.layout, world.device);
      finish(all_gather_into_tensor(output.view, input.view,
                                    {.async_op = point.async_op}));
      expect_bits(output.view, want, point.describe());
      EXPECT_TRUE(output.surroundings_intact()) << point.describe();
    }
  }
}

CONTRACT_TEST(DataMovement, AllGatherIntoTensorTakesItsOwnPartAsInput, 1, 2, 3,
              5) {
  auto group = world.init();
  for (auto dtype : {at::kFloat, at::kHalf, at::kByte, at::kComplexDouble}) {
    for (auto layout : layouts()) {
      for (bool async_op : {false, true}) {
        std::vector<at::Tensor> contents;
        for (int i = 0; i < world.size; ++i) {
          contents.push_back(content(dtype, {2, 3}, i));
        }
        auto want = at::stack(contents);
        auto output = Placed::empty_like(want, layout, world.device);
        output.view[world.rank].copy_(contents[world.rank]);
        finish(all_gather_into_tensor(output.view, output.view[world.rank],
                                      {.async_op = async_op}));
        expect_bits(output.view, want, c10::toString(dtype));
        EXPECT_TRUE(output.surroundings_intact()) << dtype;
      }
    }
  }
}

CONTRACT_TEST(DataMovement, AllGatherCoalescedMovesEachTensor, 1, 2, 3, 5, 8) {
  auto group = world.init();
  const std::vector<Shape> shapes{{3, 5}, {}, {0}, {7}};
  for (bool async_op : {false, true}) {
    PlacedList inputs(world, Layout::strided);
    std::vector<PlacedList> outputs(world.size,
                                    PlacedList(world, Layout::transposed));
    auto values = [&](size_t k, int rank) {
      return content(moved_dtypes()[k % moved_dtypes().size()],
                     shapes[k % shapes.size()], rank, static_cast<int>(k));
    };
    const size_t count = moved_dtypes().size() * shapes.size();
    std::vector<std::vector<at::Tensor>> lists;
    for (size_t k = 0; k < count; ++k) inputs.add(values(k, world.rank));
    for (int i = 0; i < world.size; ++i) {
      for (size_t k = 0; k < count; ++k)
        outputs[i].add_empty_like(values(k, i));
      lists.push_back(outputs[i].views);
    }
    finish(all_gather_coalesced(lists, inputs.views, {.async_op = async_op}));
    for (int i = 0; i < world.size; ++i) {
      for (size_t k = 0; k < count; ++k) {
        expect_bits(lists[i][k], values(k, i), c10::str(i, ", ", k));
      }
      EXPECT_TRUE(outputs[i].surroundings_intact()) << i;
    }
  }
}

CONTRACT_TEST(DataMovement, GatherReachesDstOnly, 1, 2, 3, 5, 8) {
  auto group = world.init();
  int dst = 0;
  for (const auto& point : grid(world.size, moved_dtypes())) {
    dst = (dst + 1) % world.size;
    auto own = content(point.dtype, point.shape, world.rank);
    Placed input(own, point.layout, world.device);
    PlacedList outputs(world, point.layout);
    for (int i = 0; i < world.size && world.rank == dst; ++i) {
      outputs.add_empty_like(own);
    }
    finish(
        gather(input.view, outputs.views, dst, {.async_op = point.async_op}));
    for (size_t i = 0; i < outputs.views.size(); ++i) {
      expect_bits(outputs.views[i],
                  content(point.dtype, point.shape, static_cast<int>(i)),
                  point.describe());
    }
    expect_bits(input.view, own, point.describe());
    EXPECT_TRUE(outputs.surroundings_intact()) << point.describe();
  }
}

CONTRACT_TEST(DataMovement, ScatterGivesEachRankItsTensor, 1, 2, 3, 5, 8) {
  auto group = world.init();
  int src = 0;
  for (const auto& point : grid(world.size, moved_dtypes())) {
    src = (src + 1) % world.size;
    auto want = content(point.dtype, point.shape, src, world.rank);
    PlacedList inputs(world, point.layout);
    for (int i = 0; i < world.size && world.rank == src; ++i) {
      inputs.add(content(point.dtype, point.shape, src, i));
    }
    auto output = Placed::empty_like(want, point.layout, world.device);
    finish(
        scatter(output.view, inputs.views, src, {.async_op = point.async_op}));
    expect_bits(output.view, want, point.describe());
    EXPECT_TRUE(output.surroundings_intact()) << point.describe();
  }
}

CONTRACT_TEST(DataMovement, AllToAllExchangesTensors, 1, 2, 3, 5, 8) {
  auto group = world.init();
  for (const auto& point : grid(world.size, moved_dtypes())) {
    PlacedList inputs(world, point.layout);
    PlacedList outputs(world, point.layout);
    for (int i = 0; i < world.size; ++i) {
      inputs.add(content(point.dtype, point.shape, world.rank, i));
      outputs.add_empty_like(inputs.views.back());
    }
    finish(
        all_to_all(outputs.views, inputs.views, {.async_op = point.async_op}));
    for (int i = 0; i < world.size; ++i) {
      expect_bits(outputs.views[i],
                  content(point.dtype, point.shape, i, world.rank),
                  point.describe());
    }
    EXPECT_TRUE(outputs.surroundings_intact()) << point.describe();
  }
}

// Returns the number of rows from rank `from` to rank `to`: some are zero, and
// the two directions differ.
int64_t rows(int from, int to) { return (from + 2 * to) % 4; }

CONTRACT_TEST(DataMovement, AllToAllTakesShapesThatDifferByPair, 1, 2, 3, 5,
              8) {
  auto group = world.init();
  for (auto dtype : moved_dtypes()) {
    for (auto layout : layouts()) {
      for (bool async_op : {false, true}) {
        PlacedList inputs(world, layout);
        PlacedList outputs(world, layout);
        for (int i = 0; i < world.size; ++i) {
          inputs.add(content(dtype, {rows(world.rank, i), 3}, world.rank, i));
          outputs.add_empty_like(
              content(dtype, {rows(i, world.rank), 3}, i, world.rank));
        }
        finish(all_to_all(outputs.views, inputs.views, {.async_op = async_op}));
        for (int i = 0; i < world.size; ++i) {
          expect_bits(outputs.views[i],
                      content(dtype, {rows(i, world.rank), 3}, i, world.rank),
                      c10::toString(dtype));
        }
        EXPECT_TRUE(outputs.surroundings_intact()) << dtype;
      }
      if (world.size > 3) break;
    }
  }
}

CONTRACT_TEST(DataMovement, AllToAllMayReadOneTensorForAll, 2, 3) {
  auto group = world.init();
  auto one = content(at::kInt, {5}, world.rank).to(world.device);
  auto outputs = at::empty({world.size, 5}, one.options());
  all_to_all(outputs.unbind(), std::vector<at::Tensor>(world.size, one));
  for (int i = 0; i < world.size; ++i) {
    expect_bits(outputs[i], content(at::kInt, {5}, i), "rows");
  }
}

CONTRACT_TEST(DataMovement, AllToAllSingleExchangesEqualParts, 1, 2, 3, 5, 8) {
  auto group = world.init();
  for (const auto& point : grid(world.size, moved_dtypes())) {
    if (point.shape.empty()) continue;  // no rows
    std::vector<at::Tensor> gives;
    std::vector<at::Tensor> takes;
    for (int i = 0; i < world.size; ++i) {
      gives.push_back(content(point.dtype, point.shape, world.rank, i));
      takes.push_back(content(point.dtype, point.shape, i, world.rank));
    }
    auto whole = joined(point.shape, world.size);
    Placed input(at::stack(gives).reshape(whole), point.layout, world.device);
    auto want = at::stack(takes).reshape(whole);
    auto output = Placed::empty_like(want, point.layout, world.device);
    finish(all_to_all_single(output.view, input.view,
                             {.async_op = point.async_op}));
    expect_bits(output.view, want, point.describe());
    EXPECT_TRUE(output.surroundings_intact()) << point.describe();
  }
}

CONTRACT_TEST(DataMovement, AllToAllSingleTakesSplitsWithZerosAmongThem, 1, 2,
              3, 5, 8) {
  auto group = world.init();
  for (auto dtype : moved_dtypes()) {
    for (auto layout : layouts()) {
      for (const Shape& row : {Shape{}, Shape{3}, Shape{2, 2}}) {
        AllToAllSingleOptions options{.async_op = row.size() == 1};
        auto part = [&](int from, int to) {
          Shape shape = row;
          shape.insert(shape.begin(), rows(from, to));
          return content(dtype, shape, from, to);
        };
        std::vector<at::Tensor> gives;
        std::vector<at::Tensor> takes;
        for (int i = 0; i < world.size; ++i) {
          gives.push_back(part(world.rank, i));
          takes.push_back(part(i, world.rank));
          options.input_split_sizes.push_back(gives.back().size(0));
          options.output_split_sizes.push_back(takes.back().size(0));
        }
        Placed input(at::cat(gives), layout, world.device);
        auto want = at::cat(takes);
        auto output = Placed::empty_like(want, layout, world.device);
        finish(all_to_all_single(output.view, input.view, options));
        expect_bits(output.view, want, c10::toString(dtype));
        EXPECT_TRUE(output.surroundings_intact()) << dtype;
      }
      if (world.size > 3) break;
    }
  }
}

// One side has splits, the other side equal parts.
CONTRACT_TEST(DataMovement, AllToAllSingleTakesSplitsOnOneSide, 1, 2, 3) {
  auto group = world.init();
  auto input = content(at::kLong, {2 * world.size, 3}, world.rank);
  auto output = at::empty_like(input, world.device);
  all_to_all_single(
      output, input.to(world.device),
      {.output_split_sizes = std::vector<int64_t>(world.size, 2)});
  for (int i = 0; i < world.size; ++i) {
    expect_bits(output.slice(0, 2 * i, 2 * i + 2),
                content(at::kLong, {2 * world.size, 3}, i)
                    .slice(0, 2 * world.rank, 2 * world.rank + 2),
                "rows");
  }
}

CONTRACT_TEST(DataMovement, LeavesThatRequireGradAndConjugatesMoveAsData, 2,
              3) {
  auto group = world.init();
  auto leaf = at::full({3}, world.rank + 1.0f, world.device).requires_grad_();
  broadcast(leaf, 1);
  EXPECT_TRUE(leaf.detach().eq(2).all().item<bool>());
  EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());

  auto all = at::zeros({world.size, 3}, world.device);
  all_gather_into_tensor(all, (leaf * leaf));
  EXPECT_TRUE(all.eq(4).all().item<bool>());
  EXPECT_FALSE(all.requires_grad());

  // The values of a conjugated source are moved, not its memory; a destination
  // may be conjugated, too.
  auto numbers = at::complex(at::arange(4.0, at::kFloat),
                             at::arange(4.0, at::kFloat) + 1.0f)
                     .to(world.device);
  auto base = world.rank == 0 ? numbers.clone() : at::zeros_like(numbers);
  broadcast(base.conj(), 0);
  EXPECT_TRUE(base.equal(numbers));
  auto gathered = at::zeros({world.size, 4}, numbers.options());
  finish(all_gather_into_tensor(gathered.conj(), numbers, {.async_op = true}));
  EXPECT_TRUE(gathered[world.size - 1].equal(numbers.conj()));
}

}  // namespace
}  // namespace lockstep::internal::testing
