#include "lockstep/cli/inspect/snapshot/snapshot_listing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/shown_text.h"
#include "lockstep/cli/text.h"

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;
using Checksum = SnapshotVerification::Tensor::Checksum;

std::string number_text(double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.6g", value);
  return text.data();
}

std::string summary(const StoredSnapshot& stored) {
  const Snapshot& snapshot = stored.numbers();
  const size_t count = stored.tensors().size();
  double bytes = 0;
  for (const StoredTensor& tensor : stored.tensors()) {
    bytes += static_cast<double>(tensor.outline.nbytes());
  }
  std::string text = shown_line(stored.path()) + ": " + std::to_string(count) +
                     (count == 1 ? " tensor, " : " tensors, ") +
                     bytes_text(bytes);
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
    text +=
        "  sampler " + shown_line(name) + ": " + std::to_string(value) + "\n";
  }
  for (const auto& [name, value] : snapshot.metadata) {
    text += "  " + shown_line(name) + ": " + shown_line(value) + "\n";
  }
  return text;
}

// Returns "replicate, rank 0" or "shard, ranks 0-3"; the files' names if they
// are not those of ranks.
std::string text_of(const StoredTensor::Place& place) {
  std::string text = place.placement;
  const auto append = [&](const std::string& more) {
    text += (text.empty() ? "" : ", ") + more;
  };
  if (place.ranks.empty()) {
    for (const std::string& file : place.files) append(file);
    return text;
  }
  append(place.ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < place.ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < place.ranks.size() &&
           place.ranks[last + 1] == place.ranks[last] + 1) {
      ++last;
    }
    text += (i == 0 ? "" : ", ") + std::to_string(place.ranks[i]);
    if (last > i) text += "-" + std::to_string(place.ranks[last]);
    i = last;
  }
  return text;
}

const char* text_of(Checksum checksum) {
  switch (checksum) {
    case Checksum::kOk:
      return "ok";
    case Checksum::kNone:
      return "none";
    default:
      return "damaged";
  }
}

bool has_places(const StoredSnapshot& snapshot) {
  return std::ranges::any_of(
      snapshot.tensors(),
      [](const StoredTensor& tensor) { return tensor.place.has_value(); });
}

std::string verdict(const SnapshotVerification& found) {
  const auto count = [&](Checksum checksum) {
    return std::ranges::count(found.tensors, checksum,
                              &SnapshotVerification::Tensor::checksum);
  };
  const auto none = static_cast<size_t>(count(Checksum::kNone));
  if (!found.damage.empty()) {
    const size_t places = found.damage.size();
    return "damaged in " + std::to_string(places) +
           (places == 1 ? " place" : " places");
  }
  if (none == 0) return "every checksum is right";
  if (none == found.tensors.size()) return "no tensor has a checksum";
  return "every checksum is right, but " + std::to_string(none) +
         (none == 1 ? " tensor has none" : " tensors have none");
}

}  // namespace

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

at::Tensor without_repetitions(const at::Tensor& tensor, const at::Tensor& as) {
  at::Tensor result = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) == 0 && as.stride(d) == 0) {
      result = result.narrow(d, 0, 1);
    }
  }
  return result;
}

bool has_too_many_elements(const at::Tensor& tensor) {
  const auto held =
      tensor.storage().nbytes() / static_cast<size_t>(tensor.element_size());
  return tensor.numel() > std::max(static_cast<int64_t>(held), kElementsAtOnce);
}

std::optional<double> norm_of(const at::Tensor& whole) {
  const auto distinct = without_repetitions(whole, whole);
  if (distinct.numel() < whole.numel()) {
    const auto norm = norm_of(distinct);
    if (!norm) return norm;
    return *norm * std::sqrt(static_cast<double>(whole.numel()) /
                             static_cast<double>(distinct.numel()));
  }
  if (has_too_many_elements(whole)) return std::nullopt;
  // A conjugate has the same norm.
  const auto tensor = whole.is_conj() ? whole.conj() : whole;
  const auto flat =
      (tensor.is_complex() ? at::view_as_real(tensor) : tensor).reshape(-1);
  double norm = 0;
  for (int64_t begin = 0; begin < flat.numel(); begin += kElementsAtOnce) {
    const auto part =
        flat.narrow(0, begin, std::min(kElementsAtOnce, flat.numel() - begin));
    norm = std::hypot(norm, part.to(at::kDouble).norm().item<double>());
  }
  return norm;
}

SnapshotVerification verify(const StoredSnapshot& snapshot) {
  SnapshotVerification found;
  for (const StoredTensor& tensor : snapshot.tensors()) {
    auto& one = found.tensors.emplace_back();
    try {
      one.norm = norm_of(snapshot.read(tensor));
      one.checksum = tensor.has_checksum ? Checksum::kOk : Checksum::kNone;
    } catch (const SnapshotError& error) {
      one.checksum = Checksum::kDamaged;
      found.damage.emplace_back(error.what());
    }
  }
  for (std::string& line : snapshot.damage_elsewhere()) {
    found.damage.push_back(std::move(line));
  }
  return found;
}

std::string listing_table(const StoredSnapshot& snapshot,
                          const SnapshotVerification* verification) {
  const auto& tensors = snapshot.tensors();
  const bool in_folder = has_places(snapshot);
  std::vector<std::string> header{"tensor", "shape", "dtype", "bytes"};
  std::vector<size_t> right{3};
  if (in_folder) header.emplace_back("shard");
  if (verification) {
    header.emplace_back("checksum");
    right.push_back(header.size());
    header.emplace_back("norm");
  }
  std::vector<std::vector<std::string>> rows{header};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const StoredTensor& tensor = tensors[i];
    auto& row = rows.emplace_back(std::vector<std::string>{
        shown_line(tensor.name), shape_text(tensor.outline),
        dtype_text(tensor.outline), std::to_string(tensor.outline.nbytes())});
    if (in_folder) row.push_back(shown_line(text_of(*tensor.place)));
    if (!verification) continue;
    const auto& [checksum, norm] = verification->tensors.at(i);
    row.emplace_back(text_of(checksum));
    row.push_back(norm ? number_text(*norm) : "");
  }
  std::string text = summary(snapshot);
  if (!tensors.empty()) text += "\n" + table_text(rows, right);
  if (verification) text += "\n" + verdict(*verification) + "\n";
  return text;
}

std::string listing_json(const StoredSnapshot& snapshot,
                         const SnapshotVerification* verification) {
  auto rows = ordered_json::array();
  const auto& tensors = snapshot.tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const StoredTensor& tensor = tensors[i];
    ordered_json one{{"name", tensor.name},
                     {"shape", tensor.outline.sizes().vec()},
                     {"dtype", dtype_text(tensor.outline)},
                     {"bytes", tensor.outline.nbytes()}};
    if (tensor.place) {
      const auto& [placement, ranks, files] = *tensor.place;
      one["shard"] = {
          {"placement",
           placement.empty() ? ordered_json() : ordered_json(placement)},
          {"ranks", ranks},
          {"files", files}};
    }
    if (verification) {
      const auto& [checksum, norm] = verification->tensors.at(i);
      one["checksum"] = text_of(checksum);
      // JSON has neither NaN nor infinity: they become null.
      one["norm"] = norm ? ordered_json(*norm) : ordered_json();
    }
    rows.push_back(std::move(one));
  }
  const Snapshot& numbers = snapshot.numbers();
  ordered_json document{{"format", 1},
                        {"path", snapshot.path()},
                        {"epochs_run", numbers.epochs_run},
                        {"step", numbers.step},
                        {"generator_states", numbers.generator_states.size()},
                        {"sampler_state", numbers.sampler_state},
                        {"metadata", numbers.metadata},
                        {"verified", verification != nullptr}};
  if (verification) document["damage"] = verification->damage;
  document["tensors"] = std::move(rows);
  return document.dump(1, ' ', false, ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace lockstep::internal
