#pragma once

#include <string>
#include <vector>

namespace lockstep {

// One axis of a mesh. The names that Lockstep's own parts use are "data",
// "shard", "tensor", "pipeline" and "context"; any other is allowed, too.
struct MeshAxis {
  std::string name{};
  // How many ranks lie along the axis: at least 1, or -1 for what the other
  // axes leave of the world.
  int size{1};
};

// The ranks of a world as a grid with named axes: which ranks form the groups
// of an axis, and where in the grid a rank is. Plain numbers: it makes no
// groups and needs no process group, so it serves worlds of any size
// (DeviceMesh has the groups).
//
// Ranks are counted row by row, as in Python's init_device_mesh: the last axis
// varies fastest. In {{"data", 2}, {"tensor", 4}} the groups of "tensor" are
// ranks 0 to 3 and 4 to 7, those of "data" are {0, 4}, {1, 5}, {2, 6}, {3, 7}.
//
// A part of a layout (layout[{"data"}]) has fewer axes and the same world: its
// groups are those of the whole layout.
//
// Threads: functions that are const may be called from any. All mistakes are
// std::invalid_argument of one line.
class MeshLayout {
 public:
  // Throws if there is no axis, a name is empty or used twice, a size is
  // neither positive nor -1, more than one is -1, or the product of the sizes
  // is not `world_size`.
  MeshLayout(const std::vector<MeshAxis>& axes, int world_size);

  // The number of ranks of the whole world, also for a part of a layout.
  int world_size() const { return world_size_; }

  // The axes, without flattened ones that are not axes of this part.
  std::vector<std::string> names() const;
  std::vector<MeshAxis> axes() const;

  // The functions below take the name of an axis or of a flattened one, and
  // throw if there is none; `rank` is a rank of the world.

  bool has(const std::string& name) const;

  // The number of ranks along all axes together, or along one.
  int size() const;
  int size(const std::string& name) const;

  // The place of `rank` along an axis, from 0 to size(name) - 1, or along each
  // of them.
  int coordinate(int rank, const std::string& name) const;
  std::vector<int> coordinates(int rank) const;

  // Returns the ranks that differ from `rank` only along these axes, and `rank`
  // itself, in the order of their places (ascending): along one axis, or along
  // all axes of this layout.
  std::vector<int> group_of(int rank, const std::string& name) const;
  std::vector<int> group_of(int rank) const;

  // Returns all groups of an axis, in the order of their first ranks. Each rank
  // of the world is in one of them.
  std::vector<std::vector<int>> groups(const std::string& name) const;

  // Returns the part with these axes. Throws if the names are not in the order
  // of this layout, or if one is given twice, also inside a flattened axis.
  MeshLayout operator[](const std::vector<std::string>& names) const;

  // Makes one axis of several that can be used by its name afterwards, beside
  // those that it is made of. The order is that of the layout: the last of
  // `names` varies fastest. Throws like operator[], and if `flattened_name` is
  // empty or the name of something else. Doing it again changes nothing.
  void flatten(const std::vector<std::string>& names,
               const std::string& flattened_name);

  // Returns "data 2 x tensor 4".
  std::string to_string() const;

  // `count` ranks, each `distance` ranks after the one before.
  struct Step {
    int count;
    int distance;
    bool operator==(const Step&) const = default;
    auto operator<=>(const Step&) const = default;
  };
  // Returns the steps of an axis, the longest distance first, with steps that
  // continue each other joined; empty for an axis of one rank. Two axes with
  // equal keys have the same groups.
  std::vector<Step> key(const std::string& name) const;

 private:
  struct Axis {
    std::string name;
    std::vector<Step> steps;  // the last varies fastest
    std::vector<int> from;  // which axes of the whole it is made of, ascending
    int size() const;
  };

  const Axis& axis(const std::string& name) const;
  Axis joined(const std::vector<std::string>& names) const;
  void require_rank(int rank) const;

  int world_size_;
  std::vector<Axis> axes_{};
  std::vector<Axis> flattened_{};
};

}  // namespace lockstep

namespace lockstep::internal {

// Returns "{0, 4}"; of more than eight ranks only the first and the last, with
// their number: "{0, 8, 16, ..., 1016} (128 ranks)".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace lockstep::internal
