#include "lockstep/parallel/mesh/mesh_layout.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace lockstep {
namespace {

using MeshSteps = std::vector<MeshLayout::Step>;

std::string described_axes(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const auto& [name, size] : axes) {
    text += (text.empty() ? "" : " x ") + name + " " + std::to_string(size);
  }
  return text;
}

std::string quoted_names(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) {
    text += (text.empty() ? "\"" : ", \"") + name + "\"";
  }
  return text;
}

int count_of_steps(const MeshSteps& steps) {
  int count = 1;
  for (const auto& step : steps) count *= step.count;
  return count;
}

int place_in_steps(const MeshSteps& steps, int rank) {
  int place = 0;
  for (const auto& [count, distance] : steps) {
    place = place * count + rank / distance % count;
  }
  return place;
}

std::vector<int> ranks_in_steps(const MeshSteps& steps, int rank) {
  int first = rank;
  for (const auto& [count, distance] : steps) {
    first -= rank / distance % count * distance;
  }
  std::vector<int> ranks{first};
  for (const auto& [count, distance] : steps) {
    std::vector<int> next;
    for (const int from : ranks) {
      for (int i = 0; i < count; ++i) next.push_back(from + i * distance);
    }
    ranks = std::move(next);
  }
  return ranks;
}

std::invalid_argument wrong_axes(const std::vector<MeshAxis>& axes,
                                 int world_size, const std::string& why) {
  return std::invalid_argument("mesh " + described_axes(axes) +
                               " for a world of " + std::to_string(world_size) +
                               " ranks: " + why);
}

// Returns the axes with the size that -1 stands for. Throws if they do not
// cover the world.
std::vector<MeshAxis> checked_axes(std::vector<MeshAxis> axes, int world_size) {
  if (world_size < 1) {
    throw std::invalid_argument("mesh: the world size is " +
                                std::to_string(world_size) +
                                "; it must be at least 1");
  }
  const auto all = std::to_string(world_size);
  if (axes.empty()) {
    throw std::invalid_argument("mesh for a world of " + all +
                                " ranks: there are no axes; give at least one, "
                                "for example {{\"data\", " +
                                all + "}}");
  }
  const auto given = axes;
  MeshAxis* rest = nullptr;
  int64_t product = 1;
  for (auto axis = axes.begin(); axis != axes.end(); ++axis) {
    if (axis->name.empty()) {
      throw wrong_axes(given, world_size,
                       "axis " + std::to_string(axis - axes.begin()) +
                           " has no name; give each axis one");
    }
    if (std::any_of(axes.begin(), axis, [&](const MeshAxis& other) {
          return other.name == axis->name;
        })) {
      throw wrong_axes(given, world_size,
                       "two axes are named \"" + axis->name +
                           "\"; give each axis a name of its own");
    }
    if (axis->size == -1) {
      if (rest != nullptr) {
        throw wrong_axes(given, world_size,
                         "two sizes are -1; let only one axis take the rest");
      }
      rest = &*axis;
      continue;
    }
    if (axis->size < 1) {
      throw wrong_axes(given, world_size,
                       "the size of \"" + axis->name + "\" is " +
                           std::to_string(axis->size) +
                           "; allowed are 1 and more, or -1 for the rest of "
                           "the world");
    }
    // Larger than any world is enough to know.
    product = std::min<int64_t>(product * axis->size,
                                std::numeric_limits<int>::max());
  }
  if (rest != nullptr) {
    if (world_size % product != 0) {
      throw wrong_axes(given, world_size,
                       "the other sizes are " + std::to_string(product) +
                           " together, which does not divide " + all +
                           ", so nothing is left for \"" + rest->name +
                           "\"; change the sizes or the number of ranks");
    }
    rest->size = static_cast<int>(world_size / product);
  } else if (product != world_size) {
    throw wrong_axes(given, world_size,
                     "the product of the sizes is " + std::to_string(product) +
                         "; it must be " + all +
                         ", so change a size, give one axis -1 for the rest, "
                         "or start " +
                         std::to_string(product) + " ranks");
  }
  return axes;
}

}  // namespace

int MeshLayout::Axis::size() const { return count_of_steps(steps); }

MeshLayout::MeshLayout(const std::vector<MeshAxis>& axes, int world_size)
    : world_size_(world_size) {
  int distance = world_size;
  for (const auto& [name, size] : checked_axes(axes, world_size)) {
    distance /= size;
    axes_.push_back({.name = name,
                     .steps = {{.count = size, .distance = distance}},
                     .from = {static_cast<int>(axes_.size())}});
  }
}

std::vector<std::string> MeshLayout::names() const {
  std::vector<std::string> names;
  for (const auto& each : axes_) names.push_back(each.name);
  return names;
}

std::vector<MeshAxis> MeshLayout::axes() const {
  std::vector<MeshAxis> axes;
  for (const auto& each : axes_) axes.push_back({each.name, each.size()});
  return axes;
}

std::string MeshLayout::to_string() const { return described_axes(axes()); }

bool MeshLayout::has(const std::string& name) const {
  return std::ranges::count(axes_, name, &Axis::name) > 0 ||
         std::ranges::count(flattened_, name, &Axis::name) > 0;
}

const MeshLayout::Axis& MeshLayout::axis(const std::string& name) const {
  for (const auto* each : {&axes_, &flattened_}) {
    const auto found = std::ranges::find(*each, name, &Axis::name);
    if (found != each->end()) return *found;
  }
  auto known = names();
  for (const auto& each : flattened_) known.push_back(each.name);
  throw std::invalid_argument("mesh " + to_string() + " has no axis \"" + name +
                              "\"; it has " + quoted_names(known));
}

void MeshLayout::require_rank(int rank) const {
  if (rank >= 0 && rank < world_size_) return;
  throw std::invalid_argument("mesh " + to_string() + " has no rank " +
                              std::to_string(rank) + "; its ranks are 0 to " +
                              std::to_string(world_size_ - 1));
}

int MeshLayout::size() const {
  int size = 1;
  for (const auto& each : axes_) size *= each.size();
  return size;
}

int MeshLayout::size(const std::string& name) const {
  return axis(name).size();
}

int MeshLayout::coordinate(int rank, const std::string& name) const {
  require_rank(rank);
  return place_in_steps(axis(name).steps, rank);
}

std::vector<int> MeshLayout::coordinates(int rank) const {
  require_rank(rank);
  std::vector<int> places;
  for (const auto& each : axes_) {
    places.push_back(place_in_steps(each.steps, rank));
  }
  return places;
}

std::vector<int> MeshLayout::group_of(int rank, const std::string& name) const {
  require_rank(rank);
  return ranks_in_steps(axis(name).steps, rank);
}

std::vector<int> MeshLayout::group_of(int rank) const {
  require_rank(rank);
  return ranks_in_steps(joined(names()).steps, rank);
}

std::vector<std::vector<int>> MeshLayout::groups(
    const std::string& name) const {
  const auto& steps = axis(name).steps;
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (place_in_steps(steps, rank) == 0) {
      groups.push_back(ranks_in_steps(steps, rank));
    }
  }
  return groups;
}

// Returns one axis that is made of several.
MeshLayout::Axis MeshLayout::joined(
    const std::vector<std::string>& names) const {
  if (names.empty()) {
    throw std::invalid_argument("mesh " + to_string() +
                                ": no names were given; give at least one of " +
                                quoted_names(this->names()));
  }
  Axis all{.name = {}, .steps = {}, .from = {}};
  for (const auto& name : names) {
    const auto& next = axis(name);
    if (!all.from.empty() && next.from.front() <= all.from.back()) {
      throw std::invalid_argument(
          "mesh " + to_string() + ": " + quoted_names(names) +
          " are not in the order of its axes, or contain an axis twice; give "
          "different axes in the order " +
          quoted_names(this->names()));
    }
    all.steps.insert(all.steps.end(), next.steps.begin(), next.steps.end());
    all.from.insert(all.from.end(), next.from.begin(), next.from.end());
  }
  return all;
}

MeshLayout MeshLayout::operator[](const std::vector<std::string>& names) const {
  joined(names);  // throws if they cannot be axes of one mesh
  MeshLayout part = *this;
  part.axes_.clear();
  for (const auto& name : names) part.axes_.push_back(axis(name));
  // A flattened axis stays if it is made of whole axes of the part.
  std::erase_if(part.flattened_, [&](const Axis& each) {
    size_t covered = 0;
    for (const auto& own : part.axes_) {
      if (std::ranges::includes(each.from, own.from)) {
        covered += own.from.size();
      }
    }
    return covered != each.from.size() ||
           std::ranges::count(names, each.name) > 0;
  });
  return part;
}

void MeshLayout::flatten(const std::vector<std::string>& names,
                         const std::string& flattened_name) {
  auto all = joined(names);
  if (flattened_name.empty()) {
    throw std::invalid_argument("mesh " + to_string() + ": the axis made of " +
                                quoted_names(names) +
                                " has no name; give it one, for example \"" +
                                names.front() + "_" + names.back() + "\"");
  }
  all.name = flattened_name;
  if (has(flattened_name)) {
    if (axis(flattened_name).from == all.from) return;
    throw std::invalid_argument("mesh " + to_string() + " has an axis \"" +
                                flattened_name + "\" already, which is not " +
                                quoted_names(names) +
                                "; give the flattened axis another name");
  }
  flattened_.push_back(std::move(all));
}

std::vector<MeshLayout::Step> MeshLayout::key(const std::string& name) const {
  MeshSteps key;
  for (const auto& step : axis(name).steps) {
    if (step.count == 1) continue;
    if (!key.empty() && key.back().distance == step.count * step.distance) {
      key.back() = {.count = key.back().count * step.count,
                    .distance = step.distance};
    } else {
      key.push_back(step);
    }
  }
  return key;
}

}  // namespace lockstep

namespace lockstep::internal {

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr size_t kMost = 8;
  constexpr size_t kFirst = 3;
  const bool all = ranks.size() <= kMost;
  std::string text = "{";
  for (size_t i = 0; i < (all ? ranks.size() : kFirst); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  if (all) return text + "}";
  return text + ", ..., " + std::to_string(ranks.back()) + "} (" +
         std::to_string(ranks.size()) + " ranks)";
}

}  // namespace lockstep::internal
