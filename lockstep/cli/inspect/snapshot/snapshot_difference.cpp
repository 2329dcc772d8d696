#include "lockstep/cli/inspect/snapshot/snapshot_difference.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/base/shown_text.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/cli/inspect/snapshot/snapshot_listing.h"
#include "lockstep/cli/text.h"

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;
using Row = SnapshotDifference::Row;

// Whether two tensors with equal strides have equal memory.
bool have_same_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.strides() != b.strides()) return false;
  const auto memory = [](const at::Tensor& tensor) {
    int64_t end = 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      end += (tensor.size(d) - 1) * tensor.stride(d);
    }
    return tensor.as_strided({end}, {1});
  };
  return memory(a).equal(memory(b));
}

// Adds a row if the elements of two tensors of one shape and dtype differ.
void compare_elements(const std::string& name, const at::Tensor& whole_a,
                      const at::Tensor& whole_b,
                      SnapshotDifference& difference) {
  const auto a = without_repetitions(whole_a, whole_b);
  const auto b = without_repetitions(whole_b, whole_a);
  if (has_too_many_elements(a) || has_too_many_elements(b)) {
    if (have_same_memory(a, b)) {
      ++difference.equal_tensors;
    } else {
      difference.rows.push_back(
          {name, "not compared: the strides overlap, and there are " +
                     std::to_string(whole_a.numel()) + " elements"});
    }
    return;
  }
  const int64_t repeated = a.numel() > 0 ? whole_a.numel() / a.numel() : 1;
  const auto all_a = a.reshape(-1);
  const auto all_b = b.reshape(-1);
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
  };
  int64_t count = 0;
  double greatest = 0;
  for (int64_t begin = 0; begin < a.numel(); begin += kElementsAtOnce) {
    const int64_t size = std::min(kElementsAtOnce, a.numel() - begin);
    const auto part_a = all_a.narrow(0, begin, size);
    const auto part_b = all_b.narrow(0, begin, size);
    auto differs = part_a.ne(part_b);
    if (a.is_floating_point() || a.is_complex()) {
      differs.logical_and_(
          at::logical_and(part_a.ne(part_a), part_b.ne(part_b)).logical_not_());
    }
    const auto here = differs.sum().item<int64_t>();
    if (here == 0) continue;
    count += here * repeated;
    const double most = (wide(part_a) - wide(part_b))
                            .abs()
                            .masked_select(differs)
                            .max()
                            .item<double>();
    if (std::isnan(most) || most > greatest) greatest = most;
  }
  if (count == 0) {
    ++difference.equal_tensors;
    return;
  }
  difference.rows.push_back(
      {name,
       std::to_string(count) + " of " + std::to_string(whole_a.numel()) +
           (whole_a.numel() == 1 ? " element differs" : " elements differ"),
       greatest});
}

void compare_numbers(const std::string& name, int64_t a, int64_t b,
                     SnapshotDifference& difference) {
  if (a == b) return;
  difference.rows.push_back(
      {name, std::to_string(a) + " and " + std::to_string(b),
       std::abs(static_cast<double>(a) - static_cast<double>(b))});
}

using Kind = StoredTensor::Kind;

// Under which names the tensors of two snapshots are compared.
class CommonNames {
 public:
  CommonNames(const StoredSnapshot& a, const StoredSnapshot& b) {
    const auto has_state = [](const StoredSnapshot& one) {
      return std::ranges::any_of(one.tensors(), [](const StoredTensor& tensor) {
        return tensor.kind == Kind::kOptimizerState;
      });
    };
    by_number_ = has_state(a) && has_state(b) &&
                 (!a.names_parameters() || !b.names_parameters());
    const auto has_prefix = [](const StoredSnapshot& one) {
      bool any = false;
      for (const StoredTensor& tensor : one.tensors()) {
        if (tensor.kind != Kind::kModel) continue;
        if (!tensor.name.starts_with(kModelPrefix)) return false;
        any = true;
      }
      return any;
    };
    // A folder in which Python has saved {"model": model.state_dict()} alone.
    drops_prefix_ = has_prefix(a) != has_prefix(b);
  }

  // Returns nothing if the tensor is not compared. `strange` is set if it is
  // optimizer state that has no name which the other side may know.
  std::optional<std::string> of(const StoredTensor& tensor,
                                bool& strange) const {
    switch (tensor.kind) {
      case Kind::kModel:
        return drops_prefix_ && tensor.name.starts_with(kModelPrefix)
                   ? tensor.name.substr(std::string_view(kModelPrefix).size())
                   : tensor.name;
      case Kind::kOptimizerState:
        if (!by_number_) return tensor.name;
        if (!tensor.numbered_name.empty()) return tensor.numbered_name;
        strange = true;
        return std::nullopt;
      default:
        return std::nullopt;
    }
  }

 private:
  bool by_number_ = false;
  bool drops_prefix_ = false;
};

}  // namespace

SnapshotDifference compare_snapshots(const StoredSnapshot& a,
                                     const StoredSnapshot& b) {
  SnapshotDifference difference{.a = a.path(), .b = b.path()};
  compare_numbers("epochs_run", a.numbers().epochs_run, b.numbers().epochs_run,
                  difference);
  compare_numbers("step", a.numbers().step, b.numbers().step, difference);
  const CommonNames names(a, b);
  using Key = std::pair<Kind, std::string>;
  // The tensors of one side that are compared, in their order.
  const auto compared = [&](const StoredSnapshot& one, bool& strange) {
    std::vector<std::pair<Key, const StoredTensor*>> list;
    for (const StoredTensor& tensor : one.tensors()) {
      if (const auto name = names.of(tensor, strange)) {
        list.emplace_back(Key(tensor.kind, *name), &tensor);
      }
    }
    return list;
  };
  bool strange = false;
  auto of_a = compared(a, strange);
  auto of_b = compared(b, strange);
  if (strange) {
    const auto drop_state = [](auto& list) {
      std::erase_if(list, [](const auto& one) {
        return one.first.first == Kind::kOptimizerState;
      });
    };
    drop_state(of_a);
    drop_state(of_b);
  }
  std::map<Key, const StoredTensor*> rest(of_b.begin(), of_b.end());
  for (const auto& [key, tensor] : of_a) {
    const auto found = rest.find(key);
    if (found == rest.end()) {
      difference.rows.push_back({tensor->name, "only in A"});
      continue;
    }
    const StoredTensor& other = *found->second;
    rest.erase(found);
    // A name says more than a number.
    const std::string& name =
        b.names_parameters() && key.first == Kind::kOptimizerState
            ? other.name
            : tensor->name;
    const at::Tensor& first = tensor->outline;
    const at::Tensor& second = other.outline;
    if (first.sizes() != second.sizes()) {
      difference.rows.push_back(
          {name, "shape " + shape_text(first) + " and " + shape_text(second)});
    } else if (first.scalar_type() != second.scalar_type()) {
      difference.rows.push_back(
          {name, "dtype " + dtype_text(first) + " and " + dtype_text(second)});
    } else {
      compare_elements(name, a.read(*tensor), b.read(other), difference);
    }
  }
  for (const auto& [key, tensor] : of_b) {
    if (rest.contains(key)) {
      difference.rows.push_back({tensor->name, "only in B"});
    }
  }
  if (strange) {
    difference.rows.push_back(
        {"optimizer.state",
         "not compared: one side names the parameters, the other numbers "
         "them"});
  }
  return difference;
}

std::string difference_table(const SnapshotDifference& difference) {
  std::string text =
      "A: " + shown_line(difference.a) + "\nB: " + shown_line(difference.b) +
      "\n" + std::to_string(difference.equal_tensors) +
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
    rows.push_back({shown_line(name), shown_line(what),
                    greatest == 0 ? "" : number.data()});
  }
  return text + "\n" + table_text(rows, {2});
}

std::string difference_json(const SnapshotDifference& difference) {
  auto rows = ordered_json::array();
  for (const auto& [name, what, greatest] : difference.rows) {
    rows.push_back({{"name", name}, {"what", what}, {"greatest", greatest}});
  }
  const ordered_json document{{"format", 1},
                              {"a", difference.a},
                              {"b", difference.b},
                              {"equal_tensors", difference.equal_tensors},
                              {"differences", std::move(rows)}};
  return document.dump(1, ' ', false, ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace lockstep::internal
