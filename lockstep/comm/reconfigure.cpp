#include "lockstep/comm/reconfigure.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/base/number_list.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/check_in.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/launcher_store.h"
#include "lockstep/comm/uncaught.h"
#include "lockstep/comm/world.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/worker/error_file.h"
#include "lockstep/worker/flight_dump.h"

namespace lockstep {
namespace {

using internal::Deadline;
using internal::inside;
using internal::Rendezvous;
using std::chrono::milliseconds;

// Says why `group` cannot be made again; empty if it can.
std::string reason_against(const ProcessGroup& group) {
  const auto& config = group.backend_config();
  for (const auto& [type, entry] : internal::resolve_backends(config)) {
    if (entry->can_be_made_again) continue;
    return "the backend \"" + entry->name + "\" of group '" + group.name() +
           "' cannot be made again; give \"lockstep\", \"gloo\" or \"shm\"";
  }
  auto& w = internal::world();
  const std::lock_guard lock(w.mutex);
  const bool are_ours = w.apart || !w.group || w.meeting->kept_by_launcher ||
                        w.life_signs->has_all();
  if (are_ours) return {};
  return "ranks of group '" + group.name() +
         "' may be Python's, which cannot make their groups again; start the "
         "ranks by `lockstep run`, with the backend \"lockstep\" or "
         "--worker-store agent";
}

// Returns the text by which ranks compare the groups that they have made.
nlohmann::json description(const std::vector<ProcessGroupPtr>& groups,
                           int count) {
  auto all = nlohmann::json::array();
  for (const auto& group : groups) {
    all.push_back(
        c10::str("group '", group->name(), "' of ",
                 internal::name_numbers("rank", group->global_ranks()), " by ",
                 group->backend_config(), ", ", group->timeout().count(), " ms",
                 group->checks_calls() ? ", with compared calls" : ""));
  }
  return {{"count", count}, {"groups", std::move(all)}};
}

bool has_member(std::string_view group, int rank) {
  group.remove_prefix(group.find("' of rank"));
  group.remove_prefix(group.find(' ', std::string_view("' of ").size()) + 1);
  return std::ranges::count(internal::read_numbers(group), rank) > 0;
}

// Returns those of the groups that `rank` is a member of.
std::vector<std::string> with_member(const nlohmann::json& groups, int rank) {
  std::vector<std::string> with;
  for (const auto& group : groups) {
    const auto text = group.get<std::string>();
    if (has_member(text, rank)) with.push_back(text);
  }
  return with;
}

// Throws if this rank and another have made other groups, or in another order:
// they would wait for each other in vain.
void require_same_groups(const std::vector<ProcessGroupPtr>& groups, int count,
                         const Deadline& deadline) {
  const auto& all = groups.front();
  const int own = all->rank();
  const auto mine = description(groups, count);
  const auto texts =
      internal::gather_texts({.store = *inside(all).store(),
                              .rank = own,
                              .global_ranks = all->global_ranks()},
                             "groups_made/", mine.dump(), deadline);
  const auto refuse = [&](int other, const std::string& here,
                          const std::string& there) {
    throw std::invalid_argument(c10::str(
        "reconfigure: rank ", own, " and rank ", other,
        " have made different groups: rank ", own, " has ", here, ", rank ",
        other, " has ", there,
        "; a process that takes a place must make the same groups in the same "
        "order as the others have"));
  };
  for (int other = 0; other < all->size(); ++other) {
    const auto theirs = nlohmann::json::parse(texts[other]);
    if (theirs["count"] != mine["count"]) {
      refuse(other, c10::str(count, " groups"),
             c10::str(theirs["count"].get<int>(), " groups"));
    }
    const auto here = with_member(mine["groups"], other);
    const auto there = with_member(theirs["groups"], own);
    for (size_t i = 0; i < std::max(here.size(), there.size()); ++i) {
      const auto nth = [i](const std::vector<std::string>& list) {
        return i < list.size() ? list[i] : "no such group";
      };
      if (nth(here) != nth(there)) refuse(other, nth(here), nth(there));
    }
  }
}

// Ends a wait if `look` has thrown: no code on its way takes this for an error
// of the group.
struct LookThrew {};

// Calls `look` for any thread as long as this object lives, and keeps what it
// threw.
class Looking {
 public:
  explicit Looking(const std::function<void()>& look)
      : state_(std::make_shared<State>()),
        function_(std::make_shared<const std::function<void()>>(
            [state = state_] { state->call(); })) {
    state_->look = look;
  }
  Looking(const Looking&) = delete;
  Looking& operator=(const Looking&) = delete;
  ~Looking() {
    const std::lock_guard lock(state_->mutex);
    state_->look = nullptr;
  }

  const std::shared_ptr<const std::function<void()>>& function() const {
    return function_;
  }
  [[noreturn]] void rethrow() const { std::rethrow_exception(state_->thrown); }

 private:
  struct State {
    void call() {
      const std::lock_guard lock(mutex);
      if (!look) return;
      if (thrown) throw LookThrew();
      try {
        look();
      } catch (...) {
        thrown = std::current_exception();
        throw LookThrew();
      }
    }

    std::mutex mutex;
    std::function<void()> look;
    std::exception_ptr thrown;
  };

  const std::shared_ptr<State> state_;
  const std::shared_ptr<const std::function<void()>> function_;
};

// Gives the groups the numbers that ranks have in a world of `members`, if
// there are any. Returns the groups that are not lost.
std::vector<ProcessGroupPtr> renumber(std::vector<ProcessGroupPtr> groups,
                                      const std::vector<int>& members) {
  std::erase_if(groups, [](const ProcessGroupPtr& group) {
    return inside(group).is_lost();
  });
  if (members.empty()) return groups;
  const auto all = groups.front();
  const auto before = std::pair(all->rank(), all->size());
  const auto origins = inside(all).origins();
  if (std::ranges::count(members, origins[all->rank()]) == 0) {
    throw std::invalid_argument(c10::str("reconfigure: members are ", members,
                                         ", without this rank, ",
                                         origins[all->rank()]));
  }
  std::erase_if(groups, [&](const ProcessGroupPtr& group) {
    return !inside(group).renumber(members, origins);
  });
  if (before == std::pair(all->rank(), all->size())) return groups;
  internal::identify_process(all->rank());
  internal::arm_flight_dump(all->rank(), all->size());
  auto& w = internal::world();
  std::unique_lock lock(w.mutex);
  auto status = std::move(w.status);
  lock.unlock();
  status.reset();  // outside the lock, as it ends a thread
  status = std::make_unique<internal::StatusPublisher>(all->rank());
  lock.lock();
  w.status = std::move(status);
  return groups;
}

// Says that this rank has come, unless the store has not what that needs.
void announce(Rendezvous& meeting) {
  try {
    meeting.check_in->announce();
  } catch (const c10::NotImplementedError&) {
    meeting.check_in.reset();
  }
}

using Objects =
    std::vector<std::weak_ptr<const internal::OnReconfigured::Object>>;

Objects& objects() {
  static internal::NoDestructor<Objects> all;
  return *all;
}

std::mutex& objects_mutex() {
  static internal::NoDestructor<std::mutex> mutex;
  return *mutex;
}

}  // namespace

bool supports_reconfigure(const ProcessGroupPtr& group) {
  return reason_against(*internal::group_or_default(group)).empty();
}

void reconfigure(const ReconfigureOptions& options) {
  const internal::UserFunction function("reconfigure()");
  if (options.uuid.empty()) {
    throw std::invalid_argument(
        "reconfigure: uuid is empty; give a name that is the same on all ranks "
        "and new in the store");
  }
  const auto existing = internal::existing_groups();
  const auto all = default_group();  // throws if there is none
  for (const auto& group : existing.groups) {
    if (const auto why = reason_against(*group); !why.empty()) {
      throw std::invalid_argument("reconfigure: " + why);
    }
  }
  const auto timeout =
      internal::bounded_timeout(options.timeout.value_or(all->timeout()));
  if (timeout <= milliseconds(0)) {
    throw std::invalid_argument(c10::str("reconfigure: timeout is ",
                                         timeout.count(),
                                         " ms; it must be more than 0"));
  }
  const auto deadline = Deadline::after(timeout);
  auto& w = internal::world();
  std::unique_lock lock(w.mutex);
  const auto before = *w.meeting;
  w.life_signs->leave(internal::LifeSigns::End::failed);
  w.store.reset();
  const bool is_apart = w.apart;
  lock.unlock();
  // Without the lock, because continuations of pending operations run in here.
  for (const auto& group : existing.groups) inside(group).end_generation();
  const auto groups = renumber(existing.groups, options.members);

  const auto store = options.store ? options.store
                     : is_apart    ? internal::launcher_store(timeout)
                                   : before.store;
  const bool hosted_by_rank_zero =
      before.hosted_by_rank_zero && store == before.store;
  // Groups have a client connection, also on the rank that hosts the store: a
  // handle that lives longer must not keep the store's address taken.
  auto connection = store;
  if (hosted_by_rank_zero && all->rank() == 0) {
    connection = store->clone();
    connection->setTimeout(all->timeout());
  }
  const std::string prefix = "reconfigured/" + options.uuid;
  Rendezvous meeting{
      .store = store,
      .rank = all->rank(),
      .world_size = all->size(),
      .check_in = internal::CheckIn(store, "lockstep/" + prefix, all->rank(),
                                    all->size()),
      .group_store = c10::make_intrusive<c10d::PrefixStore>(prefix, connection),
      .hosted_by_rank_zero = hosted_by_rank_zero,
      .kept_by_launcher =
          dynamic_cast<internal::LauncherStore*>(store.get()) != nullptr};
  const auto own_part = internal::part_of("0", meeting.group_store);
  std::shared_ptr<internal::LifeSigns> life_signs;
  const Looking looking(options.look);
  const auto connect = [&](const ProcessGroupPtr& group,
                           const c10::intrusive_ptr<c10d::Store>& part) {
    inside(group).begin_generation(internal::connect_group(
        internal::description_of(*group),
        {.store = part,
         .life_signs = life_signs,
         .timeout = std::max(deadline.remaining(), milliseconds(1)),
         .look = looking.function()}));
  };
  // Leaves the groups such that reconfigure() can be called again.
  const auto undo = [&] {
    if (life_signs) life_signs->leave(internal::LifeSigns::End::failed);
    for (const auto& group : groups) inside(group).end_generation();
  };
  try {
    announce(meeting);
    life_signs = internal::begin_life(meeting, own_part);
    connect(all, own_part);
    require_same_groups(groups, existing.count, deadline);
    for (size_t i = 1; i < groups.size(); ++i) {
      connect(groups[i], internal::part_of(groups[i]->name(), own_part));
    }
    life_signs->learn_all();
  } catch (const LookThrew&) {
    undo();
    looking.rethrow();
  } catch (const c10::Error& error) {
    const auto absent = meeting.absent_ranks();
    undo();
    if (absent.empty()) throw;
    internal::throw_absent("reconfigure", meeting, absent, error);
  } catch (...) {
    undo();
    throw;
  }
  lock.lock();
  w.meeting = std::move(meeting);
  w.store = own_part;
  w.life_signs = std::move(life_signs);
  w.has_joined = w.has_joined || std::exchange(w.apart, false);
  lock.unlock();
  internal::forget_failure();
}

namespace internal {

bool groups_are_apart() {
  auto& w = world();
  const std::lock_guard lock(w.mutex);
  return w.group && w.apart;
}

OnReconfigured::OnReconfigured(Object object)
    : object_(std::make_shared<const Object>(std::move(object))) {
  const std::lock_guard lock(objects_mutex());
  objects().push_back(object_);
}

OnReconfigured::~OnReconfigured() {
  const std::lock_guard lock(objects_mutex());
  std::erase_if(objects(), [this](const auto& each) {
    return !each.owner_before(object_) && !object_.owner_before(each);
  });
}

int objects_to_reconfigure() {
  const std::lock_guard lock(objects_mutex());
  return static_cast<int>(objects().size());
}

std::vector<at::Tensor> parameters_to_reconfigure() {
  std::vector<at::Tensor> parameters;
  const std::lock_guard lock(objects_mutex());
  for (const auto& each : objects()) {
    const auto object = each.lock();
    if (!object) continue;
    parameters.insert(parameters.end(), object->parameters.begin(),
                      object->parameters.end());
  }
  return parameters;
}

bool& refuses_new_groups() {
  thread_local bool refuses = false;
  return refuses;
}

std::string memory_to_reconfigure() {
  std::string memory;
  const std::lock_guard lock(objects_mutex());
  for (const auto& each : objects()) {
    const auto object = each.lock();
    if (object && object->memory) memory += *object->memory ? '1' : '0';
  }
  return memory;
}

void set_memory_to_reconfigure(const std::string& memory) {
  size_t at = 0;
  const std::lock_guard lock(objects_mutex());
  for (const auto& each : objects()) {
    const auto object = each.lock();
    if (!object || !object->memory || at == memory.size()) continue;
    *object->memory = memory[at++] == '1';
  }
}

void run_reconfigured() {
  std::unique_lock lock(objects_mutex());
  const auto all = objects();
  lock.unlock();
  for (const auto& each : all) {
    if (const auto object = each.lock()) object->function();
  }
}

}  // namespace internal
}  // namespace lockstep
