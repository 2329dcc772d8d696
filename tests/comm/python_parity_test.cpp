// Compares the results of our collectives with those of Python's
// torch.distributed. First a Python world of as many ranks (parity_peer.py)
// runs the same operations on the same inputs. Results must be equal bit for
// bit, except sums, averages and products of floating-point numbers, which may
// be rounded in another order.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/comm/contract/tensors.h"
#include "tests/harness/process_world.h"
#include "tests/harness/python_peer.h"

namespace lockstep::internal {
namespace {

using testing::ReduceOpType;
using testing::Shape;
using testing::World;

constexpr int64_t kSize = 60;

const std::vector<at::ScalarType> kMoved{
    at::kFloat,        at::kDouble,        at::kHalf, at::kBFloat16,
    at::kChar,         at::kByte,          at::kInt,  at::kLong,
    at::kComplexFloat, at::kComplexDouble, at::kBool};

// Returns the dtypes that both Python's Gloo and we reduce.
std::vector<at::ScalarType> reduced(ReduceOpType op) {
  std::vector<at::ScalarType> dtypes;
  for (auto dtype : testing::reduced_dtypes(op)) {
    if (std::ranges::find(kMoved, dtype) != kMoved.end()) {
      dtypes.push_back(dtype);
    }
  }
  return dtypes;
}

std::string python_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return "bool";
  }
}

// The same as bits(), number() and values() of parity_peer.py.
uint32_t bits(int64_t seed, int64_t index) {
  auto h =
      static_cast<uint32_t>(static_cast<uint64_t>(seed + 1) * 2654435761u +
                            static_cast<uint64_t>(index + 1) * 3266489917u);
  h ^= h >> 15;
  h *= 2246822519u;
  return h ^ (h >> 13);
}

at::Tensor values(at::ScalarType dtype, int64_t seed, int64_t count = kSize) {
  auto real = [](uint32_t h) { return h / 2147483648.0 - 1; };
  auto numbers = at::empty({count}, at::kComplexDouble);
  auto* out = numbers.mutable_data_ptr<c10::complex<double>>();
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t h = bits(seed, i);
    if (dtype == at::kBool) {
      out[i] = h & 1;
    } else if (dtype == at::kByte) {
      out[i] = h & 0xff;
    } else if (dtype == at::kChar) {
      out[i] = static_cast<double>(h & 0xff) - 128;
    } else if (c10::isIntegralType(dtype, /*includeBool=*/false)) {
      out[i] = static_cast<double>(h) - 2147483648.0;
    } else {
      out[i] = {real(h), real(bits(seed + 5000, i))};
    }
  }
  if (c10::isComplexType(dtype)) return numbers.to(dtype);
  return at::real(numbers).to(dtype);
}

std::vector<at::Tensor> values_of_ranks(const World& world,
                                        at::ScalarType dtype, int64_t part = 0,
                                        int64_t count = kSize) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world.size; ++rank) {
    all.push_back(values(dtype, rank + 100 * part, count));
  }
  return all;
}

// Returns the results of Python's rank of the same number, by name. The first
// call runs that rank in place of this one.
const nlohmann::json& python_results(const World& world) {
  static nlohmann::json results = [&] {
    const auto output =
        world.folder / ("parity_" + std::to_string(world.rank) + ".json");
    testing::ProgramSetup setup{
        .environment = {"TMPDIR=" + world.folder.string()}};
    for (const char* name : {"PATH", "RANK", "WORLD_SIZE", "MASTER_ADDR",
                             "MASTER_PORT", "OMP_NUM_THREADS"}) {
      setup.environment.push_back(std::string(name) + "=" + std::getenv(name));
    }
    // `timeout` ends the process even if this rank is killed.
    testing::RunningProgram python(
        {"/usr/bin/timeout", "--kill-after=5", "45", LOCKSTEP_TORCH_PYTHON,
         LOCKSTEP_SOURCE_DIR "/tests/comm/parity_peer.py", output},
        setup);
    auto ended = python.finish(std::chrono::seconds(52));
    EXPECT_EQ(ended.exit_code, 0) << testing::words_of_peer(ended);
    if (ended.exit_code != 0) return nlohmann::json::object();
    return nlohmann::json::parse(testing::read_file(output));
  }();
  return results;
}

// Compares by name, and counts, so that no result of Python is left out.
class Comparison {
 public:
  Comparison(const World& world, std::vector<std::string> operations)
      : python_(python_results(world)), operations_(std::move(operations)) {}

  // Both may differ by `bound` at most, see allowance(), or not at all.
  void expect(const std::string& name, const at::Tensor& ours,
              const at::Tensor& bound = {}) {
    ++compared_;
    ASSERT_TRUE(python_.contains(name)) << name;
    auto theirs = decode(python_.at(name), ours);
    if (bound.defined()) {
      EXPECT_TRUE(testing::within(ours, theirs, bound))
          << name << "\n"
          << (ours - theirs).abs().max();
    } else {
      EXPECT_TRUE(testing::same_bits(ours, theirs)) << name << "\n"
                                                    << ours << "\n"
                                                    << theirs;
    }
  }

  void expect_all_compared() const {
    int wrote = 0;
    for (const auto& [name, text] : python_.items()) {
      for (const auto& operation : operations_) {
        wrote += name.starts_with(operation + "/");
      }
    }
    EXPECT_EQ(compared_, wrote) << "Python wrote results nobody looked at";
    EXPECT_GT(compared_, 0);
  }

 private:
  static at::Tensor decode(const std::string& hex, const at::Tensor& like) {
    auto bytes = at::empty({static_cast<int64_t>(hex.size() / 2)}, at::kByte);
    auto* data = bytes.mutable_data_ptr<uint8_t>();
    for (size_t i = 0; i < hex.size() / 2; ++i) {
      data[i] = static_cast<uint8_t>(
          std::stoi(hex.substr(2 * i, 2), nullptr, /*base=*/16));
    }
    return bytes.view(like.scalar_type()).view(like.sizes());
  }

  const nlohmann::json& python_;
  std::vector<std::string> operations_;
  int compared_ = 0;
};

// Returns how far two reductions of `inputs` in different orders may differ;
// undefined if they must be equal. Sums: both are within the bound of
// accumulation in their precision. Products of numbers below one: n roundings,
// relative.
at::Tensor allowance(ReduceOpType op, const std::vector<at::Tensor>& inputs) {
  const auto dtype = inputs[0].scalar_type();
  if (!inputs[0].is_floating_point() && !inputs[0].is_complex()) return {};
  if (op == ReduceOpType::MIN || op == ReduceOpType::MAX) return {};
  if (op != ReduceOpType::PRODUCT) {
    return 2 * testing::accumulation_bound(op, inputs);
  }
  auto product = testing::reduce_in_rank_order(op, inputs).to(at::kDouble);
  auto ulp = testing::accumulation_bound(
      ReduceOpType::AVG, {at::ones(product.sizes(), at::kDouble).to(dtype)});
  return 2.0 * static_cast<double>(inputs.size()) * ulp * product.abs();
}

std::optional<ProcessGroupGuard> beside_python(const World& world) {
  if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) return std::nullopt;
  python_results(world);
  return init_process_group("gloo", {.timeout = std::chrono::seconds(30)});
}

#define BESIDE_PYTHON(world)         \
  auto group = beside_python(world); \
  if (!group) GTEST_SKIP() << "no Python at " LOCKSTEP_TORCH_PYTHON

WORLD_TEST(PythonParity, Reductions, 2, 3) {
  BESIDE_PYTHON(world);
  Comparison python(world, {"all_reduce", "reduce", "reduce_scatter",
                            "reduce_scatter_tensor", "all_reduce_coalesced"});
  const int last = world.size - 1;
  for (auto op : testing::reduce_ops()) {
    for (auto dtype : reduced(op)) {
      const auto key = "/" + testing::op_name(op) + "/" + python_name(dtype);
      const auto bound = allowance(op, values_of_ranks(world, dtype));
      auto tensor = values(dtype, world.rank);
      all_reduce(tensor, {.op = op});
      python.expect("all_reduce" + key, tensor, bound);

      tensor = values(dtype, world.rank);
      reduce(tensor, last, {.op = op});
      if (world.rank == last) python.expect("reduce" + key, tensor, bound);

      std::vector<at::Tensor> parts;
      for (int i = 0; i < world.size; ++i) {
        parts.push_back(values(dtype, world.rank + 100 * i));
      }
      const auto part_bound =
          allowance(op, values_of_ranks(world, dtype, world.rank));
      auto output = at::empty_like(parts[0]);
      reduce_scatter(output, parts, {.op = op});
      python.expect("reduce_scatter" + key, output, part_bound);

      output = at::empty_like(parts[0]);
      reduce_scatter_tensor(output, at::cat(parts), {.op = op});
      python.expect("reduce_scatter_tensor" + key, output, part_bound);

      std::vector<at::Tensor> list;
      std::vector<at::Tensor> bounds;
      for (int i = 0; i < 3; ++i) {
        list.push_back(values(dtype, world.rank + 100 * i, 10 + i));
        bounds.push_back(
            allowance(op, values_of_ranks(world, dtype, i, 10 + i)));
      }
      all_reduce_coalesced(list, {.op = op});
      python.expect("all_reduce_coalesced" + key, at::cat(list),
                    bounds[0].defined() ? at::cat(bounds) : at::Tensor());
    }
  }
  python.expect_all_compared();
}

WORLD_TEST(PythonParity, SparseSums, 2, 3) {
  BESIDE_PYTHON(world);
  Comparison python(world, {"sparse"});
  for (auto dtype : {at::kFloat, at::kDouble}) {
    auto make = [&](int rank) {
      auto places = at::arange(rank + 2, at::kLong) * (rank + 1) % 10;
      return at::sparse_coo_tensor(places.unsqueeze(0),
                                   values(dtype, rank, rank + 2), {10});
    };
    std::vector<at::Tensor> dense;
    for (int rank = 0; rank < world.size; ++rank) {
      dense.push_back(make(rank).coalesce().to_dense());
    }
    auto tensor = make(world.rank);
    all_reduce(tensor);
    python.expect("sparse/" + python_name(dtype), tensor.to_dense(),
                  allowance(ReduceOpType::SUM, dense));
  }
  python.expect_all_compared();
}

int64_t rows(int from, int to) { return (from + 2 * to) % 4; }

WORLD_TEST(PythonParity, DataMovement, 2, 3) {
  BESIDE_PYTHON(world);
  Comparison python(
      world, {"broadcast", "all_gather", "all_gather_into_tensor", "gather",
              "scatter", "all_to_all", "all_to_all_single"});
  for (auto dtype : kMoved) {
    const auto key = "/" + python_name(dtype);
    const auto own = values(dtype, world.rank);
    auto empty = [&] { return at::empty({world.size, kSize}, own.options()); };

    auto tensor = own.clone();
    broadcast(tensor, 1);
    python.expect("broadcast" + key, tensor);

    auto all = empty();
    all_gather(all.unbind(), own);
    python.expect("all_gather" + key, all);

    all = empty();
    all_gather_into_tensor(all, own);
    python.expect("all_gather_into_tensor" + key, all);

    std::vector<at::Tensor> parts;
    for (int i = 0; i < world.size; ++i) {
      parts.push_back(values(dtype, world.rank + 100 * i));
    }
    auto output = at::empty_like(own);
    if (!c10::isComplexType(dtype)) {  // Python's reduce no complex numbers
      const std::vector<at::Tensor> none;
      all = empty();
      gather(own, world.rank == 0 ? all.unbind() : none);
      if (world.rank == 0) python.expect("gather" + key, all);

      scatter(output, world.rank == 1 ? parts : none, 1);
      python.expect("scatter" + key, output);
    }

    all = empty();
    all_to_all(all.unbind(), parts);
    python.expect("all_to_all" + key, all);

    AllToAllSingleOptions splits;
    std::vector<at::Tensor> gives;
    int64_t taken = 0;
    for (int i = 0; i < world.size; ++i) {
      const int64_t count = rows(world.rank, i);
      gives.push_back(
          values(dtype, world.rank + 100 * i, 3 * count).view({count, 3}));
      splits.input_split_sizes.push_back(count);
      splits.output_split_sizes.push_back(rows(i, world.rank));
      taken += rows(i, world.rank);
    }
    output = at::empty({taken, 3}, own.options());
    all_to_all_single(output, at::cat(gives), splits);
    python.expect("all_to_all_single" + key, output);
  }
  python.expect_all_compared();
}

WORLD_TEST(PythonParity, PointToPoint, 2, 3) {
  BESIDE_PYTHON(world);
  Comparison python(world, {"isend_irecv", "batch_isend_irecv"});
  const int right = (world.rank + 1) % world.size;
  const int left = (world.rank + world.size - 1) % world.size;
  for (auto dtype : kMoved) {
    const auto own = values(dtype, world.rank);
    auto output = at::empty_like(own);
    auto sending = isend(own, right);
    irecv(output, left)->wait();
    sending->wait();
    python.expect("isend_irecv/" + python_name(dtype), output);

    output = at::empty_like(own);
    for (auto& work : batch_isend_irecv(
             {{.op = P2POp::Kind::isend, .tensor = own, .peer = left},
              {.op = P2POp::Kind::irecv, .tensor = output, .peer = right}})) {
      work->wait();
    }
    python.expect("batch_isend_irecv/" + python_name(dtype), output);
  }
  python.expect_all_compared();
}

}  // namespace
}  // namespace lockstep::internal
