// Properties of "shm" beyond the contract of the collectives: direct calls of
// the c10d backend, and registered memory.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "tests/comm/contract/tensors.h"
#include "tests/comm/shm/init_shm.h"
#include "tests/harness/in_child.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::init_shm;
using testing::same_bits;
using ::testing::ThrowsMessage;

c10d::Backend& backend_of(const ProcessGroupPtr& group) {
  return inside(group).backend(c10::kCPU);
}

// Returns 0, 1, 2, ... + `offset`, with strides that are not those of the
// shape.
at::Tensor strided(int64_t offset, at::ScalarType dtype = at::kFloat) {
  return (at::arange(12, at::kLong) + offset).to(dtype).view({3, 4}).t();
}
at::Tensor strided_zeros(at::ScalarType dtype = at::kFloat) {
  return at::zeros({3, 4}, dtype).t();
}

// Returns reals that are the same on every rank that asks for rank `rank`'s.
at::Tensor reals_of(int rank, int64_t count, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(77 + rank);
  return at::randn({count}, generator, at::kFloat).to(dtype);
}

// Returns ((rank 0 + rank 1) + ...) in float32, rounded once at the end.
at::Tensor sum_in_rank_order(int size, int64_t count, at::ScalarType dtype) {
  auto sum = reals_of(0, count, dtype).to(at::kFloat);
  for (int rank = 1; rank < size; ++rank) {
    sum += reals_of(rank, count, dtype).to(at::kFloat);
  }
  return sum.to(dtype);
}

WORLD_TEST(ShmBackend, TakesTensorsOfAnyStrides, 1, 2, 3) {
  auto group = init_shm();
  auto& backend = backend_of(group.get());
  const int size = world.size;
  const int last = size - 1;

  std::vector<at::Tensor> tensors{strided(world.rank)};
  auto work = backend.allreduce(tensors, {});
  work->wait();
  auto sum = strided(0) * size + size * last / 2.0;
  EXPECT_TRUE(tensors[0].equal(sum));

  tensors = {strided(world.rank)};
  c10d::ReduceOptions to_last;
  to_last.rootRank = last;
  backend.reduce(tensors, to_last)->wait();
  EXPECT_TRUE(tensors[0].equal(world.rank == last ? sum : strided(world.rank)));

  tensors = {strided(world.rank)};
  c10d::BroadcastOptions from_last;
  from_last.rootRank = last;
  backend.broadcast(tensors, from_last)->wait();
  EXPECT_TRUE(tensors[0].equal(strided(last)));

  std::vector<std::vector<at::Tensor>> lists(1);
  for (int i = 0; i < size; ++i) lists[0].push_back(strided_zeros());
  tensors = {strided(world.rank)};
  backend.allgather(lists, tensors, {})->wait();
  for (int i = 0; i < size; ++i) EXPECT_TRUE(lists[0][i].equal(strided(i)));

  // Each rank gives its own number and the receiver's.
  std::vector<at::Tensor> inputs;
  for (int i = 0; i < size; ++i) inputs.push_back(strided(10 * world.rank + i));
  lists = {inputs};
  tensors = {strided_zeros()};
  backend.reduce_scatter(tensors, lists, {})->wait();
  EXPECT_TRUE(
      tensors[0].equal((strided(world.rank) * size) + 10 * size * last / 2.0));

  c10d::ScatterOptions scatter_last;
  scatter_last.rootRank = last;
  lists.clear();
  if (world.rank == last) lists.push_back(inputs);
  tensors = {strided_zeros()};
  backend.scatter(tensors, lists, scatter_last)->wait();
  EXPECT_TRUE(tensors[0].equal(strided(10 * last + world.rank)));

  c10d::GatherOptions gather_last;
  gather_last.rootRank = last;
  lists.clear();
  if (world.rank == last) lists.push_back(inputs);
  tensors = {strided(world.rank)};
  backend.gather(lists, tensors, gather_last)->wait();
  for (int i = 0; i < size && world.rank == last; ++i) {
    EXPECT_TRUE(lists[0][i].equal(strided(i)));
  }
}

WORLD_TEST(ShmBackend, TakesWholeTensorsOfAnyStridesAndInPlace, 1, 2, 3) {
  auto group = init_shm();
  auto& backend = backend_of(group.get());
  const int size = world.size;

  auto all = at::zeros({4, 3 * size}).t();
  auto own = strided(world.rank);
  backend._allgather_base(all, own, {})->wait();
  std::vector<at::Tensor> expected;
  for (int i = 0; i < size; ++i) expected.push_back(strided(i));
  EXPECT_TRUE(all.reshape({-1}).equal(at::cat(expected).reshape({-1})));

  auto part = strided_zeros();
  backend._reduce_scatter_base(part, all, {})->wait();
  EXPECT_TRUE(part.equal(expected[world.rank] * size));

  // In place: the input is this rank's part of the output.
  all = at::zeros({size, 1000});
  own = all[world.rank].fill_(world.rank);
  backend._allgather_base(all, own, {})->wait();
  for (int i = 0; i < size; ++i) EXPECT_TRUE(all[i].eq(i).all().item<bool>());
  backend._reduce_scatter_base(own, all, {})->wait();
  EXPECT_TRUE(own.eq(world.rank * size).all().item<bool>());

  // The output overlaps several parts of the input.
  if (size > 1) {
    all = at::arange(1000 * size, at::kFloat);
    own = all.narrow(0, 500, 1000);
    const auto want = at::arange(1000, at::kFloat) + 1000 * world.rank;
    backend._reduce_scatter_base(own, all, {})->wait();
    EXPECT_TRUE(own.equal(want * size));
  }

  std::vector<int64_t> even;
  auto rows = at::full({size, 5}, world.rank).t().contiguous().t();
  auto received = at::zeros({5, size}, at::kLong).t();
  backend.alltoall_base(received, rows, even, even, {})->wait();
  for (int i = 0; i < size; ++i) {
    EXPECT_TRUE(received[i].eq(i).all().item<bool>());
  }
}

WORLD_TEST(ShmBackend, CoalescedOnesTakeMixedShapesAndDtypes, 1, 2, 3) {
  auto group = init_shm();
  auto& backend = backend_of(group.get());
  const int size = world.size;
  const int total = size * (size - 1) / 2;

  std::vector<at::Tensor> tensors{
      strided(world.rank), at::full({70'000}, world.rank, at::kInt),
      at::full({}, world.rank, at::kDouble), at::empty({0})};
  backend.allreduce_coalesced(tensors, {})->wait();
  EXPECT_TRUE(tensors[0].equal(strided(0) * size + total));
  EXPECT_TRUE(tensors[1].eq(total).all().item<bool>());
  EXPECT_EQ(tensors[2].item<double>(), total);

  std::vector<at::Tensor> inputs{at::full({3}, world.rank),
                                 at::full({2}, world.rank, at::kHalf)};
  std::vector<std::vector<at::Tensor>> lists;
  for (int i = 0; i < size; ++i) {
    lists.push_back({at::zeros({3}, at::kLong), at::zeros({2}, at::kHalf)});
  }
  backend.allgather_coalesced(lists, inputs, {})->wait();
  for (int i = 0; i < size; ++i) {
    for (size_t k = 0; k < 2; ++k) {
      EXPECT_TRUE(lists[i][k].eq(i).all().item<bool>());
    }
  }
}

WORLD_TEST(ShmBackend, MovesDtypesThatItCannotReduce, 1, 2) {
  auto group = init_shm();
  auto& backend = backend_of(group.get());
  for (auto dtype :
       {at::kShort, at::kComplexDouble, at::kUInt64, at::kFloat8_e5m2}) {
    auto content = [&](int rank) {
      return testing::some_content(dtype, {5}, rank);
    };
    std::vector<at::Tensor> tensors{content(world.rank)};
    backend.broadcast(tensors, {})->wait();
    EXPECT_TRUE(same_bits(tensors[0], content(0))) << dtype;
    tensors = {content(world.rank)};
    EXPECT_THAT(
        [&] { backend.allreduce(tensors, {}); },
        ThrowsMessage<std::invalid_argument>(HasSubstr("cannot be reduced")));
    EXPECT_TRUE(same_bits(tensors[0], content(world.rank)));
  }
  std::vector<at::Tensor> integers{at::ones({2}, at::kLong)};
  c10d::AllreduceOptions average;
  average.reduceOp = ReduceOp::AVG;
  EXPECT_THAT([&] { backend.allreduce(integers, average); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("AVG of Long")));
  std::vector<at::Tensor> two{at::ones({2}), at::ones({2})};
  EXPECT_THROW(backend.allreduce(two, {}), std::invalid_argument);
  std::vector<at::Tensor> elsewhere{at::ones({2}, at::device(at::kMeta))};
  EXPECT_THROW(backend.broadcast(elsewhere, {}), std::invalid_argument);
  c10d::BroadcastOptions nobody;
  nobody.rootRank = world.size;
  EXPECT_THROW(backend.broadcast(integers, nobody), std::invalid_argument);
  barrier();  // none of these counted as a call
}

WORLD_TEST(ShmBackend, LargeSumsEqualTheScalarReferenceBitByBit, 2, 3) {
  auto group = init_shm();
  constexpr int64_t kElements = 4 << 20;  // 16 MiB of float32
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    for (int64_t count : {kElements, kElements - 13, int64_t{30'001}}) {
      const auto want = sum_in_rank_order(world.size, count, dtype);
      auto tensor = reals_of(world.rank, count, dtype);
      all_reduce(tensor);
      EXPECT_TRUE(same_bits(tensor, want)) << dtype << " " << count;
      // The address is not aligned for vectors.
      auto behind = at::empty({count + 1}, dtype).narrow(0, 1, count);
      behind.copy_(reals_of(world.rank, count, dtype));
      all_reduce(behind, {.async_op = true})->wait();
      EXPECT_TRUE(same_bits(behind, want)) << dtype << " " << count;
    }
  }
}

WORLD_TEST(ShmBackend, RegisteredMemoryGivesTheSameBits, 1, 2, 3) {
  auto group = init_shm();
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    for (int64_t count : {1, 1000, 300'007, 4 << 20}) {
      const auto want = sum_in_rank_order(world.size, count, dtype);
      // First all ranks have the tensor in shared memory, then all but rank 0,
      // then all at odd offsets.
      for (int64_t offset : {0, 0, 3}) {
        auto shared = empty_shared({count + offset}, dtype);
        EXPECT_TRUE(is_shared(shared));
        const bool here = offset != 0 || world.rank != 0;
        auto tensor =
            here ? shared.narrow(0, offset, count) : at::empty({count}, dtype);
        EXPECT_EQ(is_shared(tensor), here);
        for (int round = 0; round < 3; ++round) {
          tensor.copy_(reals_of(world.rank, count, dtype));
          all_reduce(tensor, {.async_op = round == 1});
          if (round == 1) barrier();  // runs after the reduction
          EXPECT_TRUE(same_bits(tensor, want))
              << dtype << " " << count << " at " << offset;
        }
      }
    }
  }
}

WORLD_TEST(ShmBackend, RegisteredMemoryTakesPartInEveryCollective, 2, 3) {
  auto group = init_shm();
  const int size = world.size;
  constexpr int64_t kEach = 100'000;
  auto whole = empty_shared({size, kEach});
  auto own = empty_shared({kEach});
  own.fill_(world.rank);
  all_gather_into_tensor(whole, own);
  for (int i = 0; i < size; ++i) {
    EXPECT_TRUE(whole[i].eq(i).all().item<bool>());
  }
  reduce_scatter_tensor(own, whole);
  EXPECT_TRUE(own.eq(world.rank * size).all().item<bool>());
  own.fill_(world.rank);
  broadcast(own, size - 1);
  EXPECT_TRUE(own.eq(size - 1).all().item<bool>());
  own.fill_(1);
  reduce(own, 0);
  EXPECT_TRUE(own.eq(world.rank == 0 ? size : 1).all().item<bool>());
  whole.fill_(world.rank);
  auto received = empty_shared({size, kEach});
  all_to_all_single(received, whole);
  for (int i = 0; i < size; ++i) {
    EXPECT_TRUE(received[i].eq(i).all().item<bool>());
  }
  auto in = empty_shared({kEach});
  auto works = batch_isend_irecv({{.op = P2POp::Kind::isend,
                                   .tensor = own.fill_(world.rank),
                                   .peer = (world.rank + 1) % size},
                                  {.op = P2POp::Kind::irecv,
                                   .tensor = in,
                                   .peer = (world.rank + size - 1) % size}});
  for (auto& work : works) work->wait();
  EXPECT_TRUE(in.eq((world.rank + size - 1) % size).all().item<bool>());
}

WORLD_TEST(ShmBackend, SharedTensorsComeAndGoAsTheyLike, 2, 3) {
  auto group = init_shm();
  // Each rank has another number of tensors and frees them in another order.
  std::vector<at::Tensor> kept;
  for (int round = 0; round < 30; ++round) {
    if (round % (world.rank + 2) == 0) {
      kept.push_back(empty_shared({50'000 + round}));
    }
    auto tensor = empty_shared({40'000});
    tensor.fill_(world.rank + round);
    all_reduce(tensor);
    EXPECT_TRUE(
        tensor.eq(world.size * round + world.size * (world.size - 1) / 2.0)
            .all()
            .item<bool>());
    if (kept.size() == 3) kept.erase(kept.begin());
  }
}

WORLD_TEST(ShmBackend, SharedTensorsOutliveTheirGroup, 1, 2) {
  at::Tensor tensor;
  {
    auto group = init_shm();
    tensor = empty_shared({1000, 100}, at::requires_grad());
    EXPECT_TRUE(tensor.requires_grad());
    EXPECT_TRUE(tensor.is_leaf());
    EXPECT_FALSE(tensor.is_view());
    EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{1000, 100}));
    EXPECT_EQ(empty_shared({3, 0}).numel(), 0);
    EXPECT_EQ(empty_shared({}).dim(), 0);
    EXPECT_THROW(empty_shared({2}, at::device(at::kCUDA)),
                 std::invalid_argument);
    barrier();
  }
  tensor.detach().fill_(7);
  EXPECT_EQ(tensor.detach()[999][99].item<float>(), 7);
  // Collectives of another group accept it like any other tensor.
  auto group = init_shm();
  EXPECT_FALSE(is_shared(tensor));
  auto values = tensor.detach();
  all_reduce(values);
  EXPECT_TRUE(values.eq(7 * world.size).all().item<bool>());
}

WORLD_TEST(ShmBackend, WithoutSharedMemoryTheTensorIsAnOrdinaryOne, 1, 2) {
  auto group = init_process_group("cpu:gloo", {.timeout = seconds(30)});
  auto tensor = empty_shared({3, 5}, at::kLong);
  EXPECT_FALSE(is_shared(tensor));
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{3, 5}));
  EXPECT_EQ(tensor.scalar_type(), at::kLong);
}

WORLD_TEST(ShmBackend, DirectReductionsStandInTheOrderOfAllOthers, 1, 2, 3) {
  auto group = init_shm();
  auto& backend = backend_of(group.get());
  auto* direct = dynamic_cast<DirectReduce*>(&backend);
  ASSERT_NE(direct, nullptr);
  const double total = world.size * (world.size + 1) / 2.0;
  for (int round = 0; round < 20; ++round) {
    auto first = at::full({1000}, world.rank + 1.0);
    auto second = at::full({3}, world.rank + 1.0);
    std::vector<at::Tensor> tensors{first};
    auto work = backend.allreduce(tensors, {});
    direct->all_reduce_direct(second.data_ptr(), 3, at::kFloat, ReduceOp::SUM,
                              seconds(30));
    EXPECT_TRUE(second.eq(total).all().item<bool>());
    work->wait();
    EXPECT_TRUE(first.eq(total).all().item<bool>());
  }
  EXPECT_THROW(direct->all_reduce_direct(nullptr, 0, at::kComplexFloat,
                                         ReduceOp::SUM, seconds(1)),
               std::invalid_argument);
}

WORLD_TEST(ShmBackend, ThreadsMayUseSeveralGroupsAtOnce, 2, 3) {
  auto group = init_shm();
  std::vector<ProcessGroupPtr> groups{group.get(), new_group(), new_group()};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < groups.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        auto tensor =
            at::full({int64_t{1} << (round % 17)}, world.rank + round + i);
        all_reduce(tensor, {.group = groups[i]});
        EXPECT_TRUE(tensor
                        .eq(world.size * (round + static_cast<int64_t>(i)) +
                            world.size * (world.size - 1) / 2)
                        .all()
                        .item<bool>());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

WORLD_TEST(ShmBackend, AMessageMovesWhileNobodyWaitsForIt, 2) {
  auto group = init_shm();
  auto& store = *inside(group).store();
  constexpr int64_t kMany = 4 << 20;  // far more than fits into a ring
  if (world.rank == 0) {
    auto work = isend(at::full({kMany}, 3.0f), 1);
    store.wait({"received"}, seconds(30));
    EXPECT_TRUE(work->wait());
  } else {
    auto tensor = at::zeros({kMany});
    recv(tensor, 0);
    EXPECT_TRUE(tensor.eq(3).all().item<bool>());
    store.set("received", std::vector<uint8_t>{1});
  }
}

WORLD_TEST(ShmBackend, AMessageWhoseWorkWasDroppedArrives, 2) {
  auto group = init_shm();
  constexpr int64_t kMany = 2 << 20;
  if (world.rank == 0) {
    for (int i = 0; i < 3; ++i) isend(at::full({kMany}, 1.0f * i), 1);
    // If the messages had freed their memory, these tensors would overwrite it.
    for (int i = 0; i < 3; ++i) at::full({kMany}, -1.0f);
  } else {
    for (int i = 0; i < 3; ++i) {
      auto tensor = at::zeros({kMany});
      recv(tensor, 0);
      EXPECT_TRUE(tensor.eq(i).all().item<bool>());
    }
  }
  barrier();
}

// A bug: the child moved the message on, in the memory that it shares with its
// parent.
WORLD_TEST(ShmBackend, AForkedChildLeavesMessagesAlone, 2) {
  auto group = init_shm();
  constexpr int64_t kMany = 8 << 20;
  for (int repeat = 0; repeat < 4; ++repeat) {
    if (world.rank == 0) {
      auto sent = at::arange(kMany, at::kInt);
      auto work = isend(sent, 1);
      EXPECT_EQ(::lockstep::internal::testing::in_child([&] {
                  work->abort();
                  try {
                    work->isCompleted();
                    return 1;
                  } catch (const std::runtime_error&) {
                  }
                  work.reset();
                  return 0;
                }),
                0);
      EXPECT_TRUE(work->wait());
    } else {
      auto tensor = at::zeros({kMany}, at::kInt);
      recv(tensor, 0);
      EXPECT_TRUE(tensor.equal(at::arange(kMany, at::kInt)));
    }
    barrier();
  }
}

WORLD_TEST(ShmBackend, AWorkThatOutlivesItsGroupFails, 2) {
  WorkPtr work;
  auto tensor = at::zeros({3});
  {
    auto group = init_shm();
    std::vector<at::Tensor> tensors{tensor};
    work = backend_of(group.get()).recv(tensors, 1 - world.rank, 0);
    EXPECT_FALSE(work->isCompleted());
    barrier();
  }
  EXPECT_THROW(work->wait(milliseconds(100)), c10::DistBackendError);
}

WORLD_TEST(ShmBackend, AMessageThatWasGivenUpComesToTheNextReceive, 2) {
  auto group = init_shm();
  auto& store = *inside(group).store();
  if (world.rank == 0) {
    auto given_up = at::zeros({3, 2}).t();
    std::vector<at::Tensor> tensors{given_up};
    auto work = backend_of(group.get()).recv(tensors, 1, 5);
    EXPECT_THROW(work->wait(milliseconds(20)), c10::DistBackendError);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_NE(work->exception(), nullptr);
    store.set("waited", std::vector<uint8_t>{1});
    EXPECT_THROW(work->wait(), c10::DistBackendError);
    auto tensor = at::zeros({3, 2}).t();
    tensors = {tensor};
    work = backend_of(group.get()).recv(tensors, 1, 5);
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->sourceRank(), 1);
    EXPECT_TRUE(tensor.equal(at::arange(6, at::kFloat).view({2, 3})));
    EXPECT_TRUE(given_up.equal(at::zeros({2, 3})));
  } else {
    store.wait({"waited"}, seconds(30));
    std::vector<at::Tensor> tensors{at::arange(6, at::kFloat).view({2, 3})};
    backend_of(group.get()).send(tensors, 0, 5)->wait();
  }
}

}  // namespace
}  // namespace lockstep::internal
