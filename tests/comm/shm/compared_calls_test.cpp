// Tests what the ranks of "shm" compare before they exchange numbers: user
// calls that become several calls of the protocol, dtypes of equal size, and
// parts that a rank keeps for itself. Every rank's error must name both calls
// by the number in the flight recorder, and the ranks must stay in step.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "tests/comm/failure_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::World;

// The timeout is long, so a call that hangs instead of failing runs into the
// deadline of the case.
const InitProcessGroupOptions kPatient{.timeout = seconds(600)};

uint64_t last_number() {
  return inside(default_group()).flight()->last_number();
}

// Rank 1 calls `odd`, the others `call`. Expects both descriptions in the
// error, with the number of this call in place of "#N".
void expect_told(const World& world, const std::function<void()>& call,
                 const std::function<void()>& odd, std::string words,
                 std::string odd_words) {
  const auto number = "#" + std::to_string(last_number() + 1);
  for (auto* text : {&words, &odd_words}) {
    for (auto at = text->find("#N"); at != text->npos; at = text->find("#N")) {
      text->replace(at, 2, number);
    }
  }
  const auto text = failure_of(world.rank == 1 ? odd : call);
  EXPECT_THAT(text,
              AllOf(HasSubstr("disagree"),
                    HasSubstr(world.size == 2 ? "rank 0: " + words
                                              : "ranks 0 and 2: " + words),
                    HasSubstr("rank 1: " + odd_words)));
  // The ranks are in step: nothing is left of the failed call.
  for (int i = 0; i < 3; ++i) {
    auto tensor = at::full({3}, i + 1);
    all_reduce(tensor);
    EXPECT_TRUE(tensor.eq(world.size * (i + 1)).all().item<bool>());
  }
}

std::vector<at::Tensor> ones(size_t count, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < count; ++i) all.push_back(at::ones({4}, dtype));
  return all;
}

WORLD_TEST(ShmComparedCalls, ListsOfDifferentLengthAreNoSilentShift, 2, 3) {
  auto group = init_process_group("cpu:shm", kPatient);
  auto reduce = [](size_t count, bool async_op = false) {
    return [=] {
      auto work = all_reduce_coalesced(ones(count), {.async_op = async_op});
      if (work) work->wait();
    };
  };
  expect_told(world, reduce(3), reduce(2),
              "all_reduce_coalesced #N (SUM, Float, 4 elements, 3 parts",
              "all_reduce_coalesced #N (SUM, Float, 4 elements, 2 parts");
  expect_told(world, reduce(2, true), reduce(5),
              "all_reduce_coalesced #N (SUM, Float, 4 elements, 2 parts",
              "all_reduce_coalesced #N (SUM, Float, 4 elements, 5 parts");
  auto gather = [&](size_t count, bool async_op = false) {
    return [=] {
      std::vector<std::vector<at::Tensor>> outputs;
      for (int r = 0; r < world.size; ++r) outputs.push_back(ones(count));
      auto work =
          all_gather_coalesced(outputs, ones(count), {.async_op = async_op});
      if (work) work->wait();
    };
  };
  expect_told(world, gather(2), gather(3),
              "all_gather_coalesced #N (Float, 4 elements, 2 parts",
              "all_gather_coalesced #N (Float, 4 elements, 3 parts");
  expect_told(world, gather(4, true), gather(1, true),
              "all_gather_coalesced #N (Float, 4 elements, 4 parts",
              "all_gather_coalesced #N (Float, 4 elements");
}

WORLD_TEST(ShmComparedCalls, ListsOfOtherDtypesAreNoSilentShift, 2, 3) {
  auto group = init_process_group("cpu:shm", kPatient);
  auto reduce = [](std::vector<at::ScalarType> dtypes, bool async_op = false) {
    return [=] {
      std::vector<at::Tensor> list;
      for (const auto dtype : dtypes) list.push_back(at::ones({4}, dtype));
      auto work = all_reduce_coalesced(list, {.async_op = async_op});
      if (work) work->wait();
    };
  };
  // The numbers of tensors are equal, but the dtypes have another order.
  expect_told(world, reduce({at::kFloat, at::kDouble, at::kFloat}),
              reduce({at::kFloat, at::kFloat, at::kDouble}),
              "all_reduce_coalesced #N (SUM, Double",
              "all_reduce_coalesced #N (SUM, Float");
  expect_told(world, reduce({at::kFloat, at::kDouble}, true),
              reduce({at::kFloat, at::kInt}, true),
              "all_reduce_coalesced #N (SUM, Double",
              "all_reduce_coalesced #N (SUM, Int");
}

// Regression, for sparse tensors: a rank that asked for the mean got a part of
// the sum.
WORLD_TEST(ShmComparedCalls, SumAndMeanOfSparseTensorsAreToldApart, 2, 3) {
  auto group = init_process_group("cpu:shm", kPatient);
  auto tensor = at::eye(2).to_sparse();
  const auto op = world.rank == 0 ? ReduceOp::AVG : ReduceOp::SUM;
  EXPECT_THAT(failure_of([&] { all_reduce(tensor, {.op = op}); }),
              AllOf(HasSubstr("the ranks disagree"),
                    HasSubstr("rank 0 gave AVG of sparse [2, 2]"),
                    HasSubstr("rank 1 SUM of sparse [2, 2]")));
  all_reduce(tensor);
  EXPECT_TRUE(tensor.to_dense().equal(at::eye(2) * world.size));
}

// A bug: the error named the numbers in the group, which are those of other
// ranks in the default group.
WORLD_TEST(ShmComparedCalls, SparseTensorsOfASubgroupAreThoseOfItsRanks, 3) {
  auto group = init_process_group("cpu:shm", kPatient);
  const auto part = new_group({1, 2});
  if (world.rank != 0) {
    auto tensor = at::eye(1 + world.rank).to_sparse();
    EXPECT_THAT(failure_of([&] { all_reduce(tensor, {.group = part}); }),
                AllOf(HasSubstr("rank 1 gave SUM of sparse [2, 2]"),
                      HasSubstr("rank 2 SUM of sparse [3, 3]")));
  }
  barrier();
}

WORLD_TEST(ShmComparedCalls, AnUnevenGatherMeetsAnEvenOne, 2, 3) {
  auto group = init_process_group("cpu:shm", kPatient);
  auto gather = [&](std::vector<int64_t> counts, bool async_op = false) {
    return [=] {
      std::vector<at::Tensor> outputs;
      for (int r = 0; r < world.size; ++r) {
        outputs.push_back(at::zeros({counts[r % 2]}));
      }
      auto work = all_gather(outputs, at::ones({counts[world.rank % 2]}),
                             {.async_op = async_op});
      if (work) work->wait();
    };
  };
  for (const bool async_op : {false, true}) {
    expect_told(world, gather({4, 4}, async_op), gather({4, 5}, async_op),
                "all_gather #N (Float, 4 elements", "all_gather #N (Float");
    // One pair of ranks has another size.
    const auto number = last_number() + 1;
    EXPECT_THAT(
        failure_of(world.rank == 1 ? gather({4, 6}, async_op)
                                   : gather({4, 5}, async_op)),
        AllOf(HasSubstr("all_gather #" + std::to_string(number)),
              HasSubstr("disagree"), HasSubstr("rank 1 sends 24 bytes")));
    auto tensor = at::ones({3});
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<int>(), world.size);
  }
}

WORLD_TEST(ShmComparedCalls, DtypesOfEqualSizeAreToldApart, 2) {
  auto group = init_process_group("cpu:shm", kPatient);
  auto tensor = [](int64_t count, at::ScalarType dtype) {
    return at::ones({count}, dtype);
  };
  struct Pair {
    at::ScalarType one, two;
    int64_t count, count_of_two;
    std::string words, words_of_two;
  };
  for (const auto& [one, two, count, count_of_two, words, words_of_two] :
       std::vector<Pair>{{at::kShort, at::kByte, 3, 6, "(Short, 3 elements",
                          "(Byte, 6 elements"},
                         {at::kComplexFloat, at::kFloat, 3, 6,
                          "(ComplexFloat, 3 elements", "(Float, 6 elements"},
                         {at::kUInt16, at::kShort, 3, 3, "(UInt16, 3 elements",
                          "(Short, 3 elements"},
                         {at::kFloat8_e4m3fn, at::kByte, 3, 3,
                          "(Float8_e4m3fn, 3 elements", "(Byte, 3 elements"}}) {
    expect_told(
        world, [&] { broadcast(tensor(count, one), 0); },
        [&] { broadcast(tensor(count_of_two, two), 0); },
        "broadcast #N " + words, "broadcast #N " + words_of_two);
    expect_told(
        world,
        [&] {
          all_gather_into_tensor(tensor(2 * count, one), tensor(count, one));
        },
        [&] {
          all_gather_into_tensor(tensor(2 * count_of_two, two),
                                 tensor(count_of_two, two));
        },
        "all_gather_into_tensor #N " + words,
        "all_gather_into_tensor #N " + words_of_two);
    expect_told(
        world,
        [&] {
          all_gather({tensor(count, one), tensor(count, one)},
                     tensor(count, one));
        },
        [&] {
          all_gather({tensor(count_of_two, two), tensor(count_of_two, two)},
                     tensor(count_of_two, two));
        },
        "all_gather #N " + words, "all_gather #N " + words_of_two);
    const auto head = words.substr(0, words.find(','));
    const auto head_of_two = words_of_two.substr(0, words_of_two.find(','));
    expect_told(
        world,
        [&] {
          scatter(tensor(count, one), {tensor(count, one), tensor(count, one)},
                  0);
        },
        [&] { scatter(tensor(count_of_two, two), {}, 0); },
        "scatter #N " + head, "scatter #N " + head_of_two);
    expect_told(
        world,
        [&] {
          gather(tensor(count, one), {tensor(count, one), tensor(count, one)},
                 0);
        },
        [&] { gather(tensor(count_of_two, two), {}, 0); }, "gather #N " + head,
        "gather #N " + head_of_two);
    expect_told(
        world,
        [&] {
          all_to_all({tensor(count, one), tensor(count, one)},
                     {tensor(count, one), tensor(count, one)});
        },
        [&] {
          all_to_all({tensor(count_of_two, two), tensor(count_of_two, two)},
                     {tensor(count_of_two, two), tensor(count_of_two, two)});
        },
        "all_to_all #N " + head, "all_to_all #N " + head_of_two);
    expect_told(
        world,
        [&] {
          all_to_all_single(tensor(2 * count, one), tensor(2 * count, one));
        },
        [&] {
          all_to_all_single(tensor(2 * count_of_two, two),
                            tensor(2 * count_of_two, two));
        },
        "all_to_all_single #N " + head, "all_to_all_single #N " + head_of_two);
  }
  // Each two are reduced as one type: Short is added up as Int, complex numbers
  // as pairs.
  expect_told(
      world, [&] { all_reduce(tensor(3, at::kShort)); },
      [&] { all_reduce(tensor(3, at::kInt)); },
      "all_reduce #N (SUM, Short, 3 elements",
      "all_reduce #N (SUM, Int, 3 elements");
  expect_told(
      world, [&] { all_reduce(tensor(3, at::kComplexDouble)); },
      [&] { all_reduce(tensor(6, at::kDouble)); },
      "all_reduce #N (SUM, ComplexDouble, 3 elements",
      "all_reduce #N (SUM, Double, 6 elements");
  expect_told(
      world, [&] { reduce(tensor(3, at::kUInt16), 0); },
      [&] { reduce(tensor(3, at::kShort), 0); },
      "reduce #N (SUM, UInt16, 3 elements",
      "reduce #N (SUM, Short, 3 elements");
  expect_told(
      world,
      [&] {
        reduce_scatter_tensor(tensor(2, at::kComplexFloat),
                              tensor(4, at::kComplexFloat));
      },
      [&] {
        reduce_scatter_tensor(tensor(4, at::kFloat), tensor(8, at::kFloat));
      },
      "reduce_scatter_tensor #N (SUM, ComplexFloat, 2 elements",
      "reduce_scatter_tensor #N (SUM, Float, 4 elements");
  expect_told(
      world, [&] { all_reduce(at::ones({4}, at::kHalf).to_sparse()); },
      [&] { all_reduce(at::ones({4}, at::kFloat).to_sparse()); },
      "all_reduce #N (Half", "all_reduce #N (Float");
}

WORLD_TEST(ShmComparedCalls, OwnPartsOfAllToAllThatDifferAreToldToAll, 2, 3) {
  auto group = init_process_group("cpu:shm", kPatient);
  for (int odd = 0; odd < 2; ++odd) {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    for (int r = 0; r < world.size; ++r) {
      inputs.push_back(at::ones({2}));
      outputs.push_back(at::zeros({2}));
    }
    if (world.rank == odd) outputs[odd] = at::zeros({3});
    const auto who = "rank " + std::to_string(odd);
    const auto number = "#" + std::to_string(last_number() + 1);
    const auto words = AllOf(
        HasSubstr("all_to_all " + number), HasSubstr("disagree"),
        HasSubstr(who + " sends 8 bytes to itself"), HasSubstr("expects 12"));
    EXPECT_THAT(failure_of([&] { all_to_all(outputs, inputs); }), words);
    std::vector<int64_t> ins(world.size, 2);
    auto outs = ins;
    if (world.rank == odd) outs[odd] = 3;
    const auto next = "#" + std::to_string(last_number() + 1);
    EXPECT_THAT(failure_of([&] {
                  all_to_all_single(
                      at::zeros({2 * world.size + (world.rank == odd)}),
                      at::ones({2 * world.size}),
                      {.output_split_sizes = outs, .input_split_sizes = ins});
                }),
                AllOf(HasSubstr("all_to_all_single " + next),
                      HasSubstr(who + " sends 8 bytes to itself"),
                      HasSubstr("expects 12")));
    auto tensor = at::ones({3});
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<int>(), world.size);
  }
}

}  // namespace
}  // namespace lockstep::internal
