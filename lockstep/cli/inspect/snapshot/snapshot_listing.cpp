#include "lockstep/cli/inspect/snapshot/snapshot_listing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;

std::string number_text(double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.6g", value);
  return text.data();
}

int64_t total_bytes(const std::vector<ListedTensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

std::string summary(const std::string& path, const Snapshot& snapshot,
                    const std::vector<ListedTensor>& tensors) {
  std::string text = path + ": " + std::to_string(tensors.size()) +
                     (tensors.size() == 1 ? " tensor, " : " tensors, ") +
                     bytes_text(static_cast<double>(total_bytes(tensors)));
  text += snapshot.epochs_run < 0
              ? ", no epoch has ended"
              : ", epoch " + std::to_string(snapshot.epochs_run) + " has ended";
  text += ", step " + std::to_string(snapshot.step);
  const size_t ranks = snapshot.generator_states.size();
  if (ranks > 0) {
    text += ", saved by " + std::to_string(ranks) +
            (ranks == 1 ? " rank" : " ranks");
  }
  text += "\n";
  for (const auto& [name, value] : snapshot.sampler_state) {
    text += "  sampler " + name + ": " + std::to_string(value) + "\n";
  }
  for (const auto& [name, value] : snapshot.metadata) {
    text += "  " + name + ": " + value + "\n";
  }
  return text;
}

}  // namespace

std::vector<ListedTensor> listed_tensors(const Snapshot& snapshot) {
  std::vector<ListedTensor> all;
  for (const auto& [name, tensor] : snapshot.model_state) {
    all.push_back({name, tensor});
  }
  if (!snapshot.optimizer_state) return all;
  for (const auto& [number, values] : snapshot.optimizer_state->state) {
    for (const auto& [field, value] : values) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (tensor == nullptr || !tensor->defined()) continue;
      all.push_back(
          {"optimizer." + std::to_string(number) + "." + field, *tensor});
    }
  }
  return all;
}

std::string shape_text(const at::Tensor& tensor) {
  std::string text = "[";
  for (const int64_t size : tensor.sizes()) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::string dtype_text(const at::Tensor& tensor) {
  return std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

std::string bytes_text(double bytes) {
  if (bytes < 1024) return std::to_string(static_cast<int64_t>(bytes)) + " B";
  const char* unit = "";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (bytes < 1024) break;
    bytes /= 1024;
    unit = next;
  }
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.1f %s", bytes, unit);
  return text.data();
}

std::string table_text(const std::vector<std::vector<std::string>>& rows,
                       const std::vector<size_t>& right) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - row[i].size(), ' ');
      const bool is_right = std::ranges::find(right, i) != right.end();
      line += (i == 0 ? "" : "  ") + (is_right ? gap + row[i] : row[i] + gap);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

double norm_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto values = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  return values.to(at::kDouble).norm().item<double>();
}

std::string listing_table(const std::string& path, const Snapshot& snapshot,
                          bool with_norms) {
  const auto tensors = listed_tensors(snapshot);
  std::vector<std::vector<std::string>> rows{
      {"tensor", "shape", "dtype", "bytes"}};
  if (with_norms) rows.front().emplace_back("norm");
  for (const auto& [name, tensor] : tensors) {
    auto& row = rows.emplace_back(
        std::vector<std::string>{name, shape_text(tensor), dtype_text(tensor),
                                 std::to_string(tensor.nbytes())});
    if (with_norms) row.push_back(number_text(norm_of(tensor)));
  }
  std::string text = summary(path, snapshot, tensors);
  if (!tensors.empty()) text += "\n" + table_text(rows, {3, 4});
  if (with_norms) text += "\nevery checksum in the file is right\n";
  return text;
}

std::string listing_json(const std::string& path, const Snapshot& snapshot,
                         bool with_norms) {
  auto tensors = ordered_json::array();
  for (const auto& [name, tensor] : listed_tensors(snapshot)) {
    ordered_json one{{"name", name},
                     {"shape", tensor.sizes().vec()},
                     {"dtype", dtype_text(tensor)},
                     {"bytes", tensor.nbytes()}};
    // JSON has neither NaN nor infinity: they become null.
    if (with_norms) one["norm"] = norm_of(tensor);
    tensors.push_back(std::move(one));
  }
  const ordered_json document{
      {"path", path},
      {"epochs_run", snapshot.epochs_run},
      {"step", snapshot.step},
      {"generator_states", snapshot.generator_states.size()},
      {"sampler_state", snapshot.sampler_state},
      {"metadata", snapshot.metadata},
      {"verified", with_norms},
      {"tensors", std::move(tensors)}};
  return document.dump(1) + "\n";
}

}  // namespace lockstep::internal
