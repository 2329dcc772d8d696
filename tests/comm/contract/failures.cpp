// Failures across ranks or groups: groups that have ended or never existed,
// mistakes in making groups, and ranks that disagree in a group that checks its
// calls.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "lockstep/base/number_list.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "tests/comm/contract/contract.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Matcher;
using ::testing::ThrowsMessage;

// Returns one call of every operation in `group`.
std::vector<std::pair<std::string, std::function<void()>>> every_operation(
    const ContractWorld& world, const ProcessGroupPtr& group) {
  auto tensor = at::ones({2}, world.device);
  auto both = at::ones({2 * world.size}, world.device);
  auto parts = both.split(2);
  const int other = (world.rank + 1) % world.size;
  return {
      {"all_reduce", [=] { all_reduce(tensor, {.group = group}); }},
      {"all_reduce_coalesced",
       [=] { all_reduce_coalesced({tensor}, {.group = group}); }},
      {"reduce", [=] { reduce(tensor, 0, {.group = group}); }},
      {"reduce_scatter",
       [=] { reduce_scatter(tensor, parts, {.group = group}); }},
      {"reduce_scatter_tensor",
       [=] { reduce_scatter_tensor(tensor, both, {.group = group}); }},
      {"broadcast", [=] { broadcast(tensor, 0, {.group = group}); }},
      {"all_gather", [=] { all_gather(parts, tensor, {.group = group}); }},
      {"all_gather_into_tensor",
       [=] { all_gather_into_tensor(both, tensor, {.group = group}); }},
      {"all_gather_coalesced",
       [=] {
         std::vector<std::vector<at::Tensor>> lists;
         for (const auto& part : parts) lists.push_back({part});
         all_gather_coalesced(lists, {tensor}, {.group = group});
       }},
      {"gather",
       [=, rank = world.rank] {
         gather(tensor, rank == 0 ? parts : std::vector<at::Tensor>{}, 0,
                {.group = group});
       }},
      {"scatter",
       [=, rank = world.rank] {
         scatter(tensor, rank == 0 ? parts : std::vector<at::Tensor>{}, 0,
                 {.group = group});
       }},
      {"all_to_all", [=] { all_to_all(parts, parts, {.group = group}); }},
      {"all_to_all_single",
       [=] { all_to_all_single(both, both, {.group = group}); }},
      {"barrier", [=] { barrier({.group = group}); }},
      {"monitored_barrier", [=] { monitored_barrier({.group = group}); }},
      {"send", [=] { send(tensor, other, {.group = group}); }},
      {"recv", [=] { recv(tensor, other, {.group = group}); }},
      {"isend", [=] { isend(tensor, other, {.group = group}); }},
      {"irecv", [=] { irecv(tensor, other, {.group = group}); }},
      {"batch_isend_irecv",
       [=] {
         batch_isend_irecv({{.op = P2POp::Kind::isend,
                             .tensor = tensor,
                             .peer = other,
                             .group = group}});
       }},
      {"broadcast_object", [=] { broadcast_object(1, 0, {.group = group}); }},
      {"all_gather_object", [=] { all_gather_object(1, {.group = group}); }},
      {"gather_object", [=] { gather_object(1, 0, {.group = group}); }},
      {"scatter_object", [=] { scatter_object({1, 2}, 0, {.group = group}); }},
  };
}

CONTRACT_TEST(Failures, WithoutInitEachOperationSaysWhatToCall, 2) {
  for (const auto& [name, call] : every_operation(world, nullptr)) {
    EXPECT_THAT(call, ThrowsMessage<std::runtime_error>(
                          HasSubstr("init_process_group()")))
        << name;
  }
}

CONTRACT_TEST(Failures, EachOperationNamesADestroyedGroup, 2) {
  auto group = world.init();
  auto other = new_group();
  destroy_process_group(other);
  for (const auto& [name, call] : every_operation(world, other)) {
    EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(
                          AllOf(HasSubstr("'" + other->name() + "'"),
                                HasSubstr("destroyed"))))
        << name;
  }
  EXPECT_THAT([&] { split_group({{0, 1}}, {.parent = other}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("destroyed")));
  EXPECT_THAT([&] { destroy_process_group(other); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("destroyed")));
}

CONTRACT_TEST(Failures, MistakesInMakingGroupsSayWhatIsAllowed, 3) {
  auto group = world.init();
  auto expect = [](const std::function<void()>& call,
                   std::vector<std::string> words) {
    for (const auto& word : words) {
      EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(HasSubstr(word)));
    }
  };
  expect([] { new_group({0, 0}); }, {"new_group", "are 0 0;", "from 0 to 2"});
  expect([] { new_group({0, 3}); }, {"new_group", "are 0 3;", "from 0 to 2"});
  expect([] { new_group({-1}); }, {"new_group", "are -1;"});
  expect([] { new_group({}, {.backend = "goo"}); }, {"goo"});
  expect([] { new_subgroups(2); },
         {"new_subgroups", "group_size is 2", "world size, 3"});
  expect([] { new_subgroups(0); }, {"group_size is 0"});
  expect([] { new_subgroups_by_enumeration({{0, 1}, {1, 2}}); },
         {"new_subgroups_by_enumeration", "1"});
  expect([] { new_subgroups_by_enumeration({{0}, {}}); },
         {"new_subgroups_by_enumeration"});
  expect([] { split_group({{0, 1}, {1}}); }, {"split_group"});
  expect([] { split_group({{0, 3}}); }, {"split_group", "3"});
  expect([] { split_group({}); }, {"split_group"});
  // Refused groups are not counted, so the next group has the same name on all
  // ranks.
  auto next = new_group();
  auto tensor = at::ones({1}, world.device);
  all_reduce(tensor, {.group = next});
  EXPECT_EQ(tensor.item<int>(), 3);
}

CONTRACT_TEST(Failures, ARootOutsideASubgroupIsNamedWithItsMembers, 3) {
  auto group = world.init();
  auto upper = new_group({1, 2});
  if (upper) {
    auto tensor = at::ones({2}, world.device);
    EXPECT_THAT(
        [&] { broadcast(tensor, 0, {.group = upper}); },
        ThrowsMessage<std::invalid_argument>(AllOf(
            HasSubstr("broadcast in group '1' on rank " +
                      std::to_string(world.rank)),
            HasSubstr("member " + std::to_string(world.rank - 1) + " of 2"),
            HasSubstr("rank 0"), HasSubstr("ranks are 1 2"))));
    EXPECT_THAT([&] { send(tensor, 0, {.group = upper}); },
                ThrowsMessage<std::invalid_argument>(
                    AllOf(HasSubstr("rank 0"), HasSubstr("ranks are 1 2"))));
  }
  barrier();
}

// Returns the error text of `call`, which must fail on every rank.
std::string disagreement(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::DistBackendError& error) {
    EXPECT_STREQ(error.what(), error.what_without_backtrace());
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "is not a c10::DistBackendError, but " << error.what();
    return {};
  }
  ADD_FAILURE() << "the ranks' disagreement was not seen";
  return {};
}

// Rank 1 calls `odd`, the others `call`; every rank's error must have both
// descriptions, each once, and the ranks that gave them.
void expect_disagreement(const ContractWorld& world,
                         const std::function<void()>& call,
                         const std::function<void()>& odd,
                         const std::string& description,
                         const std::string& odd_description) {
  auto text = disagreement(world.rank == 1 ? odd : call);
  EXPECT_THAT(text, HasSubstr("on rank " + std::to_string(world.rank)));
  EXPECT_THAT(text, HasSubstr("'default_pg'"));
  std::vector<int> others{0};
  for (int rank = 2; rank < world.size; ++rank) others.push_back(rank);
  EXPECT_THAT(
      text, AllOf(HasSubstr(name_numbers("rank", others) + ": " + description),
                  HasSubstr("; rank 1: " + odd_description)));
}

CONTRACT_TEST(Failures, CheckedCallsTellRanksThatDisagreeApart, 2, 3, 5) {
  auto group = world.init({.timeout = kGroupTimeout, .check_calls = true});
  ASSERT_TRUE(group->checks_calls());
  auto ones = [&](c10::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
    return at::ones(shape, at::TensorOptions(dtype).device(world.device));
  };
  // Shapes, also with equal numbers of elements.
  expect_disagreement(
      world, [&] { all_reduce(ones({2, 3})); },
      [&] { all_reduce(ones({3, 2})); }, "all_reduce #1 SUM, Float [2, 3]",
      "all_reduce #1 SUM, Float [3, 2]");
  // Dtypes, also with equal sizes.
  expect_disagreement(
      world, [&] { all_reduce(ones({2})); },
      [&] { all_reduce(ones({2}, at::kInt)); }, "all_reduce #2 SUM, Float [2]",
      "all_reduce #2 SUM, Int [2]");
  // Reduce operations.
  expect_disagreement(
      world, [&] { all_reduce(ones({2})); },
      [&] { all_reduce(ones({2}), {.op = ReduceOp::MAX}); },
      "all_reduce #3 SUM", "all_reduce #3 MAX");
  // Operations.
  expect_disagreement(
      world, [&] { all_reduce(ones({2})); }, [&] { broadcast(ones({2}), 0); },
      "all_reduce #4", "broadcast #4");
  expect_disagreement(
      world, [] { barrier(); }, [&] { broadcast(ones({2}), 0); }, "barrier #5",
      "broadcast #5 Float [2], src 0");
  // Roots.
  expect_disagreement(
      world, [&] { broadcast(ones({2}), 0); }, [&] { broadcast(ones({2}), 1); },
      "broadcast #6 Float [2], src 0", "broadcast #6 Float [2], src 1");
  expect_disagreement(
      world, [&] { reduce(ones({2}), 0); }, [&] { reduce(ones({2}), 1); },
      "reduce #7 SUM, Float [2], dst 0", "reduce #7 SUM, Float [2], dst 1");
  // Asynchronous operations throw at once or from wait().
  expect_disagreement(
      world, [&] { finish(all_reduce(ones({2}), {.async_op = true})); },
      [&] { finish(all_reduce(ones({3}), {.async_op = true})); },
      "all_reduce #8 SUM, Float [2]", "all_reduce #8 SUM, Float [3]");
  // Lists.
  expect_disagreement(
      world, [&] { all_reduce_coalesced({ones({2}), ones({3})}); },
      [&] { all_reduce_coalesced({ones({3}), ones({2})}); },
      "all_reduce_coalesced #9 SUM, Float [2], Float [3]",
      "all_reduce_coalesced #9 SUM, Float [3], Float [2]");
  // Order: each call meets the other one.
  auto gathered = at::zeros({2 * world.size}, world.device);
  expect_disagreement(
      world, [&] { all_gather_into_tensor(gathered, ones({2})); },
      [&] { all_reduce(ones({2})); }, "all_gather_into_tensor #10",
      "all_reduce #10");
  expect_disagreement(
      world, [&] { all_reduce(ones({2})); },
      [&] { all_gather_into_tensor(gathered, ones({2})); }, "all_reduce #11",
      "all_gather_into_tensor #11");
  // The ranks still make the same calls.
  auto tensor = ones({2});
  all_reduce(tensor);
  EXPECT_EQ(tensor[0].item<int>(), world.size);
}

CONTRACT_TEST(Failures, CheckedCallsTellListsAndEqualSizesApart, 2, 3) {
  auto group = world.init({.timeout = kGroupTimeout, .check_calls = true});
  auto ones = [&](int64_t count, at::ScalarType dtype = at::kFloat) {
    return at::ones({count}, at::TensorOptions(dtype).device(world.device));
  };
  // Lists of different length.
  expect_disagreement(
      world, [&] { all_reduce_coalesced({ones(2), ones(2)}); },
      [&] { all_reduce_coalesced({ones(2)}); },
      "all_reduce_coalesced #1 SUM, Float [2], Float [2]",
      "all_reduce_coalesced #1 SUM, Float [2]");
  auto gather_lists = [&](size_t length) {
    std::vector<at::Tensor> list(length, ones(2));
    std::vector<std::vector<at::Tensor>> lists(world.size);
    for (auto& one : lists) {
      for (size_t i = 0; i < length; ++i) one.push_back(ones(2));
    }
    all_gather_coalesced(lists, list);
  };
  expect_disagreement(
      world, [&] { gather_lists(3); }, [&] { gather_lists(2); },
      "all_gather_coalesced #2 Float [2], Float [2], Float [2]",
      "all_gather_coalesced #2 Float [2], Float [2]");
  // Outputs that differ, on one rank only.
  auto gather_to = [&](int64_t last) {
    std::vector<at::Tensor> outputs(world.size);
    for (auto& output : outputs) output = ones(2);
    if (world.rank + 1 != world.size) outputs.back() = ones(last);
    all_gather(outputs, ones(2));
  };
  if (world.size == 3) {
    expect_disagreement(
        world, [&] { gather_to(2); }, [&] { gather_to(3); },
        "all_gather #3 Float [2], Float [2], Float [2]",
        "all_gather #3 Float [2], Float [2], Float [3]");
  } else {
    barrier();
  }
  // Equal numbers of bytes.
  expect_disagreement(
      world, [&] { broadcast(ones(2, at::kShort), 0); },
      [&] { broadcast(ones(4, at::kByte), 0); }, "broadcast #4 Short [2]",
      "broadcast #4 Byte [4]");
  expect_disagreement(
      world, [&] { broadcast(ones(2, at::kComplexFloat), 0); },
      [&] { broadcast(ones(4), 0); }, "broadcast #5 ComplexFloat [2]",
      "broadcast #5 Float [4]");
  // Outputs that differ only in the part that a rank keeps for itself.
  const auto keeps = world.rank == 1 ? 3 : 2;
  std::vector<at::Tensor> outputs(world.size);
  for (auto& output : outputs) output = ones(2);
  outputs[world.rank] = ones(keeps);
  EXPECT_THAT(disagreement([&] {
                all_to_all(outputs,
                           std::vector<at::Tensor>(world.size, ones(2)));
              }),
              AllOf(HasSubstr("all_to_all #6"),
                    HasSubstr("rank 1 sends 2 elements to rank 1"),
                    HasSubstr("expects 3")));
  auto tensor = ones(2);
  all_reduce(tensor);
  EXPECT_EQ(tensor[0].item<int>(), world.size);
}

CONTRACT_TEST(Failures, CheckedCallsTellSplitsThatDisagree, 2, 3) {
  auto group = world.init({.timeout = kGroupTimeout, .check_calls = true});
  // Rank 0 sends two elements to rank 1, which expects three.
  std::vector<int64_t> ins(world.size, 1);
  std::vector<int64_t> outs(world.size, 1);
  if (world.rank == 0) ins[1] = 2;
  if (world.rank == 1) outs[0] = 3;
  auto sum = [](const std::vector<int64_t>& counts) {
    int64_t total = 0;
    for (auto count : counts) total += count;
    return total;
  };
  auto words = AllOf(HasSubstr("all_to_all_single #1"),
                     HasSubstr("rank 0 sends 2 elements to rank 1"),
                     HasSubstr("expects 3"));
  EXPECT_THAT(disagreement([&] {
                all_to_all_single(
                    at::zeros({sum(outs)}, world.device),
                    at::zeros({sum(ins)}, world.device),
                    {.output_split_sizes = outs, .input_split_sizes = ins});
              }),
              words);
  barrier();
}

CONTRACT_TEST(Failures, CheckedCallsNameARankThatDoesNotCome, 2, 3, 5) {
  auto group = world.init({.timeout = kGroupTimeout, .check_calls = true});
  auto tensor = at::ones({2}, world.device);
  all_reduce(tensor);
  if (world.rank != 1) {
    auto text = disagreement(
        [&] { all_reduce(tensor, {.timeout = milliseconds(300)}); });
    EXPECT_THAT(
        text,
        AllOf(HasSubstr("all_reduce #2"), HasSubstr("'default_pg'"),
              HasSubstr("on rank " + std::to_string(world.rank)),
              HasSubstr("allowed 300 ms"), HasSubstr("rank 1 did not come")));
    inside(group).store()->add("failed", 1);
  } else {
    // The peer is late, but has not left.
    while (inside(group).store()->add("failed", 0) < world.size - 1) {
    }
  }
}

CONTRACT_TEST(Failures, CheckedCallsCompareEveryKindAndThenRunIt, 2, 3) {
  auto group = world.init({.timeout = kGroupTimeout, .check_calls = true});
  auto part = new_group();
  EXPECT_TRUE(part->checks_calls());
  for (const auto& [name, call] : every_operation(world, part)) {
    if (name.find("send") != std::string::npos ||
        name.find("recv") != std::string::npos || name == "scatter_object") {
      continue;  // messages are not compared
    }
    EXPECT_NO_THROW(call()) << name;
  }
}

CONTRACT_TEST(Failures, CheckedCallsAreOnWhereTheEnvironmentSaysDetail, 2) {
  EXPECT_FALSE(world.init()->checks_calls());
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL", 1);
  {
    auto group = world.init();
    EXPECT_TRUE(group->checks_calls());
    auto tensor = at::ones({2 + world.rank}, world.device);
    EXPECT_THAT(disagreement([&] { all_reduce(tensor); }),
                AllOf(HasSubstr("rank 0: all_reduce #1 SUM, Float [2]"),
                      HasSubstr("rank 1: all_reduce #1 SUM, Float [3]")));
  }
  // The option overrides the environment.
  EXPECT_FALSE(world.init({.timeout = kGroupTimeout, .check_calls = false})
                   ->checks_calls());
  ::unsetenv("TORCH_DISTRIBUTED_DEBUG");
}

CONTRACT_TEST(Failures, ABarrierSeesWhoCalledSomethingElse, 2) {
  auto group = world.init({.timeout = kGroupTimeout, .check_calls = true});
  auto tensor = at::ones({2}, world.device);
  if (world.rank == 0) {
    EXPECT_THAT([] { monitored_barrier(); },
                ThrowsMessage<c10::Error>(
                    HasSubstr("rank 1 called all_reduce #1 SUM")));
  } else {
    EXPECT_THAT([&] { all_reduce(tensor); },
                ThrowsMessage<c10::Error>(AllOf(
                    HasSubstr("disagree"), HasSubstr("monitored_barrier"))));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
