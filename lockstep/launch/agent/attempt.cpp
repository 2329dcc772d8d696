#include "lockstep/launch/agent/attempt.h"

#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// How long a worker may outlive SIGKILL (uninterruptible in the kernel) before
// it is given up.
constexpr milliseconds kKillAllowance{5000};
// When standby processes are started: so long after all workers have begun to
// publish, which they do at the end of init_process_group(); or, if they do
// not, so long after their start.
constexpr milliseconds kRefillDelay{1000};
constexpr milliseconds kRefillAnyway{10'000};

}  // namespace

Attempt::Attempt(const AgentParts& parts, const RoundPlan& plan,
                 std::optional<StorePort> port)
    : parts_(parts),
      plan_(plan),
      earlier_streams_(parts.mux.streams()),
      port_(std::move(port)),
      store_(serve_store()),
      workers_(parts.options.workers, plan, port_ ? port_->fd() : -1,
               store_socket_, parts.directory, parts.surroundings, parts.mux,
               parts.standby),
      publishers_(workers_.size(), 0) {}

std::unique_ptr<WorkerStoreService> Attempt::serve_store() {
  const WorkerGroupOptions& workers = parts_.options.workers;
  // The agents of several nodes may have a store that takes no workers.
  if (!workers.serves_store || (!parts_.is_alone && !plan_.line))
    return nullptr;
  const std::string name =
      WorkerStoreService::name_for(plan_.round, plan_.master_port);
  try {
    auto store =
        std::make_unique<WorkerStoreService>(name, plan_.round, plan_.line);
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

void Attempt::begin() {
  has_begun_ = true;
  if (parts_.board != nullptr) {
    for (int place = 0; place < parts_.board->places(); ++place) {
      parts_.board->clear(place);
    }
  }
  refill_at_ = Deadline::after(kRefillAnyway);
  workers_.let_leave();
  if (parts_.options.hang_timeout) {
    hangs_.emplace(*parts_.options.hang_timeout, parts_.is_alone, parts_.board,
                   parts_.directory.attempt_directory(plan_.round));
  }
}

bool Attempt::goes_on() const {
  return workers_.running() > 0 && !(stop_ && stop_->given_up);
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

void Attempt::watch() {
  if (stop_ || workers_.running() == 0) return;
  refill_standby();
  look_for_hangs();
}

void Attempt::look_for_hangs() {
  if (!hangs_ || suspended_) return;
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
}

std::optional<Deadline> Attempt::due() const {
  if (!has_begun_ || !goes_on()) return std::nullopt;
  if (stop_) return earliest({stop_->kill_at, stop_->spared_until});
  std::optional<Deadline> first;
  if (hangs_ && !suspended_) first = Deadline::after(hangs_->most_wait());
  if (parts_.standby == nullptr) return first;
  return earliest(
      {first, refill_at_ ? refill_at_ : parts_.standby->next_start()});
}

void Attempt::handle_poll_entries(std::span<const pollfd> entries) {
  workers_.handle_poll_entries(entries);
}

}  // namespace lockstep::internal
