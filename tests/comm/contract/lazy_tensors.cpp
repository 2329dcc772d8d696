// Tensors that differ from their memory: zeros that have none (forward-mode
// differentiation makes them), and views that conjugate or negate.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "tests/comm/contract/contract.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Tensors = std::vector<at::Tensor>;

at::Tensor zeros_without_memory(const ContractWorld& world, int64_t count) {
  return at::_efficientzerotensor(
      c10::IntArrayRef{count},
      at::TensorOptions(at::kFloat).device(world.device));
}

CONTRACT_TEST(LazyTensors, ZerosWithoutMemoryAreZerosAsInput, 2, 3) {
  auto group = world.init();
  const int n = world.size;
  // Rank 1 passes such zeros, the others ones.
  auto given = [&](int64_t count) {
    return world.rank == 1 ? zeros_without_memory(world, count)
                           : at::ones({count}, world.device);
  };
  auto list = [&](int64_t count) {
    Tensors all;
    for (int r = 0; r < n; ++r) all.push_back(given(count));
    return all;
  };
  auto room = [&](int64_t count) {
    return at::full({count}, 7.0, world.device);
  };
  auto rooms = [&](int64_t count) {
    Tensors all;
    for (int r = 0; r < n; ++r) all.push_back(room(count));
    return all;
  };
  auto is = [](const at::Tensor& tensor, double value) {
    return tensor.eq(value).all().item<bool>();
  };
  auto of = [](int rank) { return rank == 1 ? 0.0 : 1.0; };
  for (const int64_t count : {3, 50'000}) {
    auto tensor = world.rank == 1 ? given(count) : room(count);
    broadcast(tensor, 1);
    if (world.rank != 1) {
      EXPECT_TRUE(is(tensor, 0)) << "broadcast";
    }

    auto gathered = rooms(count);
    all_gather(gathered, given(count));
    for (int r = 0; r < n; ++r) EXPECT_TRUE(is(gathered[r], of(r)));

    auto whole = room(n * count);
    all_gather_into_tensor(whole, given(count));
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(is(whole.narrow(0, r * count, count), of(r)));
    }

    std::vector<Tensors> lists;
    for (int r = 0; r < n; ++r) lists.push_back({room(count)});
    all_gather_coalesced(lists, {given(count)});
    for (int r = 0; r < n; ++r) EXPECT_TRUE(is(lists[r][0], of(r)));

    gathered = world.rank == 0 ? rooms(count) : Tensors{};
    gather(given(count), gathered, 0);
    for (size_t r = 0; r < gathered.size(); ++r) {
      EXPECT_TRUE(is(gathered[r], of(static_cast<int>(r)))) << "gather";
    }

    auto own = room(count);
    scatter(own, world.rank == 1 ? list(count) : Tensors{}, 1);
    EXPECT_TRUE(is(own, 0)) << "scatter";

    auto received = rooms(count);
    all_to_all(received, list(count));
    for (int r = 0; r < n; ++r) EXPECT_TRUE(is(received[r], of(r)));

    whole = room(n * count);
    all_to_all_single(whole, given(n * count));
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(is(whole.narrow(0, r * count, count), of(r)));
    }

    own = room(count);
    reduce_scatter(own, list(count));
    EXPECT_TRUE(is(own, n - 1)) << "reduce_scatter";
    own = room(count);
    reduce_scatter_tensor(own, given(n * count));
    EXPECT_TRUE(is(own, n - 1)) << "reduce_scatter_tensor";

    // The result is written on rank 0 only.
    tensor = given(count);
    reduce(tensor, 0);
    if (world.rank == 0) {
      EXPECT_TRUE(is(tensor, n - 1)) << "reduce";
    }

    if (world.rank == 1) send(given(count), 0);
    if (world.rank == 0) {
      auto message = room(count);
      recv(message, 1);
      EXPECT_TRUE(is(message, 0)) << "recv";
    }
  }
}

CONTRACT_TEST(LazyTensors, ZerosWithoutMemoryAreRefusedAsOutput, 2) {
  auto group = world.init();
  const int n = world.size;
  auto ones = [&](int64_t count) { return at::ones({count}, world.device); };
  auto zeros = [&](int64_t count) {
    return zeros_without_memory(world, count);
  };
  const Tensors outputs{zeros(2), zeros(2)};
  const Tensors inputs{ones(2), ones(2)};
  const std::vector<std::pair<std::string, std::function<void()>>> calls{
      {"all_reduce", [&] { all_reduce(zeros(2)); }},
      {"all_reduce_coalesced", [&] { all_reduce_coalesced({zeros(2)}); }},
      {"reduce", [&] { reduce(zeros(2), world.rank); }},
      {"reduce_scatter", [&] { reduce_scatter(zeros(2), inputs); }},
      {"reduce_scatter_tensor",
       [&] { reduce_scatter_tensor(zeros(2), ones(2 * n)); }},
      {"broadcast", [&] { broadcast(zeros(2), 1 - world.rank); }},
      {"all_gather", [&] { all_gather(outputs, ones(2)); }},
      {"all_gather_into_tensor",
       [&] { all_gather_into_tensor(zeros(2 * n), ones(2)); }},
      {"all_gather_coalesced",
       [&] { all_gather_coalesced({{zeros(2)}, {zeros(2)}}, {ones(2)}); }},
      {"gather", [&] { gather(ones(2), outputs, world.rank); }},
      {"scatter", [&] { scatter(zeros(2), {}, 1 - world.rank); }},
      {"all_to_all", [&] { all_to_all(outputs, inputs); }},
      {"all_to_all_single", [&] { all_to_all_single(zeros(2), ones(2)); }},
      {"recv", [&] { recv(zeros(2), 1 - world.rank); }},
  };
  for (const auto& [name, call] : calls) {
    EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(
                          AllOf(HasSubstr(name + " in group"),
                                HasSubstr("zeros without memory"))))
        << name;
  }
  auto tensor = ones(1);
  all_reduce(tensor);
  EXPECT_EQ(tensor.item<int>(), n);
}

CONTRACT_TEST(LazyTensors, ConjugatingAndNegatingViewsAreTheirValues, 2) {
  auto group = world.init();
  const auto options =
      at::TensorOptions(at::kComplexFloat).device(world.device);
  // 1 + 2i, seen as 1 - 2i.
  auto complex_of = [&](int64_t count) {
    return at::view_as_complex(
        at::tensor({1.0F, 2.0F}, world.device).repeat({count, 1}));
  };
  const c10::complex<float> seen(1, -2);
  for (const int64_t count : {3, 50'000}) {
    auto conjugated = complex_of(count).conj();
    all_reduce(conjugated);
    EXPECT_TRUE(conjugated.eq(at::Scalar(seen * 2.0F)).all().item<bool>());
    auto gathered = at::zeros({2 * count}, options).conj();
    all_gather_into_tensor(gathered, complex_of(count).conj());
    EXPECT_TRUE(gathered.eq(at::Scalar(seen)).all().item<bool>());
    // The imaginary part of a conjugate is a view that negates.
    auto negated = at::imag(complex_of(count).conj());
    ASSERT_TRUE(negated.is_neg());
    all_reduce(negated);
    EXPECT_TRUE(negated.eq(-4).all().item<bool>());
    auto part = world.rank == 0 ? at::imag(complex_of(count).conj())
                                : at::imag(at::zeros({count}, options).conj());
    broadcast(part, 0);
    EXPECT_TRUE(part.eq(-2).all().item<bool>());
    auto received = at::imag(at::zeros({2 * count}, options).conj());
    all_to_all_single(received, at::imag(complex_of(2 * count).conj()));
    EXPECT_TRUE(received.eq(-2).all().item<bool>());
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
