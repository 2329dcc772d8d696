// Mistakes and their error messages. The telling parts of each message are
// compared. A mistake that one rank can see alone throws std::invalid_argument
// before anything is sent, so the ranks still make the same calls afterwards.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lockstep/comm/collectives.h"
#include "tests/comm/contract/contract.h"
#include "tests/comm/contract/tensors.h"

namespace lockstep::internal::testing {
namespace {

using Kind = P2POp::Kind;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Mistake {
  std::string name;
  std::function<void()> make;
  // Must stand in the message, besides operation, group and rank.
  std::vector<std::string> words;
};

// Each message must name `operation` and the group and rank that called it.
void expect_named(const ContractWorld& world, const std::string& operation,
                  const std::vector<Mistake>& mistakes) {
  const auto where = operation + " in group 'default_pg' on rank " +
                     std::to_string(world.rank) + " of " +
                     std::to_string(world.size);
  for (const auto& mistake : mistakes) {
    try {
      mistake.make();
      ADD_FAILURE() << operation << ", " << mistake.name << ": was accepted";
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      EXPECT_THAT(text, HasSubstr(where)) << mistake.name;
      for (const auto& word : mistake.words) {
        EXPECT_THAT(text, HasSubstr(word)) << operation << ", " << mistake.name;
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << operation << ", " << mistake.name
                    << ": is not a std::invalid_argument, but " << error.what();
    }
  }
}

void expect_in_step(const ContractWorld& world) {
  auto tensor = at::ones({1}, world.device);
  all_reduce(tensor);
  EXPECT_EQ(tensor.item<int>(), world.size);
}

at::Tensor ones(const ContractWorld& world, const Shape& shape,
                at::ScalarType dtype = at::kFloat) {
  return at::ones(shape, at::TensorOptions(dtype).device(world.device));
}

std::vector<at::Tensor> list(const ContractWorld& world, size_t count,
                             const Shape& shape = {2},
                             at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < count; ++i) {
    tensors.push_back(ones(world, shape, dtype));
  }
  return tensors;
}

CONTRACT_TEST(Misuse, OwnPartsOfAllToAllThatDifferAreToldAtOnce, 2, 3) {
  auto group = world.init();
  auto inputs = list(world, world.size);
  auto outputs = list(world, world.size);
  outputs[world.rank] = ones(world, {3});
  std::vector<int64_t> ins(world.size, 2);
  auto outs = ins;
  outs[world.rank] = 3;
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { all_to_all(outputs, inputs); },
           [&] {
             all_to_all_single(
                 ones(world, {2 * world.size + 1}),
                 ones(world, {2 * world.size}),
                 {.output_split_sizes = outs, .input_split_sizes = ins});
           }}) {
    try {
      call();
      ADD_FAILURE() << "was accepted";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("to itself"));
    }
  }
  expect_in_step(world);
}

// Returns tensors that every operation over one tensor refuses.
std::vector<Mistake> wrong_tensors(
    const ContractWorld& world,
    const std::function<void(const at::Tensor&)>& call) {
  return {
      {"undefined", [=] { call(at::Tensor()); }, {"undefined"}},
      {"on a device without a backend",
       [=] { call(at::ones({2}, at::kMeta)); },
       {"meta", "backends are \"", world.backend, "init_process_group"}},
  };
}

// Returns tensors that operations may only read.
std::vector<Mistake> unwritable_tensors(
    const ContractWorld& world,
    const std::function<void(const at::Tensor&)>& call) {
  return {
      {"expanded",
       [=] { call(ones(world, {1}).expand({4})); },
       {"overlaps itself", "[4]", "contiguous()"}},
  };
}

std::vector<Mistake> sparse_tensors(
    const ContractWorld& world,
    const std::function<void(const at::Tensor&)>& call) {
  return {{"sparse",
           [=] { call(at::eye(2, world.device).to_sparse()); },
           {"sparse", "to_dense()"}}};
}

std::vector<Mistake> wrong_ranks(const std::string& argument,
                                 const std::function<void(int)>& call) {
  return {
      {"beyond the world",
       [=] { call(2); },
       {argument, "rank 2", "ranks are 0 1"}},
      {"negative", [=] { call(-2); }, {argument, "rank -2", "ranks are 0 1"}},
  };
}

std::vector<Mistake> operator+(std::vector<Mistake> a,
                               const std::vector<Mistake>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

CONTRACT_TEST(Misuse, ReductionsNameWhatIsWrongWithTensorsAndRanks, 2) {
  auto group = world.init();
  auto all = [](const at::Tensor& tensor) { all_reduce(tensor); };
  expect_named(world, "all_reduce",
               wrong_tensors(world, all) + unwritable_tensors(world, all));
  auto one = [](const at::Tensor& tensor) { reduce(tensor, 0); };
  expect_named(
      world, "reduce",
      wrong_tensors(world, one) + unwritable_tensors(world, one) +
          sparse_tensors(world, one) +
          wrong_ranks("dst", [&](int dst) { reduce(ones(world, {2}), dst); }));
  auto coalesced = [&](const at::Tensor& tensor) {
    all_reduce_coalesced({ones(world, {2}), tensor});
  };
  auto shared = ones(world, {4});
  expect_named(
      world, "all_reduce_coalesced",
      unwritable_tensors(world, coalesced) + sparse_tensors(world, coalesced) +
          std::vector<Mistake>{
              {"no tensor",
               [] { all_reduce_coalesced({}); },
               {"empty", "at least one tensor"}},
              {"an undefined tensor", [&] { coalesced({}); }, {"undefined"}},
              {"two devices",
               [&] { coalesced(at::ones({2}, at::kMeta)); },
               {"one device", "meta"}},
              {"overlapping tensors",
               [&] {
                 all_reduce_coalesced(
                     {shared.slice(0, 0, 3), shared.slice(0, 2)});
               },
               {"overlap", "its own memory"}},
              {"the same tensor twice",
               [&] { all_reduce_coalesced({shared, shared}); },
               {"overlap"}},
          });
  expect_in_step(world);
}

// A contiguous copy of such a tensor was made before it was refused.
CONTRACT_TEST(Misuse, NothingIsCopiedOfATensorThatCannotBeWritten, 2) {
  auto group = world.init();
  const auto endless = ones(world, {1}).expand({int64_t{1} << 46});
  const int other = 1 - world.rank;
  const auto refused = [&](const std::string& name,
                           const std::function<void()>& call) {
    expect_named(
        world, name,
        {{"larger than memory", call, {"overlaps itself", "contiguous()"}}});
  };
  refused("all_reduce", [&] { all_reduce(endless); });
  refused("broadcast", [&] { broadcast(endless, other); });
  refused("recv", [&] { recv(endless, other); });
  refused("irecv", [&] { irecv(endless, other); });
  expect_in_step(world);
}

CONTRACT_TEST(Misuse, ReductionsNameDtypesOnWhichAnOperationMakesNoSense, 2) {
  auto group = world.init();
  for (auto op : reduce_ops()) {
    const auto allowed = reduced_dtypes(op);
    for (auto dtype : moved_dtypes()) {
      if (std::ranges::find(allowed, dtype) != allowed.end()) continue;
      // The message must have the dtype, and say what to do.
      const std::vector<std::string> words{c10::toString(dtype), ";"};
      auto tensor = at::empty({2}, dtype).to(world.device);
      auto parts = std::vector<at::Tensor>{tensor, tensor};
      const ReductionOptions options{.op = op};
      expect_named(
          world, "all_reduce",
          {{op_name(op), [&] { all_reduce(tensor, options); }, words}});
      expect_named(world, "reduce",
                   {{op_name(op), [&] { reduce(tensor, 0, options); }, words}});
      expect_named(world, "all_reduce_coalesced",
                   {{op_name(op),
                     [&] { all_reduce_coalesced({tensor}, options); }, words}});
      expect_named(world, "reduce_scatter",
                   {{op_name(op),
                     [&] { reduce_scatter(tensor, parts, options); }, words}});
      expect_named(world, "reduce_scatter_tensor",
                   {{op_name(op),
                     [&] {
                       reduce_scatter_tensor(
                           tensor, at::empty({4}, tensor.options()), options);
                     },
                     words}});
    }
  }
  auto sparse = at::eye(2, world.device).to_sparse();
  expect_named(
      world, "all_reduce",
      {{"AVG of integers",
        [&] { all_reduce(ones(world, {2}, at::kInt), {.op = ReduceOp::AVG}); },
        {"AVG", "floating-point", "Int", "SUM and divide"}},
       {"SUM of bool",
        [&] { all_reduce(ones(world, {2}, at::kBool)); },
        {"SUM", "Bool", "MAX", "MIN"}},
       {"BAND of floats",
        [&] { all_reduce(ones(world, {2}), {.op = ReduceOp::BAND}); },
        {"BAND", "integer and bool", "Float"}},
       {"MAX of complex",
        [&] {
          all_reduce(ones(world, {2}, at::kComplexFloat),
                     {.op = ReduceOp::MAX});
        },
        {"MAX", "real", "ComplexFloat", "view_as_real"}},
       {"8 bits of floating point",
        [&] { all_reduce(at::empty({2}, at::kFloat8_e5m2).to(world.device)); },
        {"Float8_e5m2", "convert"}},
       {"MIN of a sparse one",
        [&] { all_reduce(sparse, {.op = ReduceOp::MIN}); },
        {"MIN", "sparse", "SUM and AVG"}},
       {"complex numbers in a sparse one",
        [&] { all_reduce(sparse.to(at::kComplexFloat)); },
        {"sparse tensor of ComplexFloat", "to_dense()"}},
       {"another kind of sparse",
        [&] { all_reduce(sparse.to_sparse_csr()); },
        {"SparseCsr", "COO"}},
       {"an operation there is not",
        [&] { all_reduce(ones(world, {2}), {.op = ReduceOp::UNUSED}); },
        {"SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR"}}});
  expect_in_step(world);
}

CONTRACT_TEST(Misuse, ReduceScatterNamesWhatDoesNotFit, 2) {
  auto group = world.init();
  auto output = ones(world, {2});
  auto into = [&](const at::Tensor& tensor) {
    reduce_scatter(tensor, list(world, 2, {4}));
  };
  auto from = [&](std::vector<at::Tensor> inputs) {
    return [=] { reduce_scatter(output, inputs); };
  };
  expect_named(world, "reduce_scatter",
               wrong_tensors(world,
                             [&](const at::Tensor& tensor) {
                               reduce_scatter(tensor, {tensor, tensor});
                             }) +
                   unwritable_tensors(world, into) +
                   sparse_tensors(world, into) +
                   std::vector<Mistake>{
                       {"too few inputs",
                        from(list(world, 1)),
                        {"input_list", "1 tensors", "one for each rank (2)"}},
                       {"too many", from(list(world, 3)), {"3 tensors", "(2)"}},
                       {"none", from({}), {"0 tensors"}},
                       {"an undefined one",
                        from({output, at::Tensor()}),
                        {"input_list[1]", "undefined"}},
                       {"another dtype",
                        from({output, ones(world, {2}, at::kInt)}),
                        {"input_list[1]", "Int", "Float", "one dtype"}},
                       {"another shape",
                        from(list(world, 2, {3})),
                        {"output has shape [2]", "must be [3]"}},
                   });
  auto of = [&](const at::Tensor& input) {
    return [=] { reduce_scatter_tensor(output, input); };
  };
  expect_named(world, "reduce_scatter_tensor",
               unwritable_tensors(world,
                                  [&](const at::Tensor& tensor) {
                                    reduce_scatter_tensor(tensor,
                                                          ones(world, {8}));
                                  }) +
                   std::vector<Mistake>{
                       {"undefined input", of({}), {"input", "undefined"}},
                       {"another number of elements",
                        of(ones(world, {5})),
                        {"input has 5 elements", "2", "2 ranks"}},
                       {"another dtype",
                        of(ones(world, {4}, at::kDouble)),
                        {"Double", "Float", "one dtype"}},
                   });
  expect_in_step(world);
}

CONTRACT_TEST(Misuse, BroadcastGatherAndScatterNameWhatDoesNotFit, 2) {
  auto group = world.init();
  const int other = 1 - world.rank;
  auto tensor = ones(world, {2});
  auto from_other = [&](const at::Tensor& into) { broadcast(into, other); };
  expect_named(
      world, "broadcast",
      wrong_tensors(world, from_other) + sparse_tensors(world, from_other) +
          unwritable_tensors(world, from_other) +
          wrong_ranks("src", [&](int src) { broadcast(tensor, src); }));
  auto to_me = [&](std::vector<at::Tensor> outputs) {
    return [=] { gather(tensor, outputs, world.rank); };
  };
  auto shared = ones(world, {3});
  expect_named(
      world, "gather",
      wrong_tensors(
          world, [&](const at::Tensor& input) { gather(input, {}, other); }) +
          wrong_ranks("dst", [&](int dst) { gather(tensor, {}, dst); }) +
          std::vector<Mistake>{
              {"no list on dst",
               to_me({}),
               {"gather_list", "0 tensors", "one for each rank (2)"}},
              {"a list on another rank",
               [&] { gather(tensor, list(world, 2), other); },
               {"gather_list", "2 tensors", "not rank " + std::to_string(other),
                "none"}},
              {"too many", to_me(list(world, 3)), {"3 tensors"}},
              {"another shape",
               to_me({ones(world, {2}), ones(world, {2, 1})}),
               {"gather_list", "[2, 1]", "must be [2]"}},
              {"another dtype",
               to_me(list(world, 2, {2}, at::kHalf)),
               {"gather_list[0]", "Half", "Float"}},
              {"overlapping outputs",
               to_me({shared.slice(0, 0, 2), shared.slice(0, 1, 3)}),
               {"overlap", "its own memory"}},
          });
  auto from_me = [&](std::vector<at::Tensor> inputs) {
    return [=] { scatter(tensor, inputs, world.rank); };
  };
  expect_named(
      world, "scatter",
      unwritable_tensors(
          world, [&](const at::Tensor& into) { scatter(into, {}, other); }) +
          wrong_ranks("src", [&](int src) { scatter(tensor, {}, src); }) +
          std::vector<Mistake>{
              {"no list on src", from_me({}), {"scatter_list", "0 tensors"}},
              {"a list on another rank",
               [&] { scatter(tensor, list(world, 2), other); },
               {"scatter_list", "2 tensors",
                "not rank " + std::to_string(other)}},
              {"another shape",
               from_me(list(world, 2, {3})),
               {"scatter_list", "[3]", "must be [2]"}},
              {"another dtype",
               from_me(list(world, 2, {2}, at::kLong)),
               {"scatter_list[0]", "Long", "Float"}},
          });
  expect_in_step(world);
}

CONTRACT_TEST(Misuse, AllGatherNamesWhatDoesNotFit, 2) {
  auto group = world.init();
  auto tensor = ones(world, {2});
  auto shared = ones(world, {3});
  auto into = [&](std::vector<at::Tensor> outputs) {
    return [=] { all_gather(outputs, tensor); };
  };
  expect_named(
      world, "all_gather",
      std::vector<Mistake>{
          {"undefined", [&] { all_gather(list(world, 2), {}); }, {"undefined"}},
          {"on another device than its outputs",
           [&] { all_gather(list(world, 2), at::ones({2}, at::kMeta)); },
           {"tensor_list[0]", "meta", "one dtype and device"}},
          {"too few",
           into(list(world, 1)),
           {"tensor_list", "1 tensors", "one for each rank (2)"}},
          {"none", into({}), {"0 tensors"}},
          {"an undefined one",
           into({tensor, at::Tensor()}),
           {"tensor_list[1]", "undefined"}},
          {"a sparse one",
           into({tensor, at::eye(2, world.device).to_sparse()}),
           {"tensor_list[1]", "sparse"}},
          {"another dtype",
           into({tensor, ones(world, {2}, at::kDouble)}),
           {"tensor_list[1]", "Double", "Float"}},
          {"another shape than this rank's part",
           into(list(world, 2, {3})),
           {"[2]", "must be [3]"}},
          {"overlapping outputs",
           into({shared.slice(0, 0, 2), shared.slice(0, 1, 3)}),
           {"overlap", "its own memory"}},
          {"an expanded output",
           into({ones(world, {2}), ones(world, {1}).expand({2})}),
           {"overlaps itself"}}});
  expect_named(
      world, "all_gather_into_tensor",
      {{"another number of elements",
        [&] { all_gather_into_tensor(ones(world, {5}), tensor); },
        {"output_tensor has 5 elements", "2", "2 ranks"}},
       {"another dtype",
        [&] { all_gather_into_tensor(ones(world, {4}, at::kInt), tensor); },
        {"Float", "Int", "one dtype"}},
       {"an undefined output",
        [&] { all_gather_into_tensor({}, tensor); },
        {"output_tensor", "undefined"}},
       {"an expanded output",
        [&] { all_gather_into_tensor(ones(world, {1}).expand({4}), tensor); },
        {"overlaps itself"}}});
  auto lists = [&](size_t ranks, size_t tensors) {
    return std::vector<std::vector<at::Tensor>>(ranks, list(world, tensors));
  };
  expect_named(world, "all_gather_coalesced",
               {{"no input",
                 [&] { all_gather_coalesced(lists(2, 0), {}); },
                 {"input_tensor_list", "empty"}},
                {"a list too few",
                 [&] { all_gather_coalesced(lists(1, 1), {tensor}); },
                 {"output_tensor_lists", "1 lists", "one for each rank (2)"}},
                {"a tensor too many",
                 [&] { all_gather_coalesced(lists(2, 2), {tensor}); },
                 {"output_tensor_lists[0]", "2 tensors", "1 inputs"}},
                {"another shape",
                 [&] { all_gather_coalesced(lists(2, 1), {ones(world, {3})}); },
                 {"output_tensor_lists[0][0]", "[2]", "[3]"}},
                {"the same list for both ranks",
                 [&] { all_gather_coalesced(lists(2, 1), {tensor}); },
                 {"overlap"}}});
  expect_in_step(world);
}

CONTRACT_TEST(Misuse, AllToAllNamesWhatDoesNotFit, 2) {
  auto group = world.init();
  expect_named(
      world, "all_to_all",
      {{"nothing",
        [] { all_to_all({}, {}); },
        {"empty", "one tensor for each rank"}},
       {"too few inputs",
        [&] { all_to_all(list(world, 2), list(world, 1)); },
        {"input_tensor_list", "1 tensors", "(2)"}},
       {"too many outputs",
        [&] { all_to_all(list(world, 3), list(world, 2)); },
        {"output_tensor_list", "3 tensors", "(2)"}},
       {"another dtype",
        [&] { all_to_all(list(world, 2, {2}, at::kByte), list(world, 2)); },
        {"output_tensor_list[0]", "Byte", "Float"}},
       {"the same output twice",
        [&] {
          auto output = ones(world, {2});
          all_to_all({output, output}, list(world, 2));
        },
        {"overlap"}}});
  auto single = [&](std::vector<int64_t> output_splits,
                    std::vector<int64_t> input_splits) {
    return [=, &world] {
      all_to_all_single(ones(world, {4, 3}), ones(world, {4, 3}),
                        {.output_split_sizes = output_splits,
                         .input_split_sizes = input_splits});
    };
  };
  expect_named(
      world, "all_to_all_single",
      {{"splits that do not add up",
        single({1, 2}, {}),
        {"output_split_sizes", "are 1 2;", "add up to", "4 rows"}},
       {"too few splits",
        single({}, {4}),
        {"input_split_sizes", "are 4;", "2 numbers"}},
       {"negative splits", single({5, -1}, {}), {"are 5 -1;"}},
       {"rows that do not divide",
        [&] { all_to_all_single(ones(world, {4}), ones(world, {3})); },
        {"input has 3 rows", "2 ranks", "split sizes"}},
       {"rows of two sizes",
        [&] { all_to_all_single(ones(world, {4, 2}), ones(world, {4, 3})); },
        {"row of output is [2]", "[3]"}},
       {"two dtypes",
        [&] {
          all_to_all_single(ones(world, {4}, at::kInt), ones(world, {4}));
        },
        {"Int", "Float", "one dtype"}},
       {"no dimensions",
        [&] { all_to_all_single(ones(world, {}), ones(world, {})); },
        {"without dimensions", "rows"}},
       {"an expanded output",
        [&] {
          all_to_all_single(ones(world, {1}).expand({4}), ones(world, {4}));
        },
        {"overlaps itself"}}});
  expect_in_step(world);
}

CONTRACT_TEST(Misuse, PointToPointNamesRanksTagsAndTensors, 2) {
  auto group = world.init();
  const int other = 1 - world.rank;
  auto tensor = ones(world, {2});
  auto tags = [](const std::function<void(PointToPointOptions)>& call) {
    return std::vector<Mistake>{
        {"negative tag", [=] { call({.tag = -1}); }, {"tag is -1", "0 to"}},
        {"a tag too large",
         [=] { call({.tag = kMaxTag + 1}); },
         {std::to_string(kMaxTag + 1), "0 to " + std::to_string(kMaxTag)}}};
  };
  auto peers = [&](const std::string& argument,
                   const std::function<void(int)>& call) {
    return wrong_ranks(argument, call) +
           std::vector<Mistake>{
               {"itself", [=] { call(world.rank); }, {argument, "itself"}}};
  };
  expect_named(
      world, "send",
      peers("dst", [&](int dst) { send(tensor, dst); }) +
          tags([&](auto options) { send(tensor, other, options); }) +
          wrong_tensors(world, [&](const at::Tensor& t) { send(t, other); }) +
          sparse_tensors(world, [&](const at::Tensor& t) { send(t, other); }) +
          std::vector<Mistake>{
              {"to any", [&] { send(tensor, kAnySource); }, {"dst", "-1"}}});
  expect_named(
      world, "recv",
      peers("src", [&](int src) { recv(tensor, src); }) +
          tags([&](auto options) { recv(tensor, other, options); }) +
          wrong_tensors(world, [&](const at::Tensor& t) { recv(t, other); }) +
          unwritable_tensors(world,
                             [&](const at::Tensor& t) { recv(t, other); }));
  expect_named(world, "isend",
               peers("dst", [&](int dst) { isend(tensor, dst); }));
  expect_named(world, "irecv",
               peers("src", [&](int src) { irecv(tensor, src); }));
  auto second = new_group();
  auto batch = [&](P2POp op) {
    // The first operation is right, but must not be started.
    return [=] {
      batch_isend_irecv(
          {{.op = Kind::isend, .tensor = tensor, .peer = other}, op});
    };
  };
  expect_named(
      world, "batch_isend_irecv",
      {{"empty", [] { batch_isend_irecv({}); }, {"empty", "at least one"}},
       {"itself",
        batch({.op = Kind::isend, .tensor = tensor, .peer = world.rank}),
        {"peer", "itself"}},
       {"from any",
        batch({.op = Kind::irecv, .tensor = tensor, .peer = kAnySource}),
        {"peer", "-1"}},
       {"a wrong tag",
        batch({.op = Kind::irecv, .tensor = tensor, .peer = other, .tag = -3}),
        {"tag is -3"}},
       {"no time",
        batch({.op = Kind::irecv,
               .tensor = tensor,
               .peer = other,
               .timeout = milliseconds(0)}),
        {"timeout is 0 ms"}},
       {"an undefined tensor",
        batch({.op = Kind::irecv, .tensor = {}, .peer = other}),
        {"undefined"}},
       {"an expanded tensor to receive into",
        batch({.op = Kind::irecv,
               .tensor = ones(world, {1}).expand({2}),
               .peer = other}),
        {"overlaps itself"}},
       {"two groups",
        batch({.op = Kind::irecv,
               .tensor = tensor,
               .peer = other,
               .group = second}),
        {"different groups", "one group"}}});
  // Nothing of these batches was sent.
  auto in = ones(world, {1}, at::kLong);
  auto receiving = irecv(in, other);
  isend(at::full_like(in, 7), other)->wait();
  receiving->wait();
  EXPECT_EQ(in.item<int64_t>(), 7);
  expect_in_step(world);
}

CONTRACT_TEST(Misuse, ObjectsNameRanksAndCounts, 2) {
  auto group = world.init();
  expect_named(world, "broadcast_object",
               wrong_ranks("src", [](int src) { broadcast_object(1, src); }));
  expect_named(world, "gather_object",
               wrong_ranks("dst", [](int dst) { gather_object(1, dst); }));
  expect_named(
      world, "scatter_object",
      wrong_ranks("src", [](int src) { scatter_object({1, 2}, src); }) +
          std::vector<Mistake>{{"too few",
                                [&] { scatter_object({1}, world.rank); },
                                {"objects holds 1", "one for each rank (2)"}}});
  expect_in_step(world);
}

}  // namespace
}  // namespace lockstep::internal::testing
