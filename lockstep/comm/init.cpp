#include "lockstep/comm/init.h"

#include <signal.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/environment.h"
#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/life_signs.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/comm/rendezvous.h"
#include "lockstep/comm/uncaught.h"
#include "lockstep/comm/watched_store.h"
#include "lockstep/comm/world.h"
#include "lockstep/state/digest.h"
#include "lockstep/worker/error_file.h"
#include "lockstep/worker/flight_dump.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/rank_environment.h"
#include "lockstep/worker/standby_place.h"
#include "lockstep/worker/status_publisher.h"

namespace lockstep {
namespace {

using internal::inside;
using internal::is_foreign;
using internal::NewGroup;
using internal::part_of;
using internal::World;
using internal::world;
using std::chrono::milliseconds;

// How long the ranks wait for each other when they leave a store that rank 0
// hosts, and before they close connections that a peer may still be making.
constexpr std::chrono::seconds kPartTimeout{5};
constexpr std::chrono::seconds kCloseTimeout{1};
// How long a worker that could not make its group waits for the agent to call
// it back, because a peer has failed before it was in its group.
constexpr milliseconds kBackAllowance{200};

std::string device_name(c10::DeviceType type) {
  return c10::DeviceTypeName(type, /*lower_case=*/true);
}

// Returns the timeout that was given, or `otherwise` if there is none; cut to
// what clocks can count.
milliseconds checked_timeout(const char* function,
                             std::optional<milliseconds> given,
                             milliseconds otherwise) {
  if (given && *given <= milliseconds(0)) {
    throw std::invalid_argument(c10::str(
        function, ": timeout is ", given->count(),
        " ms; give more than 0, or none for the timeout of the parent group"));
  }
  return internal::bounded_timeout(given.value_or(otherwise));
}

// For a child process that was forked after init_process_group(): it owns
// nothing here. What `w` holds is leaked, because the destructors would wait
// for threads of the parent.
void abandon_world(World& w) {
  struct Abandoned {
    ProcessGroupPtr group;
    std::optional<internal::Rendezvous> meeting;
    c10::intrusive_ptr<c10d::Store> store;
    std::shared_ptr<internal::LifeSigns> life_signs;
    std::unique_ptr<internal::StatusPublisher> status;
    std::vector<ProcessGroupPtr> subgroups;
    std::vector<ProcessGroupPtr> aborted;
  };
  (void)std::make_unique<Abandoned>(
      Abandoned{std::exchange(w.group, nullptr),
                std::exchange(w.meeting, std::nullopt), std::move(w.store),
                std::exchange(w.life_signs, nullptr),
                std::exchange(w.status, nullptr), std::move(w.subgroups),
                std::move(w.aborted)})
      .release();
  w.store.reset();
  w.subgroups.clear();
  w.aborted.clear();
  w.group_count = 0;
}

// Called while the process ends, maybe in the middle of anything, so it waits
// for no lock, and not for the store.
bool misses_peers() {
  World& w = world();
  const std::unique_lock lock(w.mutex, std::try_to_lock);
  return lock && w.group && !is_foreign(w) && inside(w.group).misses_peers();
}

enum class Leaving {
  normal,   // waits for pending operations and for the peers
  failed,   // does not wait for the peers
  aborted,  // makes pending operations fail, too
};

// Ends the default group and all others on this rank.
void end_world(std::unique_lock<std::mutex> lock, World& w, Leaving leaving) {
  if (is_foreign(w)) return abandon_world(w);
  // Destructors run outside the lock: they may wait for pending operations.
  auto released = std::exchange(w.subgroups, {});
  released.push_back(std::exchange(w.group, nullptr));
  const auto meeting = std::exchange(w.meeting, std::nullopt);
  const auto life_signs = std::exchange(w.life_signs, nullptr);
  auto status = std::exchange(w.status, nullptr);
  w.store.reset();
  w.group_count = 0;
  if (leaving == Leaving::aborted) {
    w.aborted.insert(w.aborted.end(), released.begin(), released.end());
  }
  lock.unlock();
  if (leaving == Leaving::aborted) {
    // Outside the lock, because continuations of pending operations run in
    // abort() and may ask for the default group.
    for (const auto& each : released) {
      try {
        each->abort();
      } catch (const std::exception&) {
        // The group's guard may end this because of an exception of the
        // program. That one, and not a backend's, is to reach the program.
      }
    }
  }
  status.reset();
  if (leaving != Leaving::normal) {
    life_signs->leave(internal::LifeSigns::End::failed);
    for (const auto& each : released) inside(each).close();
    return;
  }
  if (!meeting->has_parting()) {
    // part() will not wait for the ranks, so wait here until no peer is still
    // connecting; before this rank says that it leaves, because a rank that is
    // gone ends this wait.
    const auto deadline = internal::Deadline::after(kPartTimeout);
    for (const auto& each : released) inside(each).await_peers(deadline);
  }
  // Tell the peers at once that this rank has left, in case they wait for it.
  // The life sign goes first, so that a peer whose operation fails then knows
  // why.
  life_signs->leave(internal::LifeSigns::End::left);
  for (const auto& each : released) inside(each).leave();
  // Close the connections after all ranks have left, because a peer may still
  // be connecting to this rank. After kCloseTimeout close them in any case: a
  // peer that has not left notices then that this rank has.
  const bool parted =
      meeting->part(life_signs.get(), internal::Deadline::after(kCloseTimeout));
  for (const auto& each : released) inside(each).close();
  if (parted) return;
  meeting->part(life_signs.get(),
                internal::Deadline::after(kPartTimeout - kCloseTimeout));
}

// A peer that dies closes its connections. Writing to one must be an error that
// names the peer, not the death of this process.
void ignore_sigpipe() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 &&
      (current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == SIG_DFL) {
    ::signal(SIGPIPE, SIG_IGN);
  }
}

// In a standby process, waits for its place. LibTorch has read
// OMP_NUM_THREADS when it was loaded, and the place may have another number.
void stand_by() {
  if (!internal::stands_by()) return;
  const auto before = internal::get_env("OMP_NUM_THREADS");
  internal::take_place();
  // The launcher sets a number if it sets the variable.
  if (internal::get_env("OMP_NUM_THREADS") == before) return;
  if (const auto threads =
          internal::get_env_int("OMP_NUM_THREADS", 1, 1 << 20)) {
    at::set_num_threads(static_cast<int>(*threads));
  }
}

// If neither the options nor the environment say where this process joins and
// as which rank, a backend with a launcher of its own may know.
internal::Rendezvous meet(const std::string& backend,
                          const InitProcessGroupOptions& options) {
  const auto resolved = internal::resolve_backends(backend);  // before any wait
  if (internal::imagines_peers(backend)) {
    return internal::imagined_rendezvous(backend, options);
  }
  const bool told =
      options.store || options.rank >= 0 || options.world_size >= 0 ||
      !(options.init_method.empty() || options.init_method == "env://") ||
      internal::get_env("RANK") || internal::get_env("WORLD_SIZE");
  for (const auto& [type, entry] : resolved) {
    if (!told && entry->world) {
      return internal::rendezvous(entry->world(*options.timeout), options);
    }
  }
  return internal::rendezvous(options, internal::python_may_join(backend));
}

// The parts of which a new group is made, copied out of World: making a group
// waits for its members, and World must not be locked meanwhile.
struct Origin {
  std::string number;  // the name that Python would give the group
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<internal::LifeSigns> life_signs;
};

// Returns whether the environment asks for compared calls. As in Python, the
// case of the letters does not matter, and other words are refused.
bool debug_level_is_detail() {
  const auto given = internal::get_env("TORCH_DISTRIBUTED_DEBUG");
  if (!given) return false;
  std::string level = *given;
  for (char& letter : level) {
    if (letter >= 'a' && letter <= 'z') letter += 'A' - 'a';
  }
  if (level != "OFF" && level != "INFO" && level != "DETAIL") {
    throw std::invalid_argument("TORCH_DISTRIBUTED_DEBUG is \"" + *given +
                                "\"; allowed are OFF, INFO and DETAIL");
  }
  return level == "DETAIL";
}

// Throws std::invalid_argument if another rank has said otherwise whether calls
// are compared. Python's ranks, which never compare, say nothing.
void agree_on_checks(c10d::Store& store, const NewGroup& group) {
  const std::string own =
      c10::str(group.checks_calls ? "yes" : "no", " ", group.rank);
  std::string first;
  try {
    first = store.compareSet("lockstep/checks_calls", std::string(), own);
  } catch (const c10::NotImplementedError&) {
    return;  // a store that was given may not have compareSet()
  }
  if (first[0] == own[0]) return;
  const auto other = first.substr(first.find(' ') + 1);
  const auto self = std::to_string(group.rank);
  throw std::invalid_argument(
      "init_process_group: rank " + (group.checks_calls ? self : other) +
      " compares calls (check_calls, or TORCH_DISTRIBUTED_DEBUG=DETAIL), and "
      "rank " +
      (group.checks_calls ? other : self) +
      " does not; give all ranks the same");
}

// Takes the settings of this process. Returns why this rank may not go on,
// which the others must be told, or nothing.
std::optional<std::string> take_settings(const internal::Rendezvous& meeting,
                                         std::optional<bool> check_calls,
                                         c10d::Store& store, NewGroup& group) {
  if (meeting.refusal) return meeting.refusal;
  try {
    internal::arm_flight_dump(meeting.rank, meeting.world_size);
    group.checks_calls = check_calls ? *check_calls : debug_level_is_detail();
    agree_on_checks(store, group);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return std::nullopt;
}

void require_new_groups() {
  if (!internal::refuses_new_groups()) return;
  throw std::logic_error(
      "a group was to be made in a function of HealedTraining::run(), which "
      "may be called again; make it before");
}

Origin next_group() {
  require_new_groups();
  World& w = world();
  std::lock_guard lock(w.mutex);
  return {std::to_string(w.group_count++), w.store, w.life_signs};
}

Origin split_of(const std::string& name) {
  require_new_groups();
  World& w = world();
  std::lock_guard lock(w.mutex);
  return {name, w.store, w.life_signs};
}

// Makes a group in which this process is rank `rank` of `global_ranks`. An
// empty `backend` means the parent's. The group lives until the world ends.
ProcessGroupPtr make_subgroup(const Origin& origin, const ProcessGroup& parent,
                              int rank, std::vector<int> global_ranks,
                              const std::string& backend,
                              milliseconds timeout) {
  auto group = internal::make_group(
      {.number = origin.number,
       .name = origin.number,
       .rank = rank,
       .global_ranks = std::move(global_ranks),
       .config = backend.empty() ? parent.backend_config() : backend,
       .timeout = timeout,
       .checks_calls = parent.checks_calls()},
      {.store = part_of(origin.number, origin.store),
       .life_signs = origin.life_signs,
       .apart = inside(parent).is_apart()});
  std::lock_guard lock(world().mutex);
  inside(group).set_world(inside(world().group));
  world().subgroups.push_back(group);
  return group;
}

// The result for a rank of `parent` that is in none of `sets`, which are ranks
// of `parent`.
ProcessGroupPtr not_a_member(const ProcessGroup& parent,
                             const std::vector<std::vector<int>>& sets) {
  std::string of;
  for (const auto& ranks : sets) {
    of += c10::str(of.empty() ? "" : ", ", "[", c10::Join(", ", ranks), "]");
  }
  return ProcessGroupPtr::not_a_member(c10::str(
      "rank ", parent.rank(), " of group '", parent.name(),
      "' is not a member of the process group that was used, which was made of "
      "its ranks ",
      of,
      "; use what new_group(), new_subgroups() or split_group() returned on "
      "members only: `if (group) ...`"));
}

// Returns "0-2,5" for ranks in ascending order. A long name ends in a digest,
// since it is a part of the group's keys.
std::string ranks_key(const std::vector<int>& ranks) {
  constexpr size_t longest = 48;
  std::string name;
  for (size_t first = 0, last = 0; first < ranks.size(); first = ++last) {
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    if (first > 0) name += ",";
    name += std::to_string(ranks[first]);
    if (last > first) name += "-" + std::to_string(ranks[last]);
  }
  if (name.size() <= longest) return name;
  internal::Digest digest;
  digest.add(name);
  return name.substr(0, longest) + "..." + std::to_string(digest.value());
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

// The part of init_process_group() that follows once this process has its
// place.
ProcessGroupGuard join_world(const std::string& backend,
                             const InitProcessGroupOptions& given) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (is_foreign(w)) abandon_world(w);
  if (w.group) {
    throw std::invalid_argument(
        "init_process_group was called twice; call destroy_process_group() "
        "before the second time");
  }
  auto options = given;
  const auto timeout =
      internal::bounded_timeout(given.timeout.value_or(kDefaultTimeout));
  options.timeout = timeout;
  ignore_sigpipe();
  // This process takes the place of one that died.
  const bool apart = internal::generation_joined() != 0 && !w.has_joined;
  auto meeting =
      apart ? internal::rendezvous_apart(options) : meet(backend, options);
  if (meeting.kept_by_launcher) internal::tell_agent_meets();
  internal::arm_crash_handler();
  // A store that is given is used as it is; Python does the same.
  auto store = meeting.group_store;
  if (!options.store) {
    store = c10::make_intrusive<c10d::PrefixStore>("default_pg", store);
  }
  store = part_of("0", store);
  const auto life_signs = internal::begin_life(meeting, store);
  NewGroup group{.number = "0",
                 .name = kDefaultGroupName,
                 .rank = meeting.rank,
                 .global_ranks = std::vector<int>(meeting.world_size),
                 .config = backend,
                 .timeout = timeout,
                 .checks_calls = false};
  std::iota(group.global_ranks.begin(), group.global_ranks.end(), 0);
  // The memory of a GPU is free once the workers of the attempt before are
  // gone; on CPUs the group can be made meanwhile.
  const bool needs_devices = std::ranges::any_of(
      internal::resolve_backends(backend),
      [](const auto& each) { return each.first != c10::kCPU; });
  ProcessGroupPtr made;
  // The rank that hosts the store keeps it until the others have read why this
  // rank gave up.
  const auto leave = [&] {
    life_signs->leave(internal::LifeSigns::End::failed);
    meeting.part(nullptr,
                 internal::Deadline::after(meeting.rank == 0 ? kPartTimeout
                                                             : kCloseTimeout));
  };
  try {
    const auto watched = c10::make_intrusive<internal::WatchedStore>(
        store, life_signs, group.global_ranks);
    if (const auto refusal =
            take_settings(meeting, options.check_calls, *watched, group)) {
      watched->give_up(c10::str("rank ", group.rank, " gave up: ", *refusal));
      throw std::invalid_argument(*refusal);
    }
    const auto leaving = internal::Deadline::after(timeout);
    if (needs_devices && !apart) internal::await_leave(leaving);
    made = internal::make_group(
        group, {.store = store, .life_signs = life_signs, .apart = apart});
    life_signs->learn_all();
    if (!needs_devices && !apart) internal::await_leave(leaving);
    meeting.remember_host();
  } catch (const c10::Error& error) {
    meeting.remember_host();
    auto absent = meeting.absent_ranks();
    leave();
    if (absent.empty()) throw;
    internal::throw_absent("init_process_group", meeting, absent, error);
  } catch (const internal::CalledBack&) {
    // So are the other ranks, or they are gone.
    life_signs->leave(internal::LifeSigns::End::failed);
    if (made) inside(made).close();
    throw;
  } catch (...) {
    meeting.remember_host();
    leave();
    if (made) inside(made).close();
    throw;
  }
  w.group = std::move(made);
  w.store = std::move(store);
  w.life_signs = life_signs;
  w.group_count = 1;
  w.apart = apart;
  w.meeting = std::move(meeting);
  w.status = std::make_unique<internal::StatusPublisher>(group.rank);
  internal::forget_failure();
  internal::identify_process(group.rank, misses_peers);
  return ProcessGroupGuard(w.group);
}

}  // namespace

ProcessGroupGuard::ProcessGroupGuard(ProcessGroupPtr group)
    : group_(std::move(group)),
      exceptions_at_start_(std::uncaught_exceptions()) {}

ProcessGroupGuard::~ProcessGroupGuard() {
  if (!group_) return;
  World& w = world();
  std::unique_lock lock(w.mutex);
  if (w.group != group_) return;
  group_.reset();
  const bool normally = std::uncaught_exceptions() <= exceptions_at_start_;
  if (!normally && !is_foreign(w)) {
    internal::note_failure(
        internal::FailureKind::cause_without_words,
        "an exception left the scope of the process group's guard; its text "
        "is known only where it is caught (run main() in lockstep::record() "
        "to have it here)");
  }
  end_world(std::move(lock), w, normally ? Leaving::normal : Leaving::aborted);
}

ProcessGroupGuard init_process_group(const std::string& backend,
                                     const InitProcessGroupOptions& options) {
  if (options.report_uncaught) internal::report_uncaught();
  while (true) {
    stand_by();
    try {
      return join_world(backend, options);
    } catch (...) {
      if (!internal::is_called_back(kBackAllowance)) throw;
    }
  }
}

void destroy_process_group(ProcessGroupPtr group) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  if (!w.group) {
    throw std::runtime_error(
        "destroy_process_group: there is no process group; "
        "init_process_group() makes one");
  }
  if (!group.require_member() || group == w.group) {
    group.reset();
    return end_world(
        std::move(lock), w,
        std::uncaught_exceptions() == 0 ? Leaving::normal : Leaving::failed);
  }
  if (std::erase(w.subgroups, group) == 0) {
    throw std::invalid_argument("destroy_process_group: group '" +
                                group->name() + "' is destroyed already");
  }
  lock.unlock();
  auto& ended = inside(group);
  ended.leave();
  ended.await_peers(internal::Deadline::after(group->timeout()));
  ended.close();
}

bool is_initialized() {
  std::lock_guard lock(world().mutex);
  return world().group != nullptr && !is_foreign(world());
}

ProcessGroupPtr default_group() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  if (!w.group) {
    throw std::runtime_error(
        "the default process group is not initialised; call "
        "init_process_group() first");
  }
  inside(w.group).require_own_process();
  return w.group;
}

int get_rank(const ProcessGroupPtr& group) {
  return internal::group_or_default(group)->rank();
}

int get_world_size(const ProcessGroupPtr& group) {
  return internal::group_or_default(group)->size();
}

int get_local_rank() {
  if (auto rank = internal::get_rank_env_int("LOCAL_RANK", 0, 1 << 16)) {
    return static_cast<int>(*rank);
  }
  auto world_size = internal::get_rank_env_int("WORLD_SIZE", 1, 1 << 24);
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
  const auto type = internal::visible_accelerator();
  if (!type) return c10::Device(c10::kCPU);
  const auto count = at::accelerator::deviceCount();
  if (local_rank >= count) {
    throw std::invalid_argument(c10::str(
        "LOCAL_RANK is ", local_rank, ", but only ", static_cast<int>(count),
        *type == c10::kCUDA ? " GPUs" : " devices of type ",
        *type == c10::kCUDA ? "" : device_name(*type),
        " are visible; start at most one rank a device",
        *type == c10::kCUDA ? ", or set CUDA_VISIBLE_DEVICES to nothing to "
                              "train on CPUs"
                            : ""));
  }
  return c10::Device(*type, static_cast<c10::DeviceIndex>(local_rank));
}

ProcessGroupPtr new_group(std::vector<int> ranks,
                          const NewGroupOptions& options) {
  auto parent = default_group();
  inside(parent).backend(parent->control_device().type());  // throws if lost
  if (ranks.empty()) ranks = parent->global_ranks();
  std::sort(ranks.begin(), ranks.end());
  if (std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end() ||
      ranks.front() < 0 || ranks.back() >= parent->size()) {
    throw std::invalid_argument(c10::str(
        "new_group: ranks are ", ranks,
        "; allowed are different ranks from 0 to ", parent->size() - 1));
  }
  const auto timeout =
      checked_timeout("new_group", options.timeout, parent->timeout());
  const auto origin = next_group();
  auto member = std::find(ranks.begin(), ranks.end(), parent->rank());
  if (member == ranks.end()) return not_a_member(*parent, {ranks});
  const int group_rank = static_cast<int>(member - ranks.begin());
  return make_subgroup(origin, *parent, group_rank, std::move(ranks),
                       options.backend, timeout);
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
  if (own) return own;
  return not_a_member(*default_group(), ranks_per_subgroup_list);
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
  auto parent = internal::group_or_default(options.parent);
  internal::inside(parent).backend(
      parent->control_device().type());  // throws if destroyed
  require_disjoint("split_group", split_ranks, parent->size());
  const auto timeout =
      checked_timeout("split_group", options.timeout, parent->timeout());
  for (auto ranks : split_ranks) {
    std::sort(ranks.begin(), ranks.end());
    auto member = std::find(ranks.begin(), ranks.end(), parent->rank());
    if (member == ranks.end()) continue;
    const int rank = static_cast<int>(member - ranks.begin());
    // Python names the parts of a split otherwise. The parent's name and size,
    // the ranks and how often they were split off keep ours apart from each
    // other.
    const auto origin = split_of(
        c10::str("split/", parent->name(), "/", parent->size(), "/",
                 ranks_key(ranks), "/", inside(parent).next_split(ranks)));
    for (auto& of_parent : ranks) of_parent = parent->global_rank(of_parent);
    return make_subgroup(origin, *parent, rank, std::move(ranks),
                         options.backend, timeout);
  }
  return not_a_member(*parent, split_ranks);
}

namespace internal {

ProcessGroupPtr group_or_default(ProcessGroupPtr given) {
  return given.require_member() ? std::move(given) : default_group();
}

ProcessGroupPtr group_if_any(ProcessGroupPtr given) {
  if (given.require_member() || !is_initialized()) return given;
  return default_group();
}

ExistingGroups existing_groups() {
  auto& w = world();
  const std::lock_guard lock(w.mutex);
  if (!w.group) return {};
  ExistingGroups existing{.groups = {w.group}, .count = w.group_count};
  existing.groups.insert(existing.groups.end(), w.subgroups.begin(),
                         w.subgroups.end());
  return existing;
}

}  // namespace internal
}  // namespace lockstep
