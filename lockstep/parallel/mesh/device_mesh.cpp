#include "lockstep/parallel/mesh/device_mesh.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/parallel/mesh/mesh_layout.h"

namespace lockstep {
namespace {

constexpr const char* kTensorAxis = "tensor";

std::vector<int> as_global_ranks(const ProcessGroup& parent,
                                 std::vector<int> ranks) {
  for (auto& rank : ranks) rank = parent.global_rank(rank);
  return ranks;
}

// Exchanges what each rank gave, and on which host it is. Throws on all ranks
// if they gave different meshes. Returns the host of each rank; empty if one
// does not know.
std::vector<std::string> agree_on_mesh(const MeshLayout& layout,
                                       const ProcessGroupPtr& parent,
                                       const DeviceMeshOptions& options) {
  std::string given = layout.to_string();
  if (options.ranks_per_host > 0) {
    given +=
        " with " + std::to_string(options.ranks_per_host) + " ranks per host";
  }
  if (options.allow_tensor_across_hosts) given += ", tensor across hosts";
  const auto deadline =
      internal::Deadline::after(options.timeout.value_or(parent->timeout()));
  internal::Agreement agreement(parent, {.timeout = options.timeout});
  agreement.hold("mesh", given);
  if (const auto difference = agreement.compare()) {
    throw std::invalid_argument(
        c10::str("init_device_mesh: the ranks gave different meshes: rank ",
                 difference->first_rank, " ", difference->first_text, ", rank ",
                 difference->rank, " ", difference->text,
                 "; give the same on every rank"));
  }
  std::vector<std::string> hosts;
  if (options.ranks_per_host > 0) {
    for (int rank = 0; rank < parent->size(); ++rank) {
      hosts.push_back(std::to_string(rank / options.ranks_per_host));
    }
    return hosts;
  }
  for (const Object& host :
       all_gather_object(internal::host_id().value_or(""),
                         {.group = parent,
                          .timeout = std::max(deadline.remaining(),
                                              std::chrono::milliseconds(1))})) {
    hosts.push_back(host.get<std::string>());
  }
  if (std::ranges::count(hosts, std::string())) hosts.clear();
  return hosts;
}

// Throws if ranks of one group of "tensor" are on different hosts.
void require_tensor_within_hosts(const MeshLayout& layout,
                                 const ProcessGroup& parent,
                                 const std::vector<std::string>& hosts) {
  if (hosts.empty() || !layout.has(kTensorAxis)) return;
  for (const auto& ranks : layout.groups(kTensorAxis)) {
    const auto away = std::ranges::find_if(
        ranks, [&](int rank) { return hosts[rank] != hosts[ranks.front()]; });
    if (away == ranks.end()) continue;
    throw std::invalid_argument(
        "init_device_mesh: in mesh " + layout.to_string() + " ranks " +
        std::to_string(parent.global_rank(ranks.front())) + " and " +
        std::to_string(parent.global_rank(*away)) +
        " are in one group of \"tensor\" but on different hosts (" +
        std::to_string(std::ranges::count(hosts, hosts[ranks.front()])) +
        " ranks are on the first one's); make \"tensor\" the last axis and its "
        "size a divisor of the number of ranks on a host, or set "
        "allow_tensor_across_hosts");
  }
}

}  // namespace

// The state that all parts of a mesh share.
struct DeviceMesh::Groups {
  ProcessGroupPtr parent;
  MeshLayout layout;
  DeviceMeshOptions options;
  // The keys are those of MeshLayout: axes with the same groups share one.
  std::map<std::vector<MeshLayout::Step>, ProcessGroupPtr> by_key{};

  // Throws LostGroupError if the mesh has lost a rank for good.
  const MeshLayout& layout_now() const {
    if (parent->size() == layout.world_size()) return layout;
    throw LostGroupError(
        "the mesh " + layout.to_string() + " was made of " +
        std::to_string(layout.world_size()) +
        " ranks, and the job goes on with " + std::to_string(parent->size()) +
        " (--heal=shrink); use the default group, or give --heal");
  }

  // Every rank makes the same groups in the same order, because the keys are
  // the same on all.
  void make(const MeshLayout& of, const std::string& name) {
    const auto key = of.key(name);
    if (by_key.contains(key)) return;
    const bool as_parent = options.backend.empty() && !options.timeout;
    by_key[key] =
        as_parent && of.size(name) == parent->size()
            ? parent
            : split_group(of.groups(name), {.parent = parent,
                                            .timeout = options.timeout,
                                            .backend = options.backend});
  }
};

DeviceMesh::DeviceMesh(std::shared_ptr<Groups> groups,
                       std::vector<std::string> names)
    : groups_(std::move(groups)), names_(std::move(names)) {}

DeviceMesh init_device_mesh(const std::vector<MeshAxis>& axes,
                            const DeviceMeshOptions& options) {
  const auto parent = internal::group_or_default(options.parent);
  if (options.ranks_per_host < 0) {
    throw std::invalid_argument(
        "init_device_mesh: ranks_per_host is " +
        std::to_string(options.ranks_per_host) +
        "; give 1 or more, or 0 if each rank is to tell its host");
  }
  const MeshLayout layout(axes, parent->size());
  const auto hosts = agree_on_mesh(layout, parent, options);
  if (!options.allow_tensor_across_hosts) {
    require_tensor_within_hosts(layout, *parent, hosts);
  }
  auto groups = std::make_shared<DeviceMesh::Groups>(
      DeviceMesh::Groups{parent, layout, options});
  for (const auto& name : layout.names()) groups->make(layout, name);
  return {std::move(groups), layout.names()};
}

MeshLayout DeviceMesh::layout() const { return groups_->layout_now()[names_]; }

int DeviceMesh::size() const { return layout().size(); }

const MeshLayout& DeviceMesh::whole_with(const std::string& name) const {
  if (!std::ranges::count(names_, name)) layout().size(name);
  return groups_->layout_now();
}

int DeviceMesh::size(const std::string& name) const {
  return whole_with(name).size(name);
}

const std::string& DeviceMesh::only_name(const char* function) const {
  if (names_.size() == 1) return names_.front();
  throw std::invalid_argument("mesh " + layout().to_string() +
                              " has several axes; name one: " + function +
                              "(\"" + names_.front() + "\")");
}

int DeviceMesh::local_rank(const std::string& name) const {
  return whole_with(name).coordinate(groups_->parent->rank(), name);
}

int DeviceMesh::local_rank() const {
  return local_rank(only_name("local_rank"));
}

std::vector<int> DeviceMesh::coordinate() const {
  return layout().coordinates(groups_->parent->rank());
}

ProcessGroupPtr DeviceMesh::group(const std::string& name) const {
  return groups_->by_key.at(whole_with(name).key(name));
}

ProcessGroupPtr DeviceMesh::group() const { return group(only_name("group")); }

std::vector<int> DeviceMesh::ranks() const {
  const auto& parent = *groups_->parent;
  return as_global_ranks(parent, layout().group_of(parent.rank()));
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const {
  return (*this)[std::vector<std::string>{name}];
}

DeviceMesh DeviceMesh::operator[](
    std::initializer_list<std::string> names) const {
  return (*this)[std::vector<std::string>(names)];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  return {groups_, layout()[names].names()};
}

DeviceMesh DeviceMesh::flatten(const std::vector<std::string>& names,
                               const std::string& flattened_name) {
  layout().flatten(names, flattened_name);  // throws if this part cannot
  auto whole = groups_->layout;
  whole.flatten(names, flattened_name);
  groups_->make(whole, flattened_name);
  groups_->layout = std::move(whole);
  return {groups_, {flattened_name}};
}

DeviceMesh DeviceMesh::flatten(const std::string& flattened_name) {
  return flatten(names_, flattened_name);
}

std::string DeviceMesh::to_string() const {
  const auto& parent = *groups_->parent;
  const auto part = layout();
  std::string text = "rank " +
                     std::to_string(parent.global_rank(parent.rank())) +
                     " of " + std::to_string(part.world_size()) + ":";
  for (const auto& [name, size] : part.axes()) {
    const auto ranks = part.group_of(parent.rank(), name);
    text += (text.back() == ':' ? " " : ", ") + name + " " +
            std::to_string(part.coordinate(parent.rank(), name)) + " of " +
            std::to_string(size) + " " +
            internal::ranks_text(as_global_ranks(parent, ranks));
  }
  return text;
}

}  // namespace lockstep
