#include "lockstep/comm/init.h"

#include <signal.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include <ATen/Context.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/environment.h"
#include "lockstep/base/flight_dump.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/rendezvous.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// The one global of the library: Python's default group and what new groups
// are made from.
struct World {
  std::mutex mutex;
  ProcessGroupPtr group;
  std::optional<Rendezvous> meeting;
  c10::intrusive_ptr<c10d::Store> store;  // behind "default_pg"
  std::vector<ProcessGroupPtr> subgroups;
  int group_count = 0;  // names new groups, as Python counts
  // Left by an exception with operations pending: a backend's destructor would
  // wait for those, so these live until the process ends.
  std::vector<ProcessGroupPtr> aborted;
};

World& world() {
  // Never destroyed: a group that outlives main() must not meet a LibTorch
  // whose statics are gone.
  static World& instance = *std::make_unique<World>().release();
  return instance;
}

const char* device_name(c10::DeviceType type) {
  return type == c10::kCPU ? "cpu" : "cuda";
}

// Prefixes as Python's _new_process_group_helper: "<number>/", then
// "<device>/".
ProcessGroupPtr make_group(const std::string& number, const std::string& name,
                           int rank, std::vector<int> global_ranks,
                           const std::string& config, milliseconds timeout,
                           const c10::intrusive_ptr<c10d::Store>& store,
                           bool checks_calls) {
  auto resolved = resolve_backends(config);
  auto group_store =
      c10::make_intrusive<c10d::PrefixStore>(number + "/", store);
  ProcessGroup::Backends backends;
  std::string canonical;
  for (const auto& [type, entry] : resolved) {
    BackendRequest request{
        .store = c10::make_intrusive<c10d::PrefixStore>(
            std::string(device_name(type)) + "/", group_store),
        .rank = rank,
        .size = static_cast<int>(global_ranks.size()),
        .timeout = timeout,
        .group_name = number,
        .global_ranks = global_ranks};
    auto fail = [&](const char* cause) {
      throw c10::DistBackendError(
          {__func__, __FILE__, __LINE__},
          c10::str("rank ", request.global_ranks[rank], " of group '", name,
                   "' (", request.size,
                   " ranks) could not connect to its peers by \"", entry->name,
                   "\" (allowed ", timeout.count(), " ms): ", cause));
    };
    try {
      backends.emplace(type, entry->create(request));
    } catch (const std::invalid_argument&) {
      throw;  // says by itself what is wrong with what was given
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(error.what());
    }
    canonical += (canonical.empty() ? "" : ",") +
                 std::string(device_name(type)) + ":" + entry->name;
  }
  return std::make_shared<ProcessGroup>(
      name, rank, std::move(global_ranks), timeout,
      c10::make_intrusive<c10d::PrefixStore>("lockstep/", group_store),
      std::move(backends), canonical, checks_calls);
}

// A peer that dies closes its connections, and writing to one must be an error
// that names it, not the death of this process.
void ignore_sigpipe() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 &&
      (current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == SIG_DFL) {
    ::signal(SIGPIPE, SIG_IGN);
  }
}

// Where nobody says where and as whom this process joins, a backend with a
// launcher of its own may know.
Rendezvous meet(const std::string& backend,
                const InitProcessGroupOptions& options) {
  const auto resolved = resolve_backends(backend);  // before anything waits
  const bool told =
      options.store || options.rank >= 0 || options.world_size >= 0 ||
      !(options.init_method.empty() || options.init_method == "env://") ||
      get_env("RANK") || get_env("WORLD_SIZE");
  for (const auto& [type, entry] : resolved) {
    if (!told && entry->world) {
      return rendezvous(entry->world(options.timeout), options);
    }
  }
  return rendezvous(options);
}

// Making a group waits for its members, so the world is not locked meanwhile.
c10::intrusive_ptr<c10d::Store> world_store() {
  std::lock_guard lock(world().mutex);
  return world().store;
}

// The number that Python would give the next group, and what it builds on.
std::pair<std::string, c10::intrusive_ptr<c10d::Store>> next_group() {
  std::lock_guard lock(world().mutex);
  return {std::to_string(world().group_count++), world().store};
}

ProcessGroupPtr keep(ProcessGroupPtr group) {
  std::lock_guard lock(world().mutex);
  world().subgroups.push_back(group);
  return group;
}

void require_disjoint(const char* function,
                      const std::vector<std::vector<int>>& sets, int size) {
  std::vector<int> all;
  for (const auto& ranks : sets) {
    if (ranks.empty()) {
      throw std::invalid_argument(std::string(function) +
                                  ": a set of ranks is empty; give at least "
                                  "one rank in each");
    }
    all.insert(all.end(), ranks.begin(), ranks.end());
  }
  std::sort(all.begin(), all.end());
  if (all.empty() || all.front() < 0 || all.back() >= size ||
      std::adjacent_find(all.begin(), all.end()) != all.end()) {
    throw std::invalid_argument(
        c10::str(function, ": the sets hold ranks ", all,
                 "; allowed are different ranks from 0 to ", size - 1));
  }
}

}  // namespace

ProcessGroupGuard::ProcessGroupGuard(ProcessGroupPtr group)
    : group_(std::move(group)),
      exceptions_at_start_(std::uncaught_exceptions()) {}

ProcessGroupGuard::~ProcessGroupGuard() {
  if (!group_) return;
  {
    std::lock_guard lock(world().mutex);
    if (world().group != group_) return;
  }
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    World& w = world();
    std::lock_guard lock(w.mutex);
    auto abort = [&](const ProcessGroupPtr& group) {
      group->abort();
      w.aborted.push_back(group);
    };
    for (auto& group : w.subgroups) abort(group);
    abort(group_);
  }
  group_.reset();
  destroy_process_group();
}

ProcessGroupGuard init_process_group(const std::string& backend,
                                     const InitProcessGroupOptions& options) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (w.group) {
    throw std::invalid_argument(
        "init_process_group was called twice; call destroy_process_group() "
        "before the second time");
  }
  ignore_sigpipe();
  auto meeting = meet(backend, options);
  arm_flight_dump(meeting.rank, meeting.world_size);
  // A store that is given is used as it is; Python does the same.
  w.store = meeting.group_store;
  if (!options.store) {
    w.store = c10::make_intrusive<c10d::PrefixStore>("default_pg", w.store);
  }
  std::vector<int> ranks(meeting.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  try {
    w.group = make_group("0", kDefaultGroupName, meeting.rank, std::move(ranks),
                         backend, options.timeout, w.store,
                         options.check_calls.value_or(
                             get_env("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"));
    meeting.remember_host();
  } catch (const c10::Error& error) {
    w.store.reset();
    meeting.remember_host();
    auto absent = meeting.absent_ranks();
    if (absent.empty()) throw;
    meeting.part();
    throw c10::DistBackendError(
        {__func__, __FILE__, __LINE__},
        c10::str("init_process_group: a world of ", meeting.world_size,
                 ", absent: rank ", absent, "; ",
                 error.what_without_backtrace()));
  } catch (...) {
    w.store.reset();
    throw;
  }
  w.group_count = 1;
  w.meeting = std::move(meeting);
  return ProcessGroupGuard(w.group);
}

void destroy_process_group(ProcessGroupPtr group) {
  World& w = world();
  // Destructors run outside the lock: they may wait for pending operations.
  std::vector<ProcessGroupPtr> released;
  std::optional<Rendezvous> meeting;
  std::unique_lock lock(w.mutex);
  if (!w.group) {
    throw std::runtime_error(
        "destroy_process_group: there is no process group; "
        "init_process_group() makes one");
  }
  if (!group || group == w.group) {
    released = std::move(w.subgroups);
    w.subgroups.clear();
    released.push_back(std::move(w.group));
    w.group = nullptr;
    w.store.reset();
    meeting = std::exchange(w.meeting, std::nullopt);
    w.group_count = 0;
  } else if (std::erase(w.subgroups, group) > 0) {
    released.push_back(group);
  } else {
    throw std::invalid_argument("destroy_process_group: group '" +
                                group->name() + "' was destroyed before");
  }
  lock.unlock();
  // First all part, then connections are closed: a peer may still be making
  // its own to this rank. After an error nobody waits for anybody.
  if (meeting && std::uncaught_exceptions() == 0) meeting->part();
  for (const auto& each : released) each->close();
}

bool is_initialized() {
  std::lock_guard lock(world().mutex);
  return world().group != nullptr;
}

ProcessGroupPtr default_group() {
  std::lock_guard lock(world().mutex);
  if (!world().group) {
    throw std::runtime_error(
        "the default process group is not initialised; call "
        "init_process_group() first");
  }
  return world().group;
}

int get_rank(const ProcessGroupPtr& group) {
  return group ? group->rank() : default_group()->rank();
}

int get_world_size(const ProcessGroupPtr& group) {
  return group ? group->size() : default_group()->size();
}

int get_local_rank() {
  if (auto rank = get_env_int("LOCAL_RANK", 0, 1 << 16)) {
    return static_cast<int>(*rank);
  }
  if (auto rank = get_env_int("OMPI_COMM_WORLD_LOCAL_RANK", 0, 1 << 16)) {
    return static_cast<int>(*rank);  // of mpirun
  }
  auto world_size = get_env_int("WORLD_SIZE", 1, 1 << 24);
  if (world_size && *world_size > 1) {
    throw std::invalid_argument(
        "LOCAL_RANK is not set, but WORLD_SIZE is " +
        std::to_string(*world_size) +
        "; set it to this process's number on its host, or start with "
        "`lockstep run`");
  }
  return 0;
}

c10::Device local_device() {
  int local_rank = get_local_rank();
  if (!at::globalContext().hasCUDA()) return c10::Device(c10::kCPU);
  auto count = at::detail::getCUDAHooks().deviceCount();
  if (count == 0) return c10::Device(c10::kCPU);
  if (local_rank >= count) {
    throw std::invalid_argument(
        "LOCAL_RANK is " + std::to_string(local_rank) + ", but only " +
        std::to_string(count) +
        " GPUs are visible; start at most one rank a GPU, or set "
        "CUDA_VISIBLE_DEVICES to nothing to train on CPUs");
  }
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank));
}

ProcessGroupPtr new_group(std::vector<int> ranks,
                          const NewGroupOptions& options) {
  auto parent = default_group();
  if (ranks.empty()) ranks = parent->global_ranks();
  std::sort(ranks.begin(), ranks.end());
  if (std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end() ||
      ranks.front() < 0 || ranks.back() >= parent->size()) {
    throw std::invalid_argument(c10::str(
        "new_group: ranks are ", ranks,
        "; allowed are different ranks from 0 to ", parent->size() - 1));
  }
  const auto [number, store] = next_group();
  auto member = std::find(ranks.begin(), ranks.end(), parent->rank());
  if (member == ranks.end()) return nullptr;
  const int group_rank = static_cast<int>(member - ranks.begin());
  return keep(make_group(
      number, number, group_rank, std::move(ranks),
      options.backend.empty() ? parent->backend_config() : options.backend,
      options.timeout > milliseconds(0) ? options.timeout : parent->timeout(),
      store, parent->checks_calls()));
}

ProcessGroupPtr new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewGroupOptions& options) {
  require_disjoint("new_subgroups_by_enumeration", ranks_per_subgroup_list,
                   default_group()->size());
  ProcessGroupPtr own;
  for (const auto& ranks : ranks_per_subgroup_list) {
    if (auto group = new_group(ranks, options)) own = group;
  }
  return own;
}

ProcessGroupPtr new_subgroups(int group_size, const NewGroupOptions& options) {
  const int world_size = default_group()->size();
  if (group_size < 1 || world_size % group_size != 0) {
    throw std::invalid_argument(
        c10::str("new_subgroups: group_size is ", group_size,
                 "; allowed are divisors of the world size, ", world_size));
  }
  std::vector<std::vector<int>> subgroups;
  for (int first = 0; first < world_size; first += group_size) {
    subgroups.emplace_back(group_size);
    std::iota(subgroups.back().begin(), subgroups.back().end(), first);
  }
  return new_subgroups_by_enumeration(subgroups, options);
}

ProcessGroupPtr split_group(const std::vector<std::vector<int>>& split_ranks,
                            const SplitGroupOptions& options) {
  auto parent = options.parent ? options.parent : default_group();
  parent->backend(parent->control_device().type());  // not destroyed
  require_disjoint("split_group", split_ranks, parent->size());
  // Python names its parts otherwise; the parent's name and a count keep ours
  // apart from each other.
  const auto prefix = "split/" + parent->name() + "/" +
                      std::to_string(parent->next_split()) + "/";
  for (size_t part = 0; part < split_ranks.size(); ++part) {
    auto ranks = split_ranks[part];
    std::sort(ranks.begin(), ranks.end());
    auto member = std::find(ranks.begin(), ranks.end(), parent->rank());
    if (member == ranks.end()) continue;
    const int rank = static_cast<int>(member - ranks.begin());
    for (auto& of_parent : ranks) of_parent = parent->global_rank(of_parent);
    const auto name = prefix + std::to_string(part);
    return keep(make_group(
        name, name, rank, std::move(ranks),
        options.backend.empty() ? parent->backend_config() : options.backend,
        options.timeout > milliseconds(0) ? options.timeout : parent->timeout(),
        world_store(), parent->checks_calls()));
  }
  return nullptr;
}

}  // namespace lockstep
