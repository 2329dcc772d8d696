#include "lockstep/cli/inspect/snapshot/snapshot_difference.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/cli/inspect/snapshot/snapshot_listing.h"

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;
using Row = SnapshotDifference::Row;

// Adds a row if the elements of two tensors of one shape and dtype differ.
void compare_elements(const std::string& name, const at::Tensor& a,
                      const at::Tensor& b, SnapshotDifference& difference) {
  auto differs = a.ne(b);
  if (a.is_floating_point() || a.is_complex()) {
    differs.logical_and_(at::logical_and(a.ne(a), b.ne(b)).logical_not_());
  }
  const auto count = differs.sum().item<int64_t>();
  if (count == 0) {
    ++difference.equal_tensors;
    return;
  }
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
  };
  const auto distance = (wide(a) - wide(b)).abs().masked_select(differs);
  difference.rows.push_back(
      {name,
       std::to_string(count) + " of " + std::to_string(a.numel()) +
           (a.numel() == 1 ? " element differs" : " elements differ"),
       distance.max().item<double>()});
}

void compare_numbers(const std::string& name, int64_t a, int64_t b,
                     SnapshotDifference& difference) {
  if (a == b) return;
  difference.rows.push_back(
      {name, std::to_string(a) + " and " + std::to_string(b),
       std::abs(static_cast<double>(a) - static_cast<double>(b))});
}

}  // namespace

SnapshotDifference compare_snapshots(const Snapshot& a, const Snapshot& b) {
  SnapshotDifference difference;
  compare_numbers("epochs_run", a.epochs_run, b.epochs_run, difference);
  compare_numbers("step", a.step, b.step, difference);
  std::map<std::string, at::Tensor> rest;
  for (auto& [name, tensor] : listed_tensors(b)) rest[name] = tensor;
  for (const auto& [name, tensor] : listed_tensors(a)) {
    const auto found = rest.find(name);
    if (found == rest.end()) {
      difference.rows.push_back({name, "only in A"});
      continue;
    }
    const auto other = std::exchange(found->second, at::Tensor());
    rest.erase(found);
    if (tensor.sizes() != other.sizes()) {
      difference.rows.push_back(
          {name, "shape " + shape_text(tensor) + " and " + shape_text(other)});
    } else if (tensor.scalar_type() != other.scalar_type()) {
      difference.rows.push_back(
          {name, "dtype " + dtype_text(tensor) + " and " + dtype_text(other)});
    } else {
      compare_elements(name, tensor, other, difference);
    }
  }
  for (const auto& [name, tensor] : listed_tensors(b)) {
    if (rest.contains(name)) difference.rows.push_back({name, "only in B"});
  }
  return difference;
}

std::string difference_table(const std::string& a, const std::string& b,
                             const SnapshotDifference& difference) {
  std::string text =
      "A: " + a + "\nB: " + b + "\n" +
      std::to_string(difference.equal_tensors) +
      (difference.equal_tensors == 1 ? " tensor is equal"
                                     : " tensors are equal") +
      ", " + std::to_string(difference.rows.size()) +
      (difference.rows.size() == 1 ? " difference\n" : " differences\n");
  if (difference.rows.empty()) return text;
  std::vector<std::vector<std::string>> rows{
      {"name", "A and B", "greatest difference"}};
  for (const auto& [name, what, greatest] : difference.rows) {
    std::array<char, 64> number{};
    std::snprintf(number.data(), number.size(), "%.6g", greatest);
    rows.push_back({name, what, greatest == 0 ? "" : number.data()});
  }
  return text + "\n" + table_text(rows, {2});
}

std::string difference_json(const std::string& a, const std::string& b,
                            const SnapshotDifference& difference) {
  auto rows = ordered_json::array();
  for (const auto& [name, what, greatest] : difference.rows) {
    rows.push_back({{"name", name}, {"what", what}, {"greatest", greatest}});
  }
  const ordered_json document{{"a", a},
                              {"b", b},
                              {"equal_tensors", difference.equal_tensors},
                              {"differences", std::move(rows)}};
  return document.dump(1) + "\n";
}

}  // namespace lockstep::internal
