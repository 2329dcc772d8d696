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

#include "lockstep/base/deadline.h"
#include "lockstep/base/shown_text.h"
#include "lockstep/launch/agent/metrics_endpoint.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/descendants.h"
#include "lockstep/launch/process/exit_code.h"
#include "lockstep/launch/watch/crash_report.h"
#include "lockstep/launch/watch/source_finder.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

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
      link_(std::move(link)),
      report_([this, report](const std::string& text) {
        mux_.end_open_line();
        report(text);
        if (board_) board_->add_event(text.substr(0, text.find('\n')));
      }),
      child_events_(open_child_events()),
      mux_([this](const std::string& text) { report_(text); }),
      job_(std::move(job)),
      started_ns_(steady_ns()),
      round_{.port = std::move(first_port)} {
  adopt_orphans();
  loop_.add(*this);
  loop_.add(mux_);
  open_socket();
  options_.workers.tells_progress = options_.hang_timeout.has_value();
}

void LocalAgent::serve_metrics(MetricsEndpoint endpoint) {
  metrics_.emplace(std::move(endpoint));
  metrics_->set_metrics([this] { return metrics(); });
  loop_.add(*metrics_);
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
    if (may_leave() && round_.number > 0) {
      // The others have shown that they can do without it.
      verdict.kind = Verdict::Kind::node_lost;
      verdict.node_rank = node_rank();
      if (round_.plan) propose(verdict);
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
  if (!job_ || !joined_ || !joined_->hosts_store || !round_.verdict ||
      ending() || !round_.verdict->ends_job(limits())) {
    return;
  }
  departing_ = true;
  round_.propose_at.reset();  // an expired one would keep the loop awake
  while (!job_->departed() && !ending()) {
    loop_.wait();
    serve_guardian();
    while (const auto event = job_->take_event()) {
      if (const auto* news = std::get_if<Notice>(&*event)) report_(news->text);
    }
  }
  job_->leave_at_once();
}

int LocalAgent::run_rounds() {
  while (true) {
    if (const auto plan = form_round()) run_workers(*plan);
    if (const auto exit_code = end_round()) return *exit_code;
    // Also closes the port of this round, which the next one may have to take.
    round_ = Round{.number = round_.number + 1};
  }
}

std::optional<RoundPlan> LocalAgent::form_round() {
  if (job_) return await_plan();
  if (next_) return next_->plan();
  if (!round_.port) {
    round_.port = StorePort::hold(options_.store_addr, options_.master_port);
  }
  return plan_alone(round_.number, changes_.restarts, *round_.port);
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
  if (joined_) offer_round();
  while (!round_.plan && !round_.verdict && !ending()) {
    keep_standby();
    loop_.wait();
    serve_guardian();
    serve_job();
  }
  if (ending()) await_verdict();
  // Only the node of rank 0 needs the port that it has offered.
  if (round_.plan && round_.plan->place.node_rank != 0) round_.port.reset();
  return round_.verdict || ending() ? std::nullopt : round_.plan;
}

std::unique_ptr<Attempt> LocalAgent::start_workers(
    const RoundPlan& plan, std::optional<StorePort> port) {
  const AgentParts parts{.options = options_,
                         .directory = directory_,
                         .surroundings = link_.surroundings,
                         .mux = mux_,
                         .report = report_,
                         .board = board_ ? &*board_ : nullptr,
                         .standby = standby_ ? &*standby_ : nullptr,
                         .is_alone = !job_};
  auto attempt = std::make_unique<Attempt>(parts, plan, std::move(port));
  loop_.add(*attempt);
  return attempt;
}

bool LocalAgent::has_restarts() const {
  return restarts_used() < options_.workers.max_restarts;
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
  try {
    auto port = StorePort::hold(options_.store_addr, 0);
    const RoundPlan plan =
        plan_alone(round_.number + 1, restarts_used() + 1, port);
    next_ = start_workers(plan, std::move(port));
  } catch (const std::exception&) {
    // The next attempt tries it again, and says why it cannot be started.
  }
}

bool LocalAgent::begin_attempt(const RoundPlan& plan) {
  try {
    attempt_ =
        next_ ? std::move(next_) : start_workers(plan, std::move(round_.port));
  } catch (const Attempt::NotHealed& error) {
    Verdict verdict;
    verdict.kind = Verdict::Kind::failed;
    verdict.node_rank = node_rank();
    verdict.exit_code = kSystemError;
    verdict.text = plan.lost_node + ", and " + node_name() +
                   " cannot take its place: " + error.what();
    round_.generation = error.generation;
    propose(verdict);
    await_verdict();
    return false;
  } catch (...) {
    standby_.reset();  // before its processes are reaped
    end_descendants(milliseconds(0), [](pid_t, int) {});
    throw;
  }
  round_.generation = attempt_->generation();
  if (!plan.lost_node.empty()) {
    report_(plan.lost_node + "\n  this node takes its place: healing " +
            std::to_string(restarts_used()) + " of " +
            std::to_string(options_.workers.max_restarts));
  }
  return true;
}

void LocalAgent::run_workers(const RoundPlan& plan) {
  place_ = plan.place;
  open_standby();
  if (!begin_attempt(plan)) return;
  attempt_->begin();
  if (suspended_) attempt_->suspend(true);
  const WorkerGroup& workers = attempt_->workers();
  while (attempt_->goes_on()) {
    // First: a worker may have ended before its attempt was this one.
    reap_children([&](pid_t pid, int status) { set_ended(pid, status); });
    attempt_->watch();
    look_for_causes();
    look_for_snapshot();
    place_->world_size = workers.world_size();
    round_.generation = attempt_->generation();
    if (attempt_->has_lost_ranks() && !attempt_->stopping() && !heal()) {
      round_.failures = workers.failures();
      if (job_) {
        if (only_echoes()) job_->ask_for_cause(workers.named_ranks());
        round_.propose_at =
            Deadline::after(may_be_echo() ? kCauseAllowance : milliseconds(0));
      }
      stop_after_failure();
    }
    tell_of_healing();
    tell_of_given_up();
    propose_failure();
    serve_guardian();
    serve_job();
    attempt_->enforce_deadline();
    if (attempt_->goes_on()) loop_.wait();
  }
  end_leftovers();
  // A failure that a forwarded signal caused does not count as one.
  round_.failures.clear();
  if (!attempt_->stopped_by_signal() && workers.failed()) {
    round_.failures = workers.failures();
  }
  set_verdict_of_workers();
  if (job_) job_->note_generation(round_.generation, /*goes_on=*/false);
  attempt_.reset();
  if (round_.plan) round_.plan->line.reset();
}

// Tells it once, so that a node may be replaced. A lost one had told it for the
// node that has its place.
void LocalAgent::tell_of_healing() {
  if (!job_ || !options_.workers.heals) return;
  const WorkerGroup& workers = attempt_->workers();
  const bool heals = !attempt_->stopping() && workers.all_heal_fully();
  const bool are_all_left =
      workers.world_size() == round_.plan->place.world_size;
  job_->note_generation(attempt_->generation(), heals && are_all_left);
  if (!heals || round_.has_told_of_healing || !round_.plan->lost_node.empty()) {
    return;
  }
  round_.has_told_of_healing = true;
  job_->report_healing();
}

// Tells it once. This node then only waits for how the round ends.
void LocalAgent::tell_of_given_up() {
  if (!job_ || round_.has_told_of_given_up ||
      !attempt_->workers().all_given_up()) {
    return;
  }
  round_.has_told_of_given_up = true;
  job_->report_given_up();
}

bool LocalAgent::heal() {
  if (!options_.workers.heals) return false;
  const Attempt::Healing healing = attempt_->heal();
  if (!healing.why_not.empty()) {
    report_("this is not healed, so all workers are stopped: " +
            healing.why_not);
    if (const auto* node = attempt_->lost_node()) propose_lost(*node);
    return false;
  }
  if (healing.begins_to_wait) {
    report_(healing.cause + "\n  its place waits for a standby process");
  }
  if (!healing.is_announced) return true;
  round_.generation = attempt_->generation();
  std::string places;
  for (const HealedFailure& one : healing.healed) {
    outcome_->healed.push_back(one);
    if (one.pid == 0) continue;
    places +=
        (places.empty() ? "\n  standby process " : ", ") +
        std::to_string(one.pid) +
        (places.empty() ? " takes the place of rank " : " that of rank ") +
        std::to_string(one.failure.rank);
  }
  if (healing.shrinks) {
    const int left = attempt_->workers().world_size();
    places = "; the job goes on with " + std::to_string(left) +
             (left == 1 ? " rank" : " ranks");
  }
  report_(healing.cause + places + ": healing " +
          std::to_string(restarts_used()) + " of " +
          std::to_string(options_.workers.max_restarts));
  end_what_was_left_by(healing.healed);
  return true;
}

// Sends SIGTERM. What does not end by it is ended with the attempt.
void LocalAgent::end_what_was_left_by(
    const std::vector<HealedFailure>& failures) {
  for (const Leftover& one : leftovers(/*spared=*/{})) {
    if (std::ranges::any_of(failures, [&](const HealedFailure& healed) {
          return healed.failure.pid == one.session;
        })) {
      kill(one.pid, SIGTERM);
    }
  }
}

void LocalAgent::look_for_snapshot() {
  if (!round_.waits_since_ns || !board_ ||
      !round_.look_for_snapshot_at.expired()) {
    return;
  }
  round_.look_for_snapshot_at = Deadline::after(kSnapshotLook);
  board_->watch(2 * kSnapshotLook);
  for (int place = 0; place < board_->places(); ++place) {
    const auto told = board_->read(place);
    if (!told || told->last_snapshot_ns <= *round_.waits_since_ns) continue;
    job_->report_snapshot();
    round_.waits_since_ns.reset();
    return;
  }
}

void LocalAgent::set_verdict_of_workers() {
  if (!job_) {
    round_.verdict =
        round_.failures.empty() ? Verdict{} : failed_verdict(round_.failures);
    round_.verdict->healings = round_.generation;
    round_.verdict->changes = round_.verdict->after(changes_);
    return;
  }
  if (!attempt_->stopping()) job_->report_success();
  await_verdict();
}

void LocalAgent::await_verdict() {
  // The job goes on without this node, which took no part in the round.
  if (leaves_ && !round_.plan) return;
  std::optional<Deadline> deadline;
  // The other nodes may still fail, and then all start again. This waits after
  // a signal too, since another verdict may have come before the signal's.
  while (!round_.verdict && !guardian_gone_) {
    if (ending_signal_ != 0) {
      if (!deadline) deadline = Deadline::after(kVerdictAllowance);
      // A node that has not joined has no say in the verdict.
      if (!joined_ || deadline->expired()) return;
    }
    // A worker that has ended well may have left while others needed it.
    look_for_causes();
    if (round_.failures.empty() && attempt_ && attempt_->workers().failed() &&
        !attempt_->stopping()) {
      round_.failures = attempt_->workers().failures();
      round_.propose_at = Deadline::after(milliseconds(0));
    }
    propose_failure();
    loop_.wait();
    serve_guardian();
    serve_job();
  }
}

void LocalAgent::look_for_causes() {
  if (!round_.look_for_causes_at || !round_.look_for_causes_at->expired() ||
      !attempt_) {
    return;
  }
  round_.look_for_causes_at.reset();
  attempt_->workers().look_for_causes(round_.named);
}

void LocalAgent::propose_failure() {
  if (!round_.propose_at) return;
  if (running() > 0) round_.failures = attempt_->workers().failures();
  if (may_be_echo() && !round_.propose_at->expired()) return;
  round_.propose_at.reset();
  if (!round_.failures.empty()) {
    // Other nodes may have healed theirs.
    if (attempt_ && options_.workers.heals) {
      round_.generation = attempt_->look_for_generations();
    }
    propose(failed_verdict(round_.failures));
  }
}

bool LocalAgent::only_echoes() const {
  return round_.failures.empty() ||
         round_.failures.front().error.kind == FailureKind::echo;
}

// If nodes may come and go, the loss of one uses no restart. Its peers may fail
// of it before it is noticed, and not every program says that this was why.
bool LocalAgent::may_be_echo() const {
  return only_echoes() ||
         (job_->elastic() &&
          round_.failures.front().error.kind == FailureKind::unknown);
}

std::string LocalAgent::describe_failure() {
  const int max_restarts = options_.workers.max_restarts;
  const bool is_own = round_.verdict->node_rank == node_rank();
  if (job_ && !round_.failures.empty() && is_own) {
    round_.failures.front().node = node_name();
  }
  SourceFinder sources;
  for (auto& failure : round_.failures) {
    failure.stack = sources.texts(failure.stack);
  }
  FailedAttempt attempt{
      .directory = directory_.attempt_directory(round_.number),
      .run_id = options_.workers.run_id,
      .host = options_.host_name,
      .program = options_.workers.program.arguments,
      .restarts_used = restarts_used(),
      .max_restarts = max_restarts,
      .cause = round_.verdict->text,
      .failures = round_.failures};
  attempt.read_files();
  std::string text = round_.verdict->text;
  if (!round_.failures.empty() && is_own) {
    text = describe(attempt.failures, restarts_used(), max_restarts);
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
  outcome_->restarts_used = restarts_used();
  outcome_->healings = healings();
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
  const bool ended = round_.verdict && round_.verdict->ends_job(limits());
  const bool last = ending_signal_ != 0 || ended;
  const bool failed =
      round_.verdict && round_.verdict->kind == Verdict::Kind::failed;
  // An elastic node, or a spare one, may have waited while the others ran.
  const bool took_part =
      !job_ || (!job_->elastic() && !job_->is_spare()) || round_.plan;
  std::string text;
  if (failed && took_part) {
    text = describe_failure();
  } else if (round_.verdict &&
             round_.verdict->kind != Verdict::Kind::signalled && !leaves_) {
    text = round_.verdict->text;
  }
  if (!took_part && round_.verdict &&
      round_.verdict->kind == Verdict::Kind::succeeded) {
    text = "the job has ended well without this node";
  }
  const bool changes = round_.verdict && round_.verdict->changes_membership();
  // A move between two rounds counts as nothing: the workers have been ended.
  if (!last && (failed || changes) && round_.verdict->changes != changes_) {
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
    outcome_->cause = round_.verdict->text;
    outcome_->signal = round_.verdict->signal;
    return round_.verdict->exit_code;
  }
  if (ending_signal_ != 0) {
    outcome_->signal = ending_signal_;
    outcome_->cause = signal_name(ending_signal_) + " ended the job";
    return 128 + ending_signal_;
  }
  if (round_.verdict) {
    const Verdict& verdict = *round_.verdict;
    healings_ += verdict.changes.restarts - changes_.restarts -
                 (verdict.kind == Verdict::Kind::failed);
    changes_ = verdict.changes;
  }
  // Another `Joined` comes once this node has joined at the other store.
  if (round_.verdict && round_.verdict->moves) joined_.reset();
  return std::nullopt;
}

// Returns the launcher's line about what follows a round that does not end the
// job.
std::string LocalAgent::describe_restart() const {
  const ChangeLimits most = limits();
  const ChangeCount& used = round_.verdict->changes;
  std::string standby;
  const int kept = standby_ ? standby_->kept() : 0;
  const int others = next_ ? next_->workers().stood_by()
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
  if (round_.verdict->changes_membership()) {
    return "starting all workers again: membership change " +
           std::to_string(used.membership_changes) +
           (most.membership_changes
                ? " of " + std::to_string(*most.membership_changes)
                : "") +
           standby;
  }
  const std::string all =
      job_ && job_->elastic()
          ? "workers"
          : count_workers(static_cast<size_t>(
                round_.plan ? round_.plan->place.world_size
                            : options_.workers.nproc_per_node));
  return "restarting all " + all + ": restart " +
         std::to_string(used.restarts) + " of " +
         std::to_string(most.restarts) + standby;
}

ChangeLimits LocalAgent::limits() const {
  return job_ ? job_->limits()
              : ChangeLimits{.restarts = options_.workers.max_restarts};
}

void LocalAgent::add_poll_entries(std::vector<pollfd>& entries) const {
  entries.push_back({child_events_.get(), POLLIN, 0});
  if (!guardian_gone_) {
    entries.push_back({link_.commands.get(), POLLIN, 0});
  }
  if (hears_job()) entries.push_back({job_->event_fd(), POLLIN, 0});
}

std::optional<Deadline> LocalAgent::due() const {
  std::optional<Deadline> first = round_.propose_at;
  if (hears_job()) first = earliest({first, Deadline::after(kJobInterval)});
  if (attempt_) first = earliest({first, round_.look_for_causes_at});
  if (round_.waits_since_ns && board_ && running() > 0) {
    first = earliest({first, round_.look_for_snapshot_at});
  }
  return first;
}

void LocalAgent::handle_poll_entries(std::span<const pollfd> /*entries*/) {
  discard_events(child_events_.get());
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
    socket_.emplace(options_.workers.run_id,
                    [this](const std::string& question, pid_t asker) {
                      return answer(question, asker);
                    });
    loop_.add(*socket_);
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
    if (local_rank < 0 || local_rank >= board_->places() || !attempt_ ||
        !attempt_->claim(static_cast<int>(local_rank), asker)) {
      return refuse("another process publishes for this worker");
    }
    return {directory_.attempt_directory(round_.number).string(),
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

JobStatus LocalAgent::status() const {
  JobStatus all;
  all.run_id = options_.workers.run_id;
  all.program = options_.workers.program.arguments;
  all.agent_pid = getpid();
  all.host = options_.host_name;
  all.started_ns = started_ns_;
  all.restart = restarts_used();
  all.healings = healings();
  all.max_restarts = options_.workers.max_restarts;
  all.attempt_directory = directory_.attempt_directory(round_.number);
  all.standby = standby_ ? standby_->waiting() : 0;
  all.state = !attempt_              ? JobStatus::State::waiting
              : running() == 0       ? JobStatus::State::ended
              : attempt_->stopping() ? JobStatus::State::stopping
                                     : JobStatus::State::running;
  if (place_) {
    all.node_rank = place_->node_rank;
    all.nnodes = place_->nnodes;
    all.world_size = place_->world_size;
  }
  if (attempt_) all.workers = attempt_->statuses();
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
      if (attempt_) attempt_->kill_now();
    } else if (errno != EINTR) {
      return;  // nothing more to read
    }
  }
}

void LocalAgent::serve_job() {
  if (!job_) return;
  job_->shut_if_silent();
  while (!round_.verdict) {
    auto event = job_->take_event();
    if (!event) return;
    std::visit(
        [this](auto& news) {
          using News = std::decay_t<decltype(news)>;
          if constexpr (std::is_same_v<News, SpareWaits>) {
            options_.workers.run_id = news.run_id;
            report_("this spare node waits until a node is lost");
            open_standby();
          } else if constexpr (std::is_same_v<News, Joined>) {
            joined_ = news;
            if (news.line) {
              if (attempt_) attempt_->renew_line(news.line);
              return;
            }
            options_.workers.run_id = news.membership.run_id;
            round_.number = news.membership.round;
            changes_ = news.membership.changes;
            offer_round();
          } else if constexpr (std::is_same_v<News, Notice>) {
            report_(news.text);
          } else if constexpr (std::is_same_v<News, RoundPlan>) {
            round_.plan = news;
          } else if constexpr (std::is_same_v<News, LostNode>) {
            if (attempt_ && attempt_->goes_on() && !attempt_->stopping()) {
              attempt_->give_up(news);
            } else {
              propose_lost(news);
            }
          } else if constexpr (std::is_same_v<News, CauseWanted>) {
            round_.look_for_causes_at = Deadline::after(kCauseEnds);
            round_.named = news.named;
          } else if constexpr (std::is_same_v<News, NodesWait>) {
            round_.waits_since_ns = steady_ns();
            report_(news.text);
          } else {
            round_.verdict = news;
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
    round_.port =
        StorePort::hold_for_nodes(joined_->reachable_host, round_.number > 0);
    offer = {joined_->master_addr, round_.port->port()};
  }
  job_->note_generation(0, /*goes_on=*/false);
  job_->offer_round(round_.number, offer);
}

void LocalAgent::obey_verdict() {
  if (round_.verdict->kind == Verdict::Kind::signalled) {
    // The verdict that this node proposed for its own signal comes back too.
    if (ending_signal_ == 0)
      stop_by_signal(round_.verdict->signal, round_.verdict->text);
  } else if (attempt_ && attempt_->goes_on() && !attempt_->stopping()) {
    // If no node was lost, the program can still save a last snapshot.
    if (round_.verdict->kind == Verdict::Kind::node_leaves ||
        round_.verdict->kind == Verdict::Kind::node_waits) {
      attempt_->stop_for_members();
    } else {
      stop_after_failure();
    }
  }
}

void LocalAgent::suspend_workers(bool suspended) {
  suspended_ = suspended;
  if (attempt_) attempt_->suspend(suspended);
}

void LocalAgent::forward(int signal) {
  if (options_.ending_signals.contains(signal)) {
    forward_ending(signal);
  } else if (signal == SIGTSTP || signal == SIGCONT) {
    suspend_workers(signal == SIGTSTP);
  } else if (attempt_) {
    attempt_->workers().signal_process_groups(signal);
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
    } else if (round_.plan) {
      propose(verdict);
    }
  } else if (signal == SIGINT && attempt_) {
    attempt_->kill_now();
  }
}

void LocalAgent::stop_by_signal(int signal, const std::string& text) {
  ending_signal_ = signal;
  if (running() == 0) {
    // All workers were given up, or wait for a standby process.
    const bool stops = attempt_ && attempt_->goes_on() && !attempt_->stopping();
    if (stops) attempt_->stop_by_signal(signal);
    if (job_ || stops)
      report_(text + (leaves_ ? " makes this node leave the job"
                      : job_ && job_->is_spare() && !joined_
                          ? " ends this spare node"
                          : " ends the job"));
    return;
  }
  if (attempt_->stopping()) return attempt_->end_sparing();
  attempt_->stop_by_signal(signal);
  report_(text + " forwarded to " + count_workers(running()) +
          ", which may take " + seconds_text(options_.shutdown_timeout) +
          " to end" +
          (signal == SIGINT ? "; a second SIGINT kills at once" : ""));
}

bool LocalAgent::may_leave() const {
  return job_ && job_->elastic() && joined_ &&
         (!joined_->hosts_store || job_->may_move());
}

void LocalAgent::stop_after_failure() {
  // First: the kernel may free the memory of a process that is signalled on
  // this core, at once.
  prepare_next();
  attempt_->stop_after_failure(
      /*calls_back=*/!next_ && standby_ && (job_ || has_restarts()));
}

void LocalAgent::end_leftovers() {
  std::set<pid_t> spared = standby_ ? standby_->pids() : std::set<pid_t>();
  if (next_) spared.merge(next_->workers().pids());
  std::vector<Leftover> left;
  // Those of workers that were stopped got the same signal, and are ending.
  const std::set<pid_t> stopped = attempt_->workers().stopped();
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
                 next_ ? next_->earlier_streams() : mux_.streams());
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
  if (next_) next_->workers().set_ended(pid, wait_status);
  attempt_->workers().set_ended(pid, wait_status);
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
  identity.heals = workers.heals;
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
  loop_.add(*standby_);
}

void LocalAgent::keep_standby() {
  if (!standby_ || joined_) return;
  reap_children(
      [&](pid_t pid, int status) { standby_->set_ended(pid, status); });
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
  if (round_.plan || !job_->elastic()) propose(verdict);
}

// Proposes that the workers start again because of a node that was to be given
// up.
void LocalAgent::propose_lost(const LostNode& node) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::failed;
  verdict.exit_code = kSystemError;
  verdict.text = node.cause;
  propose(verdict);
}

void LocalAgent::propose(Verdict verdict) {
  verdict.healings = round_.generation;
  job_->propose(round_.number, verdict);
}

void LocalAgent::end_job(Verdict verdict) {
  if (!job_) return;
  verdict.node_rank = node_rank();
  propose(verdict);
  // The other nodes may be about to begin the next round, after a failure
  // elsewhere.
  job_->propose(round_.number + 1, verdict);
}

}  // namespace lockstep::internal
