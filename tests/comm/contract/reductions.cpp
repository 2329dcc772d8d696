// The contract of lockstep/comm/collectives.h.

#include "lockstep/comm/collectives.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/comm/contract/contract.h"
#include "tests/comm/contract/tensors.h"

namespace lockstep::internal::testing {
namespace {

std::vector<at::Tensor> of_all_ranks(
    int size, const std::function<at::Tensor(int rank)>& make) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(make(rank));
  return all;
}

std::vector<at::Tensor> exact_inputs(ReduceOpType op, at::ScalarType dtype,
                                     const Shape& shape, int size) {
  return of_all_ranks(
      size, [&](int rank) { return exact_numbers(op, dtype, shape, rank); });
}

// Only one operation reduces `large` tensors, because they take long.
std::vector<GridPoint> grid_of(const ContractWorld& world, ReduceOpType op,
                               bool large = true) {
  return grid(world.size, reduced_dtypes(op), large && op == ReduceOpType::SUM);
}

// Expects that `tensor` has the same bits on every rank.
void expect_equal_on_all_ranks(const at::Tensor& tensor, int size) {
  auto bits = tensor.contiguous();
  std::vector<at::Tensor> all;
  for (int i = 0; i < size; ++i) all.push_back(at::empty_like(bits));
  all_gather(all, bits);
  for (int i = 0; i < size; ++i) {
    EXPECT_TRUE(same_bits(all[i], bits)) << "that of rank " << i;
  }
}

CONTRACT_TEST(Reductions, AllReduceMatchesTheScalarReference, 1, 2, 3, 5, 8) {
  auto group = world.init();
  for (auto op : world.reduce_ops()) {
    for (const auto& point : grid_of(world, op)) {
      auto inputs = exact_inputs(op, point.dtype, point.shape, world.size);
      Placed tensor(inputs[world.rank], point.layout, world.device);
      auto work =
          all_reduce(tensor.view, {.op = op, .async_op = point.async_op});
      EXPECT_EQ(work != nullptr, point.async_op);
      finish(work);
      EXPECT_TRUE(matches(tensor.view, op, inputs))
          << op_name(op) << " " << point.describe();
      EXPECT_TRUE(tensor.surroundings_intact())
          << op_name(op) << " " << point.describe();
    }
  }
}

// Sums must be accumulated in the dtype's precision or a better one.
CONTRACT_TEST(Reductions, RoundedSumsAreWithinTheirBoundAndEqualOnAllRanks, 1,
              2, 3, 5, 8) {
  auto group = world.init();
  for (auto op : {ReduceOpType::SUM, ReduceOpType::AVG}) {
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                       at::kComplexFloat, at::kComplexDouble}) {
      for (const Shape& shape : {Shape{1}, Shape{1023}, Shape{262'145}}) {
        auto inputs = of_all_ranks(world.size, [&](int rank) {
          return real_numbers(dtype, shape, rank);
        });
        auto tensor =
            inputs[world.rank].to(world.device, /*non_blocking=*/false,
                                  /*copy=*/true);
        all_reduce(tensor, {.op = op});
        EXPECT_TRUE(within(tensor, reduce_in_rank_order(op, inputs),
                           accumulation_bound(op, inputs)))
            << op_name(op) << " " << dtype << shape;
        expect_equal_on_all_ranks(tensor, world.size);
        if (world.size > 3) break;  // in larger worlds only the small one
      }
    }
  }
}

CONTRACT_TEST(Reductions, InfinitiesAndNotANumberSpread, 2, 3) {
  auto group = world.init();
  const double inf = std::numeric_limits<double>::infinity();
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    auto tensor = at::ones({4}, dtype).to(world.device);
    if (world.rank == 0) tensor[0] = inf;
    if (world.rank == 1) {
      tensor[1] = -inf;
      tensor[2] = std::nan("");
    }
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<double>(), inf) << dtype;
    EXPECT_EQ(tensor[1].item<double>(), -inf) << dtype;
    EXPECT_TRUE(std::isnan(tensor[2].item<double>())) << dtype;
    EXPECT_EQ(tensor[3].item<double>(), world.size) << dtype;
  }
}

// MPI's MIN and MAX of half types lost a NaN, or kept it, by the order of the
// ranks. Those of Gloo and MPI's own types still do: they are not ours.
CONTRACT_TEST(Reductions, MinAndMaxKeepTheNotANumberOfAnyRank, 2, 3) {
  if (world.backend != "shm" && world.backend != "mpi") return;
  auto group = world.init();
  for (auto dtype : {at::kHalf, at::kBFloat16}) {
    for (auto op : {ReduceOpType::MIN, ReduceOpType::MAX}) {
      for (int nan_rank = 0; nan_rank < world.size; ++nan_rank) {
        auto tensor = at::ones({2}, dtype);
        if (world.rank == nan_rank) tensor[0] = std::nan("");
        all_reduce(tensor, {.op = op});
        EXPECT_TRUE(std::isnan(tensor[0].item<double>()))
            << dtype << " " << op_name(op) << " " << nan_rank;
        EXPECT_EQ(tensor[1].item<double>(), 1);
      }
    }
  }
}

CONTRACT_TEST(Reductions, LeavesThatRequireGradAreReducedInPlaceAsData, 2, 3) {
  auto group = world.init();
  auto leaf = at::ones({3}, world.device).requires_grad_();
  all_reduce(leaf);
  EXPECT_TRUE(leaf.detach().eq(world.size).all().item<bool>());
  EXPECT_TRUE(leaf.is_leaf());
  EXPECT_TRUE(leaf.requires_grad());
  (leaf * 2).sum().backward();
  EXPECT_TRUE(leaf.grad().eq(2).all().item<bool>());
  finish(all_reduce(leaf.grad(), {.op = ReduceOp::AVG, .async_op = true}));
  EXPECT_TRUE(leaf.grad().eq(2).all().item<bool>());
}

CONTRACT_TEST(Reductions, ConjugatedAndNegatedViewsAreReducedAsTheyRead, 2, 3) {
  auto group = world.init();
  auto dtype = at::kComplexFloat;
  auto inputs = exact_inputs(ReduceOp::SUM, dtype, {7}, world.size);
  auto sum = reduce_in_rank_order(ReduceOp::SUM, inputs);
  for (bool async_op : {false, true}) {
    auto base = inputs[world.rank].to(world.device, false, /*copy=*/true);
    auto view = base.conj();
    ASSERT_TRUE(view.is_conj());
    finish(all_reduce(view, {.async_op = async_op}));
    EXPECT_TRUE(base.cpu().equal(sum))
        << "the sum of conjugates is the conjugate of the sum";

    base = inputs[world.rank].to(world.device, false, /*copy=*/true);
    auto negated = at::imag(base.conj());
    ASSERT_TRUE(negated.is_neg());
    finish(all_reduce(negated, {.async_op = async_op}));
    EXPECT_TRUE(at::imag(base).cpu().equal(at::imag(sum)));
    EXPECT_TRUE(at::real(base).cpu().equal(at::real(inputs[world.rank])));
  }
}

CONTRACT_TEST(Reductions, ReduceGivesTheReductionToDst, 1, 2, 3, 5, 8) {
  auto group = world.init();
  int dst = 0;
  for (auto op : world.reduce_ops()) {
    for (const auto& point : grid_of(world, op)) {
      dst = (dst + 1) % world.size;
      auto inputs = exact_inputs(op, point.dtype, point.shape, world.size);
      Placed tensor(inputs[world.rank], point.layout, world.device);
      finish(reduce(tensor.view, dst, {.op = op, .async_op = point.async_op}));
      EXPECT_TRUE(tensor.surroundings_intact())
          << op_name(op) << " " << point.describe();
      if (world.rank != dst) continue;
      EXPECT_TRUE(matches(tensor.view, op, inputs))
          << op_name(op) << " " << point.describe() << " to " << dst;
    }
  }
}

// Returns the numbers of rank `rank` for rank `part`, in any shape.
at::Tensor part_of(ReduceOpType op, at::ScalarType dtype, const Shape& shape,
                   int rank, int part) {
  return exact_numbers(op, dtype, shape, rank + 100 * part);
}

std::vector<at::Tensor> parts_for(ReduceOpType op, at::ScalarType dtype,
                                  const Shape& shape, int size, int part) {
  return of_all_ranks(
      size, [&](int rank) { return part_of(op, dtype, shape, rank, part); });
}

CONTRACT_TEST(Reductions, ReduceScatterGivesEachRankItsPart, 1, 2, 3, 5, 8) {
  auto group = world.init();
  for (auto op : world.reduce_ops()) {
    for (const auto& point : grid_of(world, op, world.size == 2)) {
      std::vector<Placed> parts;
      std::vector<at::Tensor> list;
      for (int part = 0; part < world.size; ++part) {
        parts.emplace_back(
            part_of(op, point.dtype, point.shape, world.rank, part),
            point.layout, world.device);
        list.push_back(parts.back().view);
      }
      auto before = list[0].clone();
      auto output = Placed::empty_like(list[0], point.layout, world.device);
      finish(reduce_scatter(output.view, list,
                            {.op = op, .async_op = point.async_op}));
      EXPECT_TRUE(matches(
          output.view, op,
          parts_for(op, point.dtype, point.shape, world.size, world.rank)))
          << op_name(op) << " " << point.describe();
      EXPECT_TRUE(output.surroundings_intact()) << point.describe();
      EXPECT_TRUE(same_bits(list[0], before))
          << "the input is not written; " << point.describe();
    }
  }
}

CONTRACT_TEST(Reductions, ReduceScatterTakesPartsOfDifferentShapes, 1, 2, 3, 5,
              8) {
  auto group = world.init();
  auto shape_of = [](int part) { return Shape{part % 3, part + 2}; };
  for (auto op : {ReduceOpType::SUM, ReduceOpType::AVG, ReduceOpType::MAX}) {
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kInt, at::kShort}) {
      if (op == ReduceOpType::AVG && !c10::isFloatingType(dtype)) continue;
      for (bool async_op : {false, true}) {
        std::vector<at::Tensor> list;
        for (int part = 0; part < world.size; ++part) {
          list.push_back(part_of(op, dtype, shape_of(part), world.rank, part)
                             .to(world.device));
        }
        auto output = at::empty_like(list[world.rank]);
        finish(reduce_scatter(output, list, {.op = op, .async_op = async_op}));
        EXPECT_TRUE(matches(
            output, op,
            parts_for(op, dtype, shape_of(world.rank), world.size, world.rank)))
            << op_name(op) << " " << dtype;
      }
    }
  }
}

CONTRACT_TEST(Reductions, ReduceScatterTensorTakesConcatenatedAndStacked, 1, 2,
              3, 5, 8) {
  auto group = world.init();
  for (auto op : world.reduce_ops()) {
    for (const auto& point : grid_of(world, op, world.size == 2)) {
      std::vector<at::Tensor> parts;
      for (int part = 0; part < world.size; ++part) {
        parts.push_back(
            part_of(op, point.dtype, point.shape, world.rank, part));
      }
      auto expected =
          parts_for(op, point.dtype, point.shape, world.size, world.rank);
      auto stacked = at::stack(parts);
      Shape joined = point.shape;
      if (joined.empty()) joined = {1};
      joined[0] *= world.size;
      std::vector<at::Tensor> wholes;
      wholes.push_back(stacked.reshape(joined));
      if (op == ReduceOpType::SUM) wholes.push_back(stacked);
      for (const auto& whole : wholes) {
        Placed input(whole, point.layout, world.device);
        auto output = Placed::empty_like(parts[0], point.layout, world.device);
        finish(reduce_scatter_tensor(output.view, input.view,
                                     {.op = op, .async_op = point.async_op}));
        EXPECT_TRUE(matches(output.view, op, expected))
            << op_name(op) << " " << point.describe() << " of "
            << whole.sizes();
        EXPECT_TRUE(output.surroundings_intact()) << point.describe();
        EXPECT_TRUE(same_bits(input.view, whole)) << point.describe();
      }
    }
  }
}

CONTRACT_TEST(Reductions, AllReduceCoalescedTakesDtypesAndLayoutsMixed, 1, 2, 3,
              5, 8) {
  auto group = world.init();
  for (auto op : world.reduce_ops()) {
    for (bool async_op : {false, true}) {
      std::vector<Placed> placed;
      std::vector<at::Tensor> list;
      std::vector<std::vector<at::Tensor>> inputs;
      const std::vector<Shape> shapes{{3, 5}, {}, {0}, {7}};
      int number = 0;
      for (auto dtype : reduced_dtypes(op)) {
        for (const auto& shape : shapes) {
          inputs.push_back(of_all_ranks(world.size, [&](int rank) {
            return exact_numbers(op, dtype, shape, rank + 100 * number);
          }));
          placed.emplace_back(inputs.back()[world.rank],
                              layouts()[number % layouts().size()],
                              world.device);
          list.push_back(placed.back().view);
          ++number;
        }
      }
      finish(all_reduce_coalesced(list, {.op = op, .async_op = async_op}));
      for (size_t i = 0; i < list.size(); ++i) {
        EXPECT_TRUE(matches(list[i], op, inputs[i]))
            << op_name(op) << " " << list[i].scalar_type() << list[i].sizes();
        EXPECT_TRUE(placed[i].surroundings_intact()) << i;
      }
    }
  }
}

CONTRACT_TEST(Reductions, RowsOfOneTensorMayBeReducedTogether, 2, 3) {
  auto group = world.init();
  auto inputs = exact_inputs(ReduceOp::SUM, at::kFloat, {4, 5}, world.size);
  auto all = inputs[world.rank].to(world.device, false, /*copy=*/true);
  all_reduce_coalesced({all[0], all[2], all.select(1, 3).slice(0, 3)});
  auto expected = inputs[world.rank].clone();
  auto sum = reduce_in_rank_order(ReduceOp::SUM, inputs);
  expected[0] = sum[0];
  expected[2] = sum[2];
  expected[3][3] = sum[3][3];
  EXPECT_TRUE(all.cpu().equal(expected)) << all;
}

// Returns a row of 10 with `entries` entries, not coalesced: their places
// overlap between ranks, and one place occurs twice.
at::Tensor sparse_input(at::ScalarType dtype, int rank, int64_t entries,
                        bool hybrid) {
  auto places = at::empty({1, entries}, at::kLong);
  for (int64_t i = 0; i < entries; ++i) {
    places[0][i] = i + 1 == entries ? 0 : (i * (rank + 1)) % 10;
  }
  Shape values{entries};
  Shape shape{10};
  if (hybrid) {
    values.push_back(3);
    shape.push_back(3);
  }
  auto numbers = exact_numbers(ReduceOp::SUM, at::kInt, values, rank)
                     .remainder(5)
                     .to(dtype);
  return at::sparse_coo_tensor(places, numbers, shape);
}

CONTRACT_TEST(Reductions, SparseTensorsAreSummedWhateverTheirEntries, 1, 2, 3,
              5, 8) {
  auto group = world.init();
  // Rank r has r + 2 entries and rank 1 has none; the second time no rank has
  // any.
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                     at::kLong, at::kInt}) {
    for (auto op : {ReduceOpType::SUM, ReduceOpType::AVG}) {
      if (op == ReduceOpType::AVG && c10::isIntegralType(dtype, true)) continue;
      for (bool hybrid : {false, true}) {
        for (bool empty : {false, true}) {
          auto make = [&](int rank) {
            return sparse_input(dtype, rank, rank == 1 || empty ? 0 : rank + 2,
                                hybrid);
          };
          auto tensor = make(world.rank).to(world.device);
          finish(all_reduce(tensor, {.op = op, .async_op = hybrid}));
          EXPECT_TRUE(tensor.is_sparse());
          EXPECT_TRUE(tensor.is_coalesced());
          std::vector<at::Tensor> dense;
          for (int rank = 0; rank < world.size; ++rank) {
            dense.push_back(make(rank).coalesce().to_dense());
          }
          EXPECT_TRUE(matches(tensor.to_dense(), op, dense))
              << dtype << " " << op_name(op)
              << (hybrid ? " with a dense dimension" : "")
              << (empty ? " without entries" : "") << tensor;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
