#pragma once

#include <chrono>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/mesh/mesh_layout.h"

// Groups of ranks for several kinds of parallelism at once, like Python's
// torch.distributed.device_mesh (PyTorch documentation, "DeviceMesh").
namespace lockstep {

struct DeviceMeshOptions {
  // ---- Behaviour ----

  // The group whose ranks the mesh arranges; a mesh counts them as this group
  // does. Null means the default group.
  ProcessGroupPtr parent{};

  // As in NewGroupOptions. If one of them is given, an axis along all ranks
  // gets a group of its own, too. None and empty mean those of the parent.
  std::optional<std::chrono::milliseconds> timeout{};
  std::string backend{};

  // ---- Placement ----

  // How many ranks in a row share a host. 0 means that each rank tells on which
  // host it is. Set it in a dry run, where there is only one.
  int ranks_per_host{0};

  // Whether a group of the axis "tensor" may have ranks on several hosts.
  // Tensor parallelism communicates several times in each layer, and both
  // passes wait for it, so such a mesh is nearly always a mistake in the order
  // or the sizes of the axes, which nothing but the low speed would show.
  // Therefore it is an error unless this is true.
  bool allow_tensor_across_hosts{false};
};

// A MeshLayout with a process group for each axis, or a part of such a mesh
// with fewer axes. A handle: copies and parts share the groups. The groups live
// until the world ends, as others do.
//
//   auto mesh = init_device_mesh({{"data", 2}, {"tensor", 4}});
//   all_reduce(partial_sums, {.group = mesh.group("tensor")});
//   DistributedDataParallel<Net> model(net,
//                                      {.process_group = mesh.group("data")});
//
// Threads: functions that are const may be called from any; flatten() needs the
// whole mesh and its parts for itself. Mistakes are std::invalid_argument as in
// MeshLayout.
class DeviceMesh {
 public:
  // The axes of this part, with their sizes, places and ranks. Ranks are those
  // of the parent group.
  MeshLayout layout() const;
  std::vector<std::string> names() const { return names_; }

  // The number of ranks along all axes of this part, or along one. `name` may
  // be that of a flattened axis, here and below.
  int size() const;
  int size(const std::string& name) const;

  // This rank's place along an axis, which is also its rank in the group of
  // that axis. Without a name: of a part with one axis.
  int local_rank(const std::string& name) const;
  int local_rank() const;
  // This rank's places along the axes of this part, in their order.
  std::vector<int> coordinate() const;

  // The group of the ranks that differ from this one only along an axis; never
  // null. Without a name: of a part with one axis.
  ProcessGroupPtr group(const std::string& name) const;
  ProcessGroupPtr group() const;

  // The ranks of this part to which this rank belongs, row by row, as ranks of
  // the default group.
  std::vector<int> ranks() const;

  // The part with one axis, or with several, whose names must be in the order
  // of the mesh: mesh["tensor"], mesh[{"data", "context"}]. No communication.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](std::initializer_list<std::string> names) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;

  // Makes one axis of several, named `flattened_name`, and its group. Returns
  // the part with that axis alone; afterwards the whole mesh and its parts with
  // all of `names` know it by its name. The second form takes all axes of this
  // part. A collective of all ranks of the mesh the first time; blocks as
  // new_group() does. If the mesh already has an axis with the same groups, the
  // new axis has its group.
  DeviceMesh flatten(const std::vector<std::string>& names,
                     const std::string& flattened_name);
  DeviceMesh flatten(const std::string& flattened_name);

  // Returns one line about this rank: "rank 5 of 8: data 1 of 2
  // {1, 5}, tensor 1 of 4 {4, 5, 6, 7}", each axis with the ranks of its group,
  // as ranks of the default group.
  std::string to_string() const;

 private:
  struct Groups;

  friend DeviceMesh init_device_mesh(const std::vector<MeshAxis>&,
                                     const DeviceMeshOptions&);
  DeviceMesh(std::shared_ptr<Groups> groups, std::vector<std::string> names);
  const std::string& only_name(const char* function) const;
  // Returns the layout of the whole mesh. Throws if this part does not know
  // `name`. Copies no layout for an axis of this part: layers ask for their
  // group in each forward.
  const MeshLayout& whole_with(const std::string& name) const;

  std::shared_ptr<Groups> groups_;
  std::vector<std::string> names_;
};

// Arranges the ranks of a group in a mesh and makes the group of each axis: one
// split_group() for an axis, whatever the number of its groups. No group is
// made for an axis along all ranks, which has the parent group itself; axes of
// one rank have one group in common.
//
// A collective of all ranks of the parent. Blocks until all have called it, for
// the timeout at most. Throws std::invalid_argument if the sizes do not fit the
// number of ranks (MeshLayout says how), and on every rank if ranks gave
// different meshes or a group of "tensor" has ranks on several hosts.
DeviceMesh init_device_mesh(const std::vector<MeshAxis>& axes,
                            const DeviceMeshOptions& options = {});

}  // namespace lockstep
