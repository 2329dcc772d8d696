#include "lockstep/launch/agent/attempt.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <numeric>
#include <system_error>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/message_bytes.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/worker_call.h"
#include "lockstep/worker/worker_store_link.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// How long a worker may outlive SIGKILL (uninterruptible in the kernel) before
// it is given up.
constexpr milliseconds kKillAllowance{5000};
// When standby processes are started: so long after all workers have begun to
// publish, which they do at the end of init_process_group(), or after a healing
// has ended; or, if that does not come, so long after the start or the
// replacement.
constexpr milliseconds kRefillDelay{1000};
constexpr milliseconds kRefillAnyway{10'000};
// How long workers wait for a standby process to take the place of one that
// failed; how long the workers' store may take for an announcement, and when it
// is asked again.
constexpr milliseconds kHealAllowance{30'000};
constexpr milliseconds kAnnounceAllowance{1000};
constexpr milliseconds kAnnouncePause{200};
// How long it may take if a node was lost: nothing else is to be done here.
constexpr milliseconds kLostNodeAllowance{5000};

constexpr const char* kNoStore = "the workers have no store of the launcher's";
constexpr const char* kNoneLeft = "no rank is left";
constexpr const char* kHasEnded = "a rank has ended its training";
constexpr const char* kNoneFree =
    "no restart is left, and a healing would count as one";
std::string no_answer_within(milliseconds time) {
  return "the workers' store has not answered within " + seconds_text(time);
}

Attempt::Healing cannot(std::string why) {
  Attempt::Healing healing;
  healing.why_not = std::move(why);
  return healing;
}

}  // namespace

Attempt::Attempt(const AgentParts& parts, const RoundPlan& plan,
                 std::optional<StorePort> port)
    : parts_(parts),
      plan_(plan),
      earlier_streams_(parts.mux.streams()),
      port_(std::move(port)),
      store_(serve_store()),
      generation_(take_lost_places()),
      workers_(parts.options.workers, plan_,
               plan_.lost_node.empty() ? 0 : generation_, places_,
               port_ ? port_->fd() : -1, store_socket_, parts.directory,
               parts.surroundings, parts.mux, parts.standby),
      publishers_(workers_.size(), 0) {}

std::unique_ptr<WorkerStoreService> Attempt::serve_store() {
  const WorkerGroupOptions& workers = parts_.options.workers;
  // The agents of several nodes may have a store that takes no workers.
  if (!workers.serves_store || (!parts_.is_alone && !plan_.line))
    return nullptr;
  const std::string name =
      WorkerStoreService::name_for(plan_.round, plan_.master_port);
  try {
    auto store = std::make_unique<WorkerStoreService>(
        name, plan_.round, plan_.line, plan_.line_is_renewed);
    store_socket_ = name;
    return store;
  } catch (const std::system_error& error) {
    // The ranks of the other nodes would wait at the store that is refused.
    if (!parts_.is_alone || workers.worker_store == "agent") throw;
    parts_.report(std::string("the workers will meet at rank 0's store: ") +
                  error.what());
    return nullptr;
  }
}

int Attempt::take_lost_places() {
  generation_ = plan_.generation;
  if (plan_.lost_node.empty()) return generation_;
  const auto not_healed = [this](const std::string& why) {
    return NotHealed(why, generation_);
  };
  if (!store_) throw not_healed(kNoStore);
  const WorkerGroupOptions& workers = parts_.options.workers;
  const auto deadline = Deadline::after(kLostNodeAllowance);
  try {
    WorkerStoreLink link(store_socket_, deadline);
    places_ =
        announce_earlier(link, plan_.restarts_used, generation_, deadline);
    // The node may have been lost before, for the same reason.
    read_generations();
    GenerationNotice notice{.cause = plan_.lost_node, .places = places_};
    for (int at = 0; at < workers.nproc_per_node; ++at) {
      const int place = plan_.place.first_rank + at;
      notice.lost.push_back(place);
      if (!places_.empty() && !std::ranges::binary_search(places_, place)) {
        throw not_healed("a rank of the node was given up before");
      }
    }
    if (link.check({training_ended_key(plan_.restarts_used)}, deadline)) {
      throw not_healed(kHasEnded);
    }
    Announcement announcement(
        store_socket_, plan_.restarts_used, generation_ + 1,
        workers.max_restarts - plan_.restarts_used, std::move(notice));
    auto state = announcement.look();
    while (state == Announcement::State::asked && !deadline.expired()) {
      pollfd entry{announcement.fd(), POLLIN, 0};
      poll(&entry, 1, static_cast<int>(deadline.remaining().count()) + 1);
      state = announcement.look();
    }
    if (state == Announcement::State::made) {
      places_ = announcement.notice().places;
      return announcement.generation();
    }
    throw not_healed(state == Announcement::State::none_free
                         ? std::string(kNoneFree)
                         : no_answer_within(kLostNodeAllowance));
  } catch (const WorkerStoreLost& error) {
    throw not_healed(error.what());
  }
}

void Attempt::begin() {
  has_begun_ = true;
  if (parts_.board != nullptr) {
    for (int place = 0; place < parts_.board->places(); ++place) {
      parts_.board->clear(place);
    }
  }
  refill_at_ = Deadline::after(kRefillAnyway);
  workers_.let_leave();
  if (parts_.options.hang_timeout) begin_to_look_for_hangs();
}

void Attempt::begin_to_look_for_hangs() {
  hangs_.emplace(*parts_.options.hang_timeout, parts_.is_alone, parts_.board,
                 parts_.directory.attempt_directory(plan_.round));
}

bool Attempt::goes_on() const {
  if (stop_) return workers_.running() > 0 && !stop_->given_up;
  return workers_.running() > 0 || heal_ || workers_.all_given_up();
}

std::vector<WorkerStatus> Attempt::statuses() const {
  std::vector<WorkerStatus> all = workers_.statuses();
  for (WorkerStatus& worker : all) {
    worker.publishes = publishers_[static_cast<size_t>(worker.local_rank)] != 0;
  }
  return all;
}

bool Attempt::claim(int local_rank, pid_t asker) {
  const auto place = static_cast<size_t>(local_rank);
  if (place >= publishers_.size()) return false;
  pid_t& publisher = publishers_[place];
  if (publisher != 0 && publisher != asker && kill(publisher, 0) == 0) {
    return false;
  }
  publisher = asker;
  return true;
}

void Attempt::suspend(bool suspended) {
  suspended_ = suspended;
  if (stop_) return;
  workers_.signal_process_groups(suspended ? SIGSTOP : SIGCONT);
}

void Attempt::stop_by_signal(int signal) {
  workers_.settle();
  stop_.emplace(
      Stop{.signal = signal, .allowed = parts_.options.shutdown_timeout});
  workers_.signal_process_groups(signal);
  // Stopped workers (SIGSTOP) could not take the signal.
  workers_.signal_process_groups(SIGCONT);
}

void Attempt::stop_for_members() {
  workers_.settle();
  if (parts_.standby != nullptr) workers_.call_back();
  stop_.emplace(Stop{.allowed = parts_.options.shutdown_timeout});
  workers_.signal_process_groups(SIGTERM);
  workers_.signal_process_groups(SIGCONT);
}

void Attempt::stop_after_failure(bool calls_back) {
  workers_.settle();
  if (calls_back) workers_.call_back();
  const milliseconds allowed = parts_.options.failure_shutdown_timeout;
  if (workers_.spare_named()) {
    stop_.emplace(
        Stop{.allowed = 2 * allowed, .spared_until = Deadline::after(allowed)});
  } else {
    stop_.emplace(Stop{.allowed = allowed});
  }
  workers_.signal_process_groups(SIGTERM);
  workers_.signal_process_groups(SIGCONT);
}

void Attempt::kill_now() {
  if (!stop_) stop_.emplace();
  if (stop_->killed) return;
  stop_->at_once = true;
  stop_->kill_at = Deadline::after(milliseconds(0));
}

void Attempt::end_sparing() {
  if (!stop_ || !stop_->spared_until) return;
  stop_->spared_until.reset();
  workers_.end_spared();
}

Attempt::Healing Attempt::heal() {
  if (!store_) return cannot(kNoStore);
  const bool of_nodes =
      heal_ && heal_->announcement ? heal_->nodes > 0 : !lost_nodes_.empty();
  return of_nodes ? heal_lost_nodes() : heal_failures();
}

Attempt::Healing Attempt::heal_lost_nodes() {
  // The time for which a worker has waited to be replaced does not count.
  if (!heal_ || heal_->nodes == 0) {
    heal_.emplace(Heal{.until = Deadline::after(kHealAllowance)});
  }
  if (heal_->announcement) return await_answer();
  if (heal_->announce_at && !heal_->announce_at->expired()) return {};
  heal_->nodes = lost_nodes_.size();
  heal_->shrinks = true;
  std::string cause;
  std::vector<int> lost;
  for (const LostNode& node : lost_nodes_) {
    cause += (cause.empty() ? "" : "; ") + node.cause;
    lost.insert(lost.end(), node.places.begin(), node.places.end());
  }
  std::ranges::sort(lost);
  return announce(cause, std::move(lost));
}

Attempt::Healing Attempt::heal_failures() {
  if (auto why = workers_.why_not_healed()) return cannot(std::move(*why));
  const int places =
      parts_.standby != nullptr ? parts_.standby->processes() : 0;
  // Whether the others may go on without those that failed, and why not.
  const bool may_shrink = parts_.options.workers.shrinks;
  const auto why_whole = may_shrink ? workers_.why_not_without() : std::nullopt;
  const bool shrinks = may_shrink && !why_whole;
  const auto cannot_replace = [&](const std::string& why) {
    return cannot(why_whole ? why + ", and " + *why_whole : why);
  };
  if (places == 0 && !shrinks) {
    return cannot_replace("no standby process can come any more");
  }
  if (!heal_) {
    heal_.emplace(Heal{.until = Deadline::after(kHealAllowance),
                       .kill_hung_at = Deadline::after(
                           parts_.options.failure_shutdown_timeout)});
  }
  if (heal_->announcement) return await_answer();
  if (!heal_->is_late && !heal_->announce_at && heal_->until.expired()) {
    heal_->is_late = true;
    heal_->until = Deadline::after(kHealAllowance);
  }
  const bool late = heal_->is_late;
  if (heal_->announce_at && heal_->announce_at->expired()) {
    heal_->announce_at.reset();
  }
  Healing healing;
  std::vector<WorkerFailure> failures = workers_.failures();
  if (failures.size() < workers_.lost().size()) {
    if (late) return cannot("a rank that hangs does not end");
    if (heal_->kill_hung_at && heal_->kill_hung_at->expired()) {
      heal_->kill_hung_at.reset();
      workers_.kill_hung();
    }
    return healing;
  }
  heal_->kill_hung_at.reset();
  const auto waiting = static_cast<size_t>(
      parts_.standby != nullptr ? parts_.standby->waiting() : 0);
  auto count = std::min(failures.size(), static_cast<size_t>(places));
  if (late && waiting > 0) count = std::min(count, waiting);
  const bool none_waits = count == 0 || waiting < count;
  heal_->shrinks = shrinks && none_waits && (late || count == 0);
  if (!heal_->shrinks) failures.resize(count);
  for (const AlikeFailures& each : alike(failures)) {
    healing.cause += (healing.cause.empty() ? "" : "; ") + summary(each);
  }
  if (none_waits && !heal_->shrinks) {
    if (late) {
      return cannot_replace("no standby process has come within " +
                            seconds_text(kHealAllowance));
    }
    refill_at_.reset();
    parts_.standby->refill();
    healing.begins_to_wait = std::exchange(heal_->tells_of_wait, false);
    return healing;
  }
  if (heal_->announce_at) return healing;
  std::vector<int> lost;
  for (const WorkerFailure& failure : failures) {
    lost.push_back(workers_.place_of(static_cast<size_t>(failure.local_rank)));
  }
  std::ranges::sort(lost);
  heal_->nodes = 0;
  heal_->failures = std::move(failures);
  return announce(healing.cause, std::move(lost));
}

Attempt::Healing Attempt::announce(const std::string& cause,
                                   std::vector<int> lost) {
  heal_->announce_at.reset();
  GenerationNotice notice{
      .cause = cause, .places = places_, .lost = std::move(lost)};
  const auto given_up = heal_->shrinks ? notice.lost : std::vector<int>();
  if (heal_->shrinks && places_.empty()) {
    notice.places.resize(static_cast<size_t>(plan_.place.world_size));
    std::iota(notice.places.begin(), notice.places.end(), 0);
  }
  try {
    heal_->announcement.emplace(
        store_socket_, plan_.restarts_used, generation_ + 1,
        parts_.options.workers.max_restarts - plan_.restarts_used,
        std::move(notice), given_up);
  } catch (const WorkerStoreLost& error) {
    return announce_again(error);
  }
  heal_->answer_until = Deadline::after(kAnnounceAllowance);
  return await_answer();
}

Attempt::Healing Attempt::await_answer() {
  try {
    switch (heal_->announcement->look()) {
      case Announcement::State::none_free:
        return cannot(kNoneFree);
      case Announcement::State::none_left:
        return cannot(kNoneLeft);
      case Announcement::State::has_ended:
        return cannot(kHasEnded);
      case Announcement::State::made:
        return begin_generation();
      case Announcement::State::asked:
        if (!heal_->answer_until->expired()) return {};
        throw WorkerStoreLost(no_answer_within(kAnnounceAllowance));
    }
  } catch (const WorkerStoreLost& error) {
    return announce_again(error);
  }
  return {};
}

Attempt::Healing Attempt::announce_again(const WorkerStoreLost& error) {
  if (heal_->until.expired()) return cannot(error.what());
  heal_->announcement.reset();
  heal_->answer_until.reset();
  heal_->announce_at = Deadline::after(kAnnouncePause);
  return {};
}

int Attempt::look_for_generations() {
  if (store_) read_generations();
  return generation();
}

void Attempt::read_generations() {
  try {
    const Deadline deadline = Deadline::after(kAnnounceAllowance);
    WorkerStoreLink link(store_socket_, deadline);
    while (true) {
      const auto key = generation_key(plan_.restarts_used, generation_ + 1);
      if (!link.check({key}, deadline)) break;
      const auto reply = link.call(
          {.operation = WorkerCall::Operation::get, .key = key}, deadline);
      ++generation_;
      places_ = generation_notice_of(reply.text).places;
    }
  } catch (const WorkerStoreLost&) {
    // Then those count that this node knows.
  }
}

Attempt::Healing Attempt::begin_generation() {
  const Announcement& made = *heal_->announcement;
  Healing healing{.cause = made.notice().cause,
                  .is_announced = true,
                  .shrinks = heal_->shrinks};
  generation_ = made.generation();
  places_ = made.notice().places;
  workers_.keep_places(places_);
  lost_nodes_.erase(lost_nodes_.begin(),
                    lost_nodes_.begin() + static_cast<int64_t>(heal_->nodes));
  for (const WorkerFailure& failure : heal_->failures) {
    const auto place = static_cast<size_t>(failure.local_rank);
    publishers_[place] = 0;
    if (parts_.board != nullptr) parts_.board->clear(failure.local_rank);
    // If the process that takes the place has just died, another one joins the
    // next generation.
    if (heal_->shrinks) {
      healing.healed.push_back({generation_, failure});
    } else if (const auto pid =
                   workers_.replace(failure.local_rank, generation_)) {
      healing.healed.push_back({generation_, failure, *pid});
    }
  }
  heal_.reset();
  if (has_lost_ranks()) {  // the others wait for the next generation
    heal_.emplace(Heal{.until = Deadline::after(kHealAllowance),
                       .kill_hung_at = Deadline::after(
                           parts_.options.failure_shutdown_timeout),
                       .announce_at = Deadline::after(milliseconds(0)),
                       .tells_of_wait = false});
  }
  if (suspended_) suspend(true);
  // Those that waited for the new process count from now on.
  if (hangs_) begin_to_look_for_hangs();
  // The ranks that heal need the cores.
  refill_at_ = Deadline::after(kRefillAnyway);
  awaits_joins_ = true;
  return healing;
}

void Attempt::watch() {
  if (stop_) return;
  tell_of_ended_training();
  if (workers_.running() == 0) return;
  refill_standby();
  look_for_hangs();
}

void Attempt::tell_of_ended_training() {
  if (!parts_.options.workers.heals || !store_ || ended_training_ ||
      !workers_.any_left_training()) {
    return;
  }
  ended_training_ = connect_to(store_socket_, SocketKind::stream);
  if (!ended_training_) return;
  const std::string call = with_length(
      bytes_of(WorkerCall{.operation = WorkerCall::Operation::set,
                          .key = training_ended_key(plan_.restarts_used),
                          .value = "1"}));
  // The buffer of a new socket takes the call, and its answer is not needed.
  [[maybe_unused]] const auto ignored =
      ::send(ended_training_.get(), call.data(), call.size(),
             MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Attempt::look_for_hangs() {
  if (!hangs_ || suspended_ || heal_) return;
  auto hung = hangs_->look(workers_.statuses());
  if (!hung.empty()) workers_.end_hung(std::move(hung));
  if (hangs_->watches_nobody() && plan_.round == 0) {
    parts_.report(
        "no worker has told of progress for " +
        seconds_text(*parts_.options.hang_timeout) +
        ", so --hang-timeout watches none yet; a program of Lockstep tells "
        "from init_process_group() on, any other touches the file that "
        "LOCKSTEP_PROGRESS_FILE names");
  }
}

void Attempt::refill_standby() {
  if (parts_.standby == nullptr) return;
  if (!all_publish_ && std::ranges::find(publishers_, 0) == publishers_.end()) {
    all_publish_ = true;
    refill_at_ = Deadline::after(kRefillDelay);
  }
  if (awaits_joins_ && !workers_.any_joins()) {
    awaits_joins_ = false;
    refill_at_ = Deadline::after(kRefillDelay);
  }
  if (refill_at_ && !refill_at_->expired()) return;
  refill_at_.reset();
  parts_.standby->refill();
}

void Attempt::enforce_deadline() {
  if (!stop_) return;
  if (stop_->spared_until && stop_->spared_until->expired()) end_sparing();
  if (!stop_->kill_at.expired() || workers_.running() == 0) return;
  if (stop_->killed) {
    stop_->given_up = true;
    return;
  }
  stop_->killed = true;
  if (!stop_->at_once) {
    parts_.report(workers_.name_running() + " did not end within " +
                  seconds_text(stop_->allowed) + " of " +
                  signal_name(stop_->signal != 0 ? stop_->signal : SIGTERM) +
                  ": SIGKILL");
  }
  stop_->kill_at = Deadline::after(kKillAllowance);
  workers_.kill_workers();
}

void Attempt::add_poll_entries(std::vector<pollfd>& entries) const {
  workers_.add_poll_entries(entries);
  if (!stop_ && heal_ && heal_->announcement) {
    entries.push_back({heal_->announcement->fd(), POLLIN, 0});
  }
}

std::optional<Deadline> Attempt::due() const {
  if (!has_begun_ || !goes_on()) return std::nullopt;
  if (stop_) return earliest({stop_->kill_at, stop_->spared_until});
  // All were given up: watch() has nothing to do.
  if (workers_.running() == 0 && !heal_ && lost_nodes_.empty()) {
    return std::nullopt;
  }
  std::optional<Deadline> first;
  if (heal_ && heal_->announcement) {
    first = heal_->answer_until;
  } else if (!lost_nodes_.empty() && !(heal_ && heal_->announce_at)) {
    first = Deadline::after(milliseconds(0));
  } else if (heal_) {
    first = heal_->announce_at ? heal_->announce_at
                               : earliest({heal_->until, heal_->kill_hung_at});
  } else if (hangs_ && !suspended_) {
    first = Deadline::after(hangs_->most_wait());
  }
  if (parts_.standby == nullptr) return first;
  return earliest(
      {first, refill_at_ ? refill_at_ : parts_.standby->next_start()});
}

void Attempt::handle_poll_entries(std::span<const pollfd> entries) {
  workers_.handle_poll_entries(entries);
}

}  // namespace lockstep::internal
