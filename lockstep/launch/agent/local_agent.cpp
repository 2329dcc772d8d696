#include "lockstep/launch/agent/local_agent.h"

#include <sys/signalfd.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>

#include "lockstep/base/seconds_text.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/base/steady_ns.h"
#include "lockstep/launch/agent/metrics_text.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/descendants.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/launch/process/wait_status.h"
#include "lockstep/launch/watch/crash_report.h"
#include "lockstep/launch/watch/source_finder.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

// How long a worker may outlive SIGKILL (uninterruptible in the kernel) before
// it is given up.
constexpr milliseconds kKillAllowance{5000};
// How often the job's connection is checked.
constexpr milliseconds kJobInterval{1000};
// How long a node that a signal ends waits for the verdict of all nodes.
constexpr milliseconds kVerdictAllowance{3000};
// How long the console may take nothing once all workers have ended; and how
// long after a signal, whose sender waits for the launcher.
constexpr milliseconds kConsoleIdle{60'000};
constexpr milliseconds kSignalledConsoleIdle{2000};
// How long an echo of a failure waits for its cause to become known; and how
// long a worker that is the cause may take to end by itself, so that its exit
// code is known, once another node asks.
constexpr milliseconds kCauseAllowance{2000};
constexpr milliseconds kCauseEnds{500};
// How often to look whether a worker has written a snapshot, while nodes wait
// for one.
constexpr milliseconds kSnapshotLook{500};
// When standby processes are started: so long after all workers have begun to
// publish, which they do at the end of init_process_group(); or, if they do
// not, so long after their start.
constexpr milliseconds kRefillDelay{1000};
constexpr milliseconds kRefillAnyway{10'000};
// For how long a question about the job may have the ranks publish.
constexpr milliseconds kLongestWatch{60'000};

std::string count_workers(size_t count) {
  return std::to_string(count) + (count == 1 ? " worker" : " workers");
}

FileDescriptor open_child_events() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  FileDescriptor fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw_errno("signalfd of SIGCHLD");
  return fd;
}

int exit_code_for(const std::exception& error) {
  const auto* refused = dynamic_cast<const ProgramError*>(&error);
  return refused != nullptr ? refused->exit_code() : 1;
}

Verdict give_up(int exit_code, const std::string& text) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::given_up;
  verdict.exit_code = exit_code;
  verdict.text = text;
  return verdict;
}

// Returns the first of the names, separated by commas, and how many follow.
std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMostEndedNames = 8;
  std::string text;
  for (size_t at = 0; at < std::min(kMostEndedNames, names.size()); ++at) {
    text += (at == 0 ? "" : ", ") + names[at];
  }
  if (names.size() <= kMostEndedNames) return text;
  return text + " and " + std::to_string(names.size() - kMostEndedNames) +
         " more";
}

void discard_events(int fd) {
  signalfd_siginfo info{};
  while (read(fd, &info, sizeof(info)) > 0) {
  }
}

}  // namespace

LocalAgent::LocalAgent(LocalAgentOptions options, const RunDirectory& directory,
                       std::optional<StorePort> first_port, GuardianLink link,
                       Report report, std::unique_ptr<JobMember> job)
    : options_(std::move(options)),
      directory_(directory),
      port_(std::move(first_port)),
      link_(std::move(link)),
      report_([this, report](const std::string& text) {
        mux_.end_open_line();
        report(text);
        if (board_) board_->add_event(text.substr(0, text.find('\n')));
      }),
      child_events_(open_child_events()),
      mux_([this](const std::string& text) { report_(text); }),
      job_(std::move(job)),
      started_ns_(steady_ns()) {
  adopt_orphans();
  open_socket();
  options_.workers.tells_progress = options_.hang_timeout.has_value();
}

int LocalAgent::run(JobReport& outcome) {
  outcome_ = &outcome;
  try {
    const int exit_code = run_rounds();
    end_standby();
    await_departure();
    publish_end();
    return exit_code;
  } catch (const std::exception& error) {
    end_standby();
    if (board_) board_->add_event(error.what(), /*ends=*/true);
    Verdict verdict =
        give_up(exit_code_for(error), node_name() + ": " + error.what());
    if (may_leave() && round_ > 0) {
      // The others have shown that they can do without it.
      verdict.kind = Verdict::Kind::node_lost;
      verdict.node_rank = node_rank();
      if (plan_) job_->propose(round_, verdict);
    } else {
      end_job(verdict);
    }
    throw;
  }
}

void LocalAgent::publish_end() {
  if (!board_) return;
  board_->add_event(
      outcome_->cause.empty() ? "the job has ended well" : outcome_->cause,
      /*ends=*/true);
}

// If this node hosts the store, the others learn from it how the job ended.
void LocalAgent::await_departure() {
  if (!job_ || !joined_ || !joined_->hosts_store || !verdict_ || ending() ||
      !verdict_->ends_job(limits())) {
    return;
  }
  departing_ = true;
  while (!job_->departed() && !ending()) {
    wait_for_event();
    serve_guardian();
    while (const auto event = job_->take_event()) {
      if (const auto* news = std::get_if<Notice>(&*event)) report_(news->text);
    }
  }
  job_->leave_at_once();
}

int LocalAgent::run_rounds() {
  for (round_ = 0;; ++round_) {
    stop_ = {};
    failures_.clear();
    propose_at_.reset();
    look_for_causes_at_.reset();
    waits_since_ns_.reset();
    verdict_.reset();
    if (const auto plan = form_round()) run_workers(*plan);
    // Closes this port before the next attempt opens one, which may have to be
    // the same.
    port_.reset();
    if (const auto exit_code = end_round()) return *exit_code;
  }
}

std::optional<RoundPlan> LocalAgent::form_round() {
  if (job_) return await_plan();
  if (next_) return next_->plan;
  if (!port_) {
    port_ = StorePort::hold(options_.store_addr, options_.master_port);
  }
  return plan_alone(round_, changes_.restarts, *port_);
}

RoundPlan LocalAgent::plan_alone(int round, int restarts_used,
                                 const StorePort& port) const {
  RoundPlan plan;
  plan.round = round;
  plan.restarts_used = restarts_used;
  plan.place = NodePlace::alone(options_.workers.nproc_per_node);
  plan.master_addr = options_.master_addr;
  plan.master_port = port.port();
  return plan;
}

std::optional<RoundPlan> LocalAgent::await_plan() {
  plan_.reset();
  if (joined_) offer_round();
  while (!plan_ && !verdict_ && !ending()) {
    wait_for_event();
    serve_guardian();
    serve_job();
  }
  if (ending()) await_verdict();
  // Only the node of rank 0 needs the port that it has offered.
  if (plan_ && plan_->place.node_rank != 0) port_.reset();
  return verdict_ || ending() ? std::nullopt : plan_;
}

void LocalAgent::start_workers(Attempt& attempt) {
  attempt.store = serve_store(attempt.plan);
  attempt.earlier_streams = mux_.streams();
  attempt.group.emplace(
      options_.workers, attempt.plan, attempt.port ? attempt.port->fd() : -1,
      directory_, link_.surroundings, mux_, standby_ ? &*standby_ : nullptr);
}

bool LocalAgent::has_restarts() const {
  return changes_.restarts < options_.workers.max_restarts;
}

void LocalAgent::prepare_next() {
  const OutputOptions& output = options_.workers.output;
  if (!standby_ || job_ || next_ || !has_restarts() ||
      standby_->waiting() < options_.workers.nproc_per_node ||
      // One port, or one file of filtered lines, is for one attempt at a time.
      options_.master_port != 0 || !output.stdout_filters.empty() ||
      !output.stderr_filters.empty()) {
    return;
  }
  next_.emplace();
  try {
    next_->port = StorePort::hold(options_.store_addr, 0);
    next_->plan = plan_alone(round_ + 1, changes_.restarts + 1, *next_->port);
    start_workers(*next_);
  } catch (const std::exception&) {
    // The next attempt tries it again, and says why it cannot be started.
    next_.reset();
  }
}

void LocalAgent::run_workers(const RoundPlan& plan) {
  place_ = plan.place;
  if (board_) {
    for (int place = 0; place < board_->places(); ++place) board_->clear(place);
  }
  publishers_.assign(static_cast<size_t>(options_.workers.nproc_per_node), 0);
  all_publish_ = false;
  refill_at_ = Deadline::after(kRefillAnyway);
  open_standby();
  if (!next_) {
    next_.emplace(Attempt{.plan = plan, .port = std::move(port_)});
    try {
      start_workers(*next_);
    } catch (...) {
      next_.reset();
      standby_.reset();  // before its processes are reaped
      end_descendants(milliseconds(0), [](pid_t, int) {});
      throw;
    }
  }
  port_ = std::move(next_->port);
  worker_store_ = std::move(next_->store);
  group_.emplace(std::move(*next_->group));
  next_.reset();
  group_->let_leave();
  if (suspended_) suspend_workers(true);
  if (options_.hang_timeout) {
    hangs_.emplace(*options_.hang_timeout, /*alone=*/!job_,
                   board_ ? &*board_ : nullptr,
                   directory_.attempt_directory(plan.round));
  }
  while (group_->running() > 0 && !stop_.given_up) {
    // First: a worker may have ended in the group before it was this one.
    reap_children([&](pid_t pid, int status) { set_ended(pid, status); });
    refill_standby();
    look_for_causes();
    look_for_hangs();
    look_for_snapshot();
    if (group_->failed() && !stop_.kill_at) {
      failures_ = group_->failures();
      if (job_) {
        if (only_echoes()) job_->ask_for_cause(group_->named_ranks());
        propose_at_ =
            Deadline::after(may_be_echo() ? kCauseAllowance : milliseconds(0));
      }
      stop_after_failure();
    }
    propose_failure();
    serve_guardian();
    serve_job();
    enforce_deadline();
    if (group_->running() > 0) wait_for_event();
  }
  end_leftovers();
  // A failure that a forwarded signal caused does not count as one.
  failures_.clear();
  if (stop_.signal == 0 && group_->failed()) failures_ = group_->failures();
  set_verdict_of_workers();
  hangs_.reset();
  group_.reset();
  worker_store_.reset();
  if (plan_) plan_->line.reset();
}

std::unique_ptr<WorkerStoreService> LocalAgent::serve_store(
    const RoundPlan& plan) {
  options_.workers.store_socket.clear();
  // The agents of several nodes may have a store that takes no workers.
  if (!options_.workers.serves_store || (job_ && !plan.line)) return nullptr;
  const std::string name =
      WorkerStoreService::name_for(plan.round, plan.master_port);
  try {
    auto store =
        std::make_unique<WorkerStoreService>(name, plan.round, plan.line);
    options_.workers.store_socket = name;
    return store;
  } catch (const std::system_error& error) {
    // The ranks of the other nodes would wait at the store that is refused.
    if (job_ || options_.workers.worker_store == "agent") throw;
    report_(std::string("the workers will meet at rank 0's store: ") +
            error.what());
    return nullptr;
  }
}

void LocalAgent::look_for_hangs() {
  if (!hangs_ || stop_.kill_at || suspended_) return;
  auto hung = hangs_->look(group_->statuses());
  if (!hung.empty()) group_->end_hung(std::move(hung));
  if (hangs_->watches_nobody() && round_ == 0) {
    report_("no worker has told of progress for " +
            seconds_text(*options_.hang_timeout) +
            ", so --hang-timeout watches none yet; a program of Lockstep tells "
            "from init_process_group() on, any other touches the file that "
            "LOCKSTEP_PROGRESS_FILE names");
  }
}

void LocalAgent::look_for_snapshot() {
  if (!waits_since_ns_ || !board_ || !look_for_snapshot_at_.expired()) return;
  look_for_snapshot_at_ = Deadline::after(kSnapshotLook);
  board_->watch(2 * kSnapshotLook);
  for (int place = 0; place < board_->places(); ++place) {
    const auto told = board_->read(place);
    if (!told || told->last_snapshot_ns <= *waits_since_ns_) continue;
    job_->report_snapshot();
    waits_since_ns_.reset();
    return;
  }
}

void LocalAgent::set_verdict_of_workers() {
  if (!job_) {
    verdict_ = failures_.empty() ? Verdict{} : failed_verdict(failures_);
    verdict_->changes = verdict_->after(changes_);
    return;
  }
  if (!stop_.kill_at) job_->report_success();
  await_verdict();
}

void LocalAgent::await_verdict() {
  // The job goes on without this node, which took no part in the round.
  if (leaves_ && !plan_) return;
  std::optional<Deadline> deadline;
  // The other nodes may still fail, and then all start again. This waits after
  // a signal too, since another verdict may have come before the signal's.
  while (!verdict_ && !guardian_gone_) {
    if (ending_signal_ != 0) {
      if (!deadline) deadline = Deadline::after(kVerdictAllowance);
      // A node that has not joined has no say in the verdict.
      if (!joined_ || deadline->expired()) return;
    }
    // A worker that has ended well may have left while others needed it.
    look_for_causes();
    if (failures_.empty() && group_ && group_->failed() && !stop_.kill_at) {
      failures_ = group_->failures();
      propose_at_ = Deadline::after(milliseconds(0));
    }
    propose_failure();
    wait_for_event();
    serve_guardian();
    serve_job();
  }
}

void LocalAgent::look_for_causes() {
  if (!look_for_causes_at_ || !look_for_causes_at_->expired() || !group_) {
    return;
  }
  look_for_causes_at_.reset();
  group_->look_for_causes(named_);
}

void LocalAgent::propose_failure() {
  if (!propose_at_) return;
  if (running() > 0) failures_ = group_->failures();
  if (may_be_echo() && !propose_at_->expired()) return;
  propose_at_.reset();
  if (!failures_.empty()) job_->propose(round_, failed_verdict(failures_));
}

bool LocalAgent::only_echoes() const {
  return failures_.empty() || failures_.front().error.kind == FailureKind::echo;
}

// If nodes may come and go, the loss of one uses no restart. Its peers may fail
// of it before it is noticed, and not every program says that this was why.
bool LocalAgent::may_be_echo() const {
  return only_echoes() || (job_->elastic() && failures_.front().error.kind ==
                                                  FailureKind::unknown);
}

std::string LocalAgent::describe_failure() {
  const int max_restarts = options_.workers.max_restarts;
  const bool is_own = verdict_->node_rank == node_rank();
  if (job_ && !failures_.empty() && is_own) {
    failures_.front().node = node_name();
  }
  SourceFinder sources;
  for (auto& failure : failures_) failure.stack = sources.texts(failure.stack);
  FailedAttempt attempt{.directory = directory_.attempt_directory(round_),
                        .run_id = options_.workers.run_id,
                        .host = options_.host_name,
                        .program = options_.workers.program.arguments,
                        .restarts_used = changes_.restarts,
                        .max_restarts = max_restarts,
                        .cause = verdict_->text,
                        .failures = failures_};
  attempt.read_files();
  std::string text = verdict_->text;
  if (!failures_.empty() && is_own) {
    text = describe(attempt.failures, changes_.restarts, max_restarts);
    attempt.crash_report = write_crash_report(attempt);
    if (!attempt.crash_report.empty()) {
      text += "\n  report: " + attempt.crash_report.string();
    }
    if (!attempt.stacks.empty()) {
      text += "\n  where all threads were: " + attempt.stacks.string();
    }
    if (!attempt.flight_records.empty()) {
      text += "\n  what the ranks did last: lockstep inspect flight " +
              shell_word(attempt.directory.string()) + "/*.json";
    }
  }
  outcome_->failed_attempts.push_back(std::move(attempt));
  return text;
}

std::optional<int> LocalAgent::end_round() {
  outcome_->run_id = options_.workers.run_id;
  outcome_->restarts_used = changes_.restarts;
  outcome_->membership_changes = changes_.membership_changes;
  if (place_) {
    outcome_->node_rank = place_->node_rank;
    outcome_->nnodes = place_->nnodes;
    outcome_->world_size = place_->world_size;
  }
  if (guardian_gone_) {
    outcome_->cause = "the launcher was killed";
    return 128 + SIGKILL;
  }
  const bool ended = verdict_ && verdict_->ends_job(limits());
  const bool last = ending_signal_ != 0 || ended;
  const bool failed = verdict_ && verdict_->kind == Verdict::Kind::failed;
  // An elastic node may have waited while the others ran.
  const bool took_part = !job_ || !job_->elastic() || plan_;
  std::string text;
  if (failed && took_part) {
    text = describe_failure();
  } else if (verdict_ && verdict_->kind != Verdict::Kind::signalled &&
             !leaves_) {
    text = verdict_->text;
  }
  if (!took_part && verdict_ && verdict_->kind == Verdict::Kind::succeeded) {
    text = "the job has ended well without this node";
  }
  const bool changes = verdict_ && verdict_->changes_membership();
  // A move between two rounds counts as nothing: the workers have been ended.
  if (!last && (failed || changes) && verdict_->changes != changes_) {
    text += "\n  " + describe_restart();
  } else if (ended && changes) {
    text += "; membership changes used: " +
            std::to_string(changes_.membership_changes) + " of " +
            std::to_string(limits().membership_changes.value_or(0)) +
            " (--max-membership-changes)";
  }
  if (!text.empty()) report_(text);
  if (leaves_ && (!ended || changes)) {
    outcome_->signal = ending_signal_;
    outcome_->cause = signal_name(ending_signal_) + " made this node leave";
    return 128 + ending_signal_;
  }
  // If there is one node, no other has to agree: the signal ended the job.
  if (ended && (job_ || ending_signal_ == 0)) {
    outcome_->cause = verdict_->text;
    outcome_->signal = verdict_->signal;
    return verdict_->exit_code;
  }
  if (ending_signal_ != 0) {
    outcome_->signal = ending_signal_;
    outcome_->cause = signal_name(ending_signal_) + " ended the job";
    return 128 + ending_signal_;
  }
  if (verdict_) changes_ = verdict_->changes;
  // Another `Joined` comes once this node has joined at the other store.
  if (verdict_ && verdict_->moves) joined_.reset();
  return std::nullopt;
}

// Returns the launcher's line about what follows a round that does not end the
// job.
std::string LocalAgent::describe_restart() const {
  const ChangeLimits most = limits();
  const ChangeCount& used = verdict_->changes;
  std::string standby;
  const int kept = standby_ ? standby_->kept() : 0;
  const int others = next_ ? next_->group->stood_by()
                           : std::min(standby_ ? standby_->waiting() : 0,
                                      options_.workers.nproc_per_node - kept);
  if (kept > 0) {
    standby = ", with " + std::to_string(kept) +
              " kept in init_process_group() on this node";
  }
  if (others > 0) {
    standby += (kept > 0 ? " and " : ", with ") + std::to_string(others) +
               " from standby" + (kept > 0 ? "" : " on this node");
  }
  if (verdict_->changes_membership()) {
    return "starting all workers again: membership change " +
           std::to_string(used.membership_changes) +
           (most.membership_changes
                ? " of " + std::to_string(*most.membership_changes)
                : "") +
           standby;
  }
  const std::string all = job_ && job_->elastic()
                              ? "workers"
                              : count_workers(static_cast<size_t>(
                                    plan_ ? plan_->place.world_size
                                          : options_.workers.nproc_per_node));
  return "restarting all " + all + ": restart " +
         std::to_string(used.restarts) + " of " +
         std::to_string(most.restarts) + standby;
}

ChangeLimits LocalAgent::limits() const {
  return job_ ? job_->limits()
              : ChangeLimits{.restarts = options_.workers.max_restarts};
}

void LocalAgent::wait_for_event() {
  entries_.clear();
  entries_.push_back({child_events_.get(), POLLIN, 0});
  if (!guardian_gone_) {
    entries_.push_back({link_.commands.get(), POLLIN, 0});
  }
  // After this round's verdict, events belong to the next round.
  const bool hears_job = job_ && (!verdict_ || departing_);
  if (hears_job) entries_.push_back({job_->event_fd(), POLLIN, 0});
  mux_.add_poll_entries(entries_);
  if (socket_) socket_->add_poll_entries(entries_);
  if (standby_) standby_->add_poll_entries(entries_);
  if (group_) group_->add_poll_entries(entries_);
  if (next_) next_->group->add_poll_entries(entries_);
  if (metrics_) metrics_->add_poll_entries(entries_);
  milliseconds timeout = hears_job ? kJobInterval : milliseconds(-1);
  const auto shorten_to = [&](const Deadline& deadline) {
    const milliseconds left = deadline.remaining();
    timeout = timeout < milliseconds(0) ? left : std::min(timeout, left);
  };
  if (stop_.kill_at && running() > 0) shorten_to(*stop_.kill_at);
  if (stop_.spared_until && running() > 0) shorten_to(*stop_.spared_until);
  if (propose_at_) shorten_to(*propose_at_);
  if (look_for_causes_at_ && group_) shorten_to(*look_for_causes_at_);
  if (const auto part = mux_.due()) shorten_to(*part);
  if (hangs_ && running() > 0 && !stop_.kill_at && !suspended_) {
    shorten_to(Deadline::after(hangs_->most_wait()));
  }
  if (waits_since_ns_ && board_ && running() > 0) {
    shorten_to(look_for_snapshot_at_);
  }
  if (metrics_ && metrics_->most_wait() != milliseconds::max()) {
    shorten_to(Deadline::after(metrics_->most_wait()));
  }
  if (const auto wait = socket_ ? socket_->most_wait() : std::nullopt) {
    shorten_to(Deadline::after(*wait));
  }
  if (standby_ && running() > 0 && !stop_.kill_at) {
    if (refill_at_) {
      shorten_to(*refill_at_);
    } else if (const auto wait = standby_->most_wait()) {
      shorten_to(Deadline::after(*wait));
    }
  }
  const int ready =
      poll(entries_.data(), entries_.size(), static_cast<int>(timeout.count()));
  if (ready < 0) return;
  discard_events(child_events_.get());
  mux_.handle_poll_entries(entries_);
  if (socket_) {
    socket_->handle_poll_entries(
        entries_, [this](const std::string& question, pid_t asker) {
          return answer(question, asker);
        });
  }
  if (standby_) {
    standby_->handle_poll_entries(entries_);
    if (group_) group_->handle_poll_entries(entries_, *standby_);
    if (next_) next_->group->handle_poll_entries(entries_, *standby_);
  }
  if (metrics_) {
    metrics_->handle_poll_entries(entries_, [this] { return metrics(); });
  }
}

std::string LocalAgent::metrics() {
  if (!board_) return {};
  // So that there is something to tell the next time.
  board_->watch(kLongestWatch);
  return metrics_text(status(), *board_);
}

void LocalAgent::open_socket() {
  try {
    board_.emplace(StatusBoard::create(options_.workers.nproc_per_node));
    socket_.emplace(options_.workers.run_id);
    options_.workers.agent_socket = socket_->name();
  } catch (const std::system_error& error) {
    report_(std::string("nobody will be able to look at this job: ") +
            error.what());
  }
}

AgentSocket::Answer LocalAgent::answer(const std::string& question,
                                       pid_t asker) {
  const auto refuse = [](const char* why) {
    return AgentSocket::Answer{std::string("{\"refused\": \"") + why + "\"}"};
  };
  const json asked = json::parse(question, nullptr, /*exceptions=*/false);
  if (!asked.is_object() || !asked.contains("question") ||
      !asked["question"].is_string() || !board_) {
    return refuse("not a question");
  }
  const std::string& kind = asked["question"].get_ref<const std::string&>();
  const auto number = [&](const char* key) {
    const auto at = asked.find(key);
    return at != asked.end() && at->is_number_integer() ? at->get<int64_t>()
                                                        : int64_t{-1};
  };
  if (kind == "attach") {
    const int64_t local_rank = number("local_rank");
    if (local_rank < 0 || local_rank >= board_->places() ||
        !claim(static_cast<int>(local_rank), asker)) {
      return refuse("another process publishes for this worker");
    }
    return {directory_.attempt_directory(round_).string(),
            board_->descriptor()};
  }
  if (kind == "watch") {
    const int64_t how_long = number("milliseconds");
    if (how_long < 0) return refuse("no time is given");
    board_->watch(std::min(milliseconds(how_long), kLongestWatch));
    return {to_json(status()), board_->descriptor()};
  }
  if (kind == "stacks") return {std::to_string(board_->ask_stacks())};
  if (kind == "profile") {
    const int64_t how_long = number("milliseconds");
    if (how_long < 1) return refuse("no time is given");
    return {std::to_string(
        board_->ask_profile(milliseconds(how_long), number("first_step")))};
  }
  if (kind == "stop_profile") {
    const int64_t which = number("number");
    if (which < 1) return refuse("no profile is named");
    board_->stop_profile(which);
    return {std::to_string(which)};
  }
  return refuse("not a question");
}

bool LocalAgent::claim(int local_rank, pid_t asker) {
  const auto place = static_cast<size_t>(local_rank);
  if (!group_ || place >= publishers_.size()) return false;
  pid_t& publisher = publishers_[place];
  if (publisher != 0 && publisher != asker && kill(publisher, 0) == 0) {
    return false;
  }
  publisher = asker;
  return true;
}

JobStatus LocalAgent::status() const {
  JobStatus all;
  all.run_id = options_.workers.run_id;
  all.program = options_.workers.program.arguments;
  all.agent_pid = getpid();
  all.host = options_.host_name;
  all.started_ns = started_ns_;
  all.restart = changes_.restarts;
  all.max_restarts = options_.workers.max_restarts;
  all.attempt_directory = directory_.attempt_directory(round_);
  all.standby = standby_ ? standby_->waiting() : 0;
  all.state = !group_          ? JobStatus::State::waiting
              : running() == 0 ? JobStatus::State::ended
              : stop_.kill_at  ? JobStatus::State::stopping
                               : JobStatus::State::running;
  if (place_) {
    all.node_rank = place_->node_rank;
    all.nnodes = place_->nnodes;
    all.world_size = place_->world_size;
  }
  if (group_) all.workers = group_->statuses();
  for (WorkerStatus& worker : all.workers) {
    worker.publishes = publishers_[static_cast<size_t>(worker.local_rank)] != 0;
  }
  return all;
}

void LocalAgent::serve_guardian() {
  while (!guardian_gone_) {
    char signal = 0;
    const ssize_t count = read(link_.commands.get(), &signal, 1);
    if (count == 1) {
      forward(signal);
    } else if (count == 0) {
      // The launcher was killed: the workers get no time to end.
      guardian_gone_ = true;
      propose_lost_launcher();
      kill_now();
    } else if (errno != EINTR) {
      return;  // nothing more to read
    }
  }
}

void LocalAgent::serve_job() {
  if (!job_) return;
  job_->shut_if_silent();
  while (!verdict_) {
    auto event = job_->take_event();
    if (!event) return;
    std::visit(
        [this](auto& news) {
          using News = std::decay_t<decltype(news)>;
          if constexpr (std::is_same_v<News, Joined>) {
            joined_ = news;
            options_.workers.run_id = news.membership.run_id;
            round_ = news.membership.round;
            changes_ = news.membership.changes;
            offer_round();
          } else if constexpr (std::is_same_v<News, Notice>) {
            report_(news.text);
          } else if constexpr (std::is_same_v<News, RoundPlan>) {
            plan_ = news;
          } else if constexpr (std::is_same_v<News, CauseWanted>) {
            look_for_causes_at_ = Deadline::after(kCauseEnds);
            named_ = news.named;
          } else if constexpr (std::is_same_v<News, NodesWait>) {
            waits_since_ns_ = steady_ns();
            report_(news.text);
          } else {
            verdict_ = news;
            obey_verdict();
          }
        },
        *event);
  }
}

void LocalAgent::offer_round() {
  RoundOffer offer;
  if (node_rank() == 0 || job_->elastic()) {
    // A name server that does not answer must not end a job that runs.
    port_ = StorePort::hold_for_nodes(joined_->reachable_host, round_ > 0);
    offer = {joined_->master_addr, port_->port()};
  }
  job_->offer_round(round_, offer);
}

void LocalAgent::obey_verdict() {
  if (verdict_->kind == Verdict::Kind::signalled) {
    // The verdict that this node proposed for its own signal comes back too.
    if (ending_signal_ == 0) stop_by_signal(verdict_->signal, verdict_->text);
  } else if (running() > 0 && !stop_.kill_at) {
    // If no node was lost, the program can still save a last snapshot.
    if (verdict_->kind == Verdict::Kind::node_leaves ||
        verdict_->kind == Verdict::Kind::node_waits) {
      stop_for_members();
    } else {
      stop_after_failure();
    }
  }
}

void LocalAgent::suspend_workers(bool suspended) {
  suspended_ = suspended;
  // Those that are being stopped must not be held.
  if (!group_ || stop_.kill_at) return;
  group_->signal_process_groups(suspended ? SIGSTOP : SIGCONT);
}

void LocalAgent::forward(int signal) {
  if (options_.ending_signals.contains(signal)) {
    forward_ending(signal);
  } else if (signal == SIGTSTP || signal == SIGCONT) {
    suspend_workers(signal == SIGTSTP);
  } else if (group_) {
    group_->signal_process_groups(signal);
  }
}

void LocalAgent::forward_ending(int signal) {
  if (ending_signal_ == 0) {
    leaves_ = may_leave();
    Verdict verdict;
    verdict.kind =
        leaves_ ? Verdict::Kind::node_leaves : Verdict::Kind::signalled;
    verdict.node_rank = node_rank();
    verdict.exit_code = 128 + signal;
    verdict.signal = signal;
    verdict.text = signal_name(signal) + " at " + node_name();
    if (leaves_) {
      verdict.exit_code = kSystemError;
      verdict.signal = 0;
      verdict.text = node_name() + " leaves: " + signal_name(signal);
    }
    stop_by_signal(signal, signal_name(signal));
    if (!leaves_) {
      end_job(verdict);
    } else if (plan_) {
      job_->propose(round_, verdict);
    }
  } else if (signal == SIGINT) {
    kill_now();
  }
}

void LocalAgent::stop_by_signal(int signal, const std::string& text) {
  ending_signal_ = signal;
  if (running() == 0) {
    if (job_)
      report_(text +
              (leaves_ ? " makes this node leave the job" : " ends the job"));
    return;
  }
  if (stop_.kill_at) {  // they are already being stopped
    end_sparing();
    return;
  }
  group_->settle();
  stop_.signal = signal;
  stop_.allowed = options_.shutdown_timeout;
  stop_.kill_at = Deadline::after(stop_.allowed);
  group_->signal_process_groups(signal);
  // Stopped workers (SIGSTOP) could not take the signal.
  group_->signal_process_groups(SIGCONT);
  report_(text + " forwarded to " + count_workers(running()) +
          ", which may take " + seconds_text(options_.shutdown_timeout) +
          " to end" +
          (signal == SIGINT ? "; a second SIGINT kills at once" : ""));
}

bool LocalAgent::may_leave() const {
  return job_ && job_->elastic() && joined_ &&
         (!joined_->hosts_store || job_->may_move());
}

void LocalAgent::stop_for_members() {
  group_->settle();
  if (standby_) group_->call_back();
  stop_.allowed = options_.shutdown_timeout;
  stop_.kill_at = Deadline::after(stop_.allowed);
  group_->signal_process_groups(SIGTERM);
  group_->signal_process_groups(SIGCONT);
}

void LocalAgent::stop_after_failure() {
  group_->settle();
  // First: the kernel may free the memory of a process that is signalled on
  // this core, at once.
  prepare_next();
  if (!next_ && standby_ && (job_ || has_restarts())) group_->call_back();
  stop_.allowed = options_.failure_shutdown_timeout;
  stop_.kill_at = Deadline::after(stop_.allowed);
  if (group_->spare_named()) {
    stop_.spared_until = stop_.kill_at;
    stop_.allowed *= 2;
    stop_.kill_at = Deadline::after(stop_.allowed);
  }
  group_->signal_process_groups(SIGTERM);
  group_->signal_process_groups(SIGCONT);
}

void LocalAgent::kill_now() {
  if (stop_.killed) return;
  stop_.at_once = true;
  stop_.kill_at = Deadline::after(milliseconds(0));
}

void LocalAgent::end_sparing() {
  if (!stop_.spared_until) return;
  stop_.spared_until.reset();
  group_->end_spared();
}

void LocalAgent::enforce_deadline() {
  if (stop_.spared_until && stop_.spared_until->expired()) end_sparing();
  if (!stop_.kill_at || !stop_.kill_at->expired() || running() == 0) return;
  if (!stop_.killed) {
    stop_.killed = true;
    if (!stop_.at_once) {
      report_(group_->name_running() + " did not end within " +
              seconds_text(stop_.allowed) + " of " +
              signal_name(stop_.signal != 0 ? stop_.signal : SIGTERM) +
              ": SIGKILL");
    }
    stop_.kill_at = Deadline::after(kKillAllowance);
    group_->kill_workers();
  } else {
    stop_.given_up = true;
  }
}

void LocalAgent::end_leftovers() {
  std::set<pid_t> spared = standby_ ? standby_->pids() : std::set<pid_t>();
  if (next_) spared.merge(next_->group->pids());
  std::vector<Leftover> left;
  // Those of workers that were stopped got the same signal, and are ending.
  const std::set<pid_t> stopped = group_->stopped();
  if (reap_children([&](pid_t pid, int status) { set_ended(pid, status); })) {
    if (!proc_is_mounted()) {
      report_(
          "/proc is not mounted, so what a worker may have left behind is not "
          "found");
    }
    left = leftovers(spared);
    std::erase_if(left, [&](const Leftover& one) {
      return stopped.contains(one.session);
    });
  }
  std::vector<std::string> ended;
  const bool all_ended = end_descendants(
      options_.leftover_timeout,
      [&](pid_t pid, int status) {
        set_ended(pid, status);
        const auto found = std::ranges::find(left, pid, &Leftover::pid);
        if (found == left.end() ||
            (found->ignores_sigterm && WIFEXITED(status))) {
          return;
        }
        ended.push_back(found->name + " (process " + std::to_string(pid) + ")");
      },
      spared);
  const int interrupt = guardian_gone_ ? -1 : link_.commands.get();
  const milliseconds idle = guardian_gone_        ? milliseconds(0)
                            : ending_signal_ != 0 ? kSignalledConsoleIdle
                                                  : kConsoleIdle;
  pollfd console{STDERR_FILENO, POLLOUT, 0};
  // Reports only if stderr takes the line at once: the console may be stalled
  // too.
  const auto unmoved =
      mux_.drain(idle, interrupt, kSignalledConsoleIdle,
                 next_ ? next_->earlier_streams : mux_.streams());
  if (unmoved && !guardian_gone_ && poll(&console, 1, 0) > 0) {
    report_("the reader of the output took nothing for " +
            seconds_text(*unmoved) + "; what it has not taken is lost");
  }
  if (!ended.empty() && !guardian_gone_) {
    report_("ended what workers had left behind: " + some_of(ended));
  }
  if (!all_ended && proc_is_mounted()) {
    report_(
        "a process outlived SIGKILL, uninterruptible in the kernel; it is "
        "left behind");
  }
}

void LocalAgent::set_ended(pid_t pid, int wait_status) {
  if (standby_ && standby_->set_ended(pid, wait_status)) return;
  if (next_) next_->group->set_ended(pid, wait_status);
  group_->set_ended(pid, wait_status);
}

void LocalAgent::open_standby() {
  if (options_.standby == 0 || standby_) return;
  const WorkerGroupOptions& workers = options_.workers;
  WorkerIdentity identity;
  identity.local_world_size = workers.nproc_per_node;
  identity.role = workers.role;
  identity.max_restarts = workers.max_restarts;
  identity.run_id = workers.run_id;
  identity.agent_socket = workers.agent_socket;
  identity.signals_to_handle = workers.signals_to_handle;
  if (!workers.omp_threads.empty()) {
    identity.omp_threads = workers.omp_threads.front();
  }
  standby_.emplace(StandbyPoolOptions{.processes = options_.standby,
                                      .path = workers.program.path,
                                      .arguments = workers.program.arguments,
                                      .environment = standby_environment(
                                          identity, current_environment()),
                                      .surroundings = link_.surroundings},
                   report_);
}

void LocalAgent::refill_standby() {
  if (!standby_ || running() == 0 || stop_.kill_at) return;
  if (!all_publish_ && std::ranges::find(publishers_, 0) == publishers_.end()) {
    all_publish_ = true;
    refill_at_ = Deadline::after(kRefillDelay);
  }
  if (refill_at_ && !refill_at_->expired()) return;
  refill_at_.reset();
  standby_->refill();
}

void LocalAgent::end_standby() {
  if (!standby_) return;
  next_.reset();
  standby_.reset();
  end_descendants(options_.leftover_timeout, [](pid_t, int) {});
}

std::string LocalAgent::node_name() const {
  if (!joined_) return options_.host_name;
  return "node " + std::to_string(node_rank()) + " (" + options_.host_name +
         ")";
}

Verdict LocalAgent::failed_verdict(
    const std::vector<WorkerFailure>& failures) const {
  WorkerFailure failure = failures.front();
  if (job_) failure.node = node_name();
  Verdict verdict;
  verdict.kind = Verdict::Kind::failed;
  verdict.node_rank = node_rank();
  // The exit code of a worker that was stopped while it failed would be
  // SIGTERM's, so this takes that of a worker that ended by itself.
  const auto ended_by_itself = std::ranges::find_if(
      failures,
      [](const auto& one) { return !one.was_stopped && one.exit_code != 0; });
  verdict.exit_code =
      ended_by_itself != failures.end() ? ended_by_itself->exit_code : 1;
  verdict.text = summary({{&failure}});
  return verdict;
}

// Proposes that this node was lost, so that it may be replaced; if it hosts the
// store, ends the job.
void LocalAgent::propose_lost_launcher() {
  Verdict verdict =
      give_up(128 + SIGKILL, "the launcher of " + node_name() + " was killed");
  if (!joined_ || (joined_->hosts_store && !may_leave())) {
    end_job(verdict);
    return;
  }
  verdict.kind =
      job_->elastic() ? Verdict::Kind::node_lost : Verdict::Kind::failed;
  verdict.node_rank = node_rank();
  if (plan_ || !job_->elastic()) job_->propose(round_, verdict);
}

void LocalAgent::end_job(Verdict verdict) {
  if (!job_) return;
  verdict.node_rank = node_rank();
  job_->propose(round_, verdict);
  // The other nodes may be about to begin the next round, after a failure
  // elsewhere.
  job_->propose(round_ + 1, verdict);
}

}  // namespace lockstep::internal
