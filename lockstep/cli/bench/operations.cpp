#include "lockstep/cli/bench/operations.h"

#include <algorithm>
#include <stdexcept>

namespace lockstep::internal::bench {
namespace {

constexpr std::array<std::string_view, 8> kReduceOps{
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor"};

template <typename Entry, size_t size>
const Entry& find(const std::array<Entry, size>& entries, std::string_view name,
                  const std::string& what, const std::string& also = {}) {
  std::string allowed;
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry;
    if (!allowed.empty()) allowed += ", ";
    allowed += entry.name;
  }
  throw std::invalid_argument("unknown " + what + " \"" + std::string(name) +
                              "\"; allowed are " + allowed + also);
}

}  // namespace

const Operation& find_operation(std::string_view name) {
  return find(kOperations, name, "operation", " and all");
}

const DType& find_dtype(std::string_view name) {
  return find(kDTypes, name, "dtype");
}

void check_reduce_op(std::string_view reduce_op, const DType& dtype) {
  if (std::ranges::find(kReduceOps, reduce_op) == kReduceOps.end()) {
    std::string allowed;
    for (const auto name : kReduceOps) {
      allowed += (allowed.empty() ? "" : ", ") + std::string(name);
    }
    throw std::invalid_argument("unknown --op \"" + std::string(reduce_op) +
                                "\"; allowed are " + allowed);
  }
  const bool is_bitwise = reduce_op.starts_with('b');
  if (is_bitwise && dtype.is_floating_point) {
    throw std::invalid_argument("--op " + std::string(reduce_op) +
                                " is for integers, not for " +
                                std::string(dtype.name));
  }
  if (reduce_op == "avg" && !dtype.is_floating_point) {
    throw std::invalid_argument("--op avg is for floating point, not for " +
                                std::string(dtype.name));
  }
}

double bus_factor(const Operation& operation, int ranks) {
  const double others = static_cast<double>(ranks - 1) / ranks;
  switch (operation.bus_factor) {
    case BusFactor::one:
      return 1;
    case BusFactor::one_direction:
      return others;
    case BusFactor::there_and_back_again:
      return 2 * others;
  }
  return 1;
}

int64_t element_count(const Operation& operation, const DType& dtype,
                      int64_t bytes, int ranks) {
  const int64_t multiple = operation.volume == Volume::parts ? ranks : 1;
  if (operation.volume == Volume::none) return 0;
  return std::max<int64_t>(1, bytes / dtype.bytes / multiple) * multiple;
}

}  // namespace lockstep::internal::bench
