#include "lockstep/launch/nodes/job_member.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/number_list.h"
#include "lockstep/launch/nodes/store_connections.h"
#include "lockstep/launch/process/exit_code.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPollInterval{50};
// How long the thread waits for a change in the store. An agent shows that it
// lives, and the host looks for lost nodes, in between.
constexpr milliseconds kLongestWait{500};
// How long an agent tries to reach a job that has moved to another endpoint.
constexpr milliseconds kConnectAllowance{3000};
// How often a host of the store that waits alone looks at other endpoints.
constexpr milliseconds kLookForOthers{3000};
// How long the host of the store stays for nodes that have not departed, and,
// if one has declined, for those that have yet to come.
constexpr milliseconds kDepartAllowance{5000};
// After this time of it the user is told.
constexpr milliseconds kLongDeparture{2000};
// How long a member that is ending waits for an answer.
constexpr milliseconds kLastAnswerAllowance{3000};
// How often a member that is ending shuts a connection that does not answer.
// Once is not enough: the store's client connects again if a connection breaks
// while it is being opened.
constexpr milliseconds kShutInterval{1000};

FileDescriptor open_event() {
  FileDescriptor fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw_errno("eventfd of the job's events");
  return fd;
}

void make_readable(const FileDescriptor& event) {
  const uint64_t one = 1;
  [[maybe_unused]] auto ignored = write(event.get(), &one, sizeof(one));
}

void make_unreadable(const FileDescriptor& event) {
  uint64_t count = 0;
  [[maybe_unused]] auto ignored = read(event.get(), &count, sizeof(count));
}

// Returns the name of the connection to `port` that was made after `earlier`
// was read; empty if there is not exactly one.
std::string new_connection(int port, const std::set<std::string>& earlier) {
  std::set<std::string> all = connections_to(port);
  std::erase_if(
      all, [&](const std::string& name) { return earlier.contains(name); });
  return all.size() == 1 ? *all.begin() : "";
}

std::vector<Endpoint> all_endpoints(const JobMemberOptions& options) {
  std::vector<Endpoint> all = options.further_endpoints;
  all.insert(all.begin(), options.store.endpoint);
  return all;
}

// Calls `noted` after each operation, since an agent makes many in a row and
// each answer counts as progress.
class NotingStore : public AgentStore {
 public:
  NotingStore(std::unique_ptr<AgentStore> store, std::function<void()> noted)
      : store_(std::move(store)), noted_(std::move(noted)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, value);
    noted_();
  }
  void remove(const std::string& key) override {
    store_->remove(key);
    noted_();
  }
  std::optional<std::string> get(const std::string& key) override {
    auto value = store_->get(key);
    noted_();
    return value;
  }
  bool check(const std::string& key) override {
    const bool is_set = store_->check(key);
    noted_();
    return is_set;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const int64_t sum = store_->add(key, amount);
    noted_();
    return sum;
  }
  std::string set_if_absent(const std::string& key,
                            const std::string& value) override {
    std::string held = store_->set_if_absent(key, value);
    noted_();
    return held;
  }
  // It may end without an answer.
  void await_change(const std::vector<std::string>& keys, milliseconds allowed,
                    int wake_fd) override {
    store_->await_change(keys, allowed, wake_fd);
  }
  std::unique_ptr<StoreLine> open_line(const Deadline& deadline) override {
    auto line = store_->open_line(deadline);
    noted_();
    return line;
  }
  bool knows_agents() const override { return store_->knows_agents(); }
  std::set<std::string> agents() override { return store_->agents(); }

 private:
  std::unique_ptr<AgentStore> store_;
  std::function<void()> noted_;
};

}  // namespace

JobMember::JobMember(JobMemberOptions options)
    : options_(std::move(options)),
      endpoints_(all_endpoints(options_)),
      connector_(rejoining(noting(options_.store))),
      event_fd_(open_event()),
      wake_fd_(open_event()),
      thread_([this] { work(); }) {}

// Returns `options` for a store whose answers are noted.
StoreConnectorOptions JobMember::noting(StoreConnectorOptions options) {
  options.open = [this, open = options.open](const auto& address) {
    note_progress();
    auto store = open(address);
    note_progress();
    return std::make_unique<NotingStore>(std::move(store),
                                         [this] { note_progress(); });
  };
  return options;
}

// Returns `options` for a store that this agent rejoins if its connection
// breaks.
StoreConnectorOptions JobMember::rejoining(StoreConnectorOptions options) {
  options.rejoining =
      Rejoining{.agent = options_.node.id,
                .given_up = [this] { return was_silent_ || ends_anyway_; },
                .broken = [this](const auto& why) { tell_of_broken_link(why); },
                .back = [this] { tell_of_whole_link(); }};
  return options;
}

void JobMember::tell_of_broken_link(const std::string& why) {
  broken_since_ = answered_;
  post(Notice{"no contact with " + name_store() + " (" + why +
              "): the workers go on, and this node counts as lost if it is not "
              "back within " +
              seconds_text(options_.node.keep_alive.allowance())});
}

void JobMember::tell_of_whole_link() {
  const auto time =
      std::chrono::round<std::chrono::seconds>(Clock::now() - broken_since_);
  post(Notice{"contact with " + name_store() + " is back after " +
              seconds_text(time)});
}

// Returns "node 0 (its host), which hosts the agents' store at its:29500".
std::string JobMember::name_store() const {
  const std::string store =
      "the agents' store at " + connector_.endpoint().text();
  return store_host_.empty() ? store : store_host_ + ", which hosts " + store;
}

// Makes what waits for an answer of the store fail.
void JobMember::shut_store() {
  shut_connections_to(connector_.endpoint().port);
}

JobMember::~JobMember() {
  std::unique_lock lock(mutex_);
  stop_ = true;
  wake();
  const auto ended = [this] { return ended_; };
  const Deadline deadline =
      Deadline::after(kDepartAllowance + kLastAnswerAllowance);
  uint64_t known = progress_;
  Deadline answer = Deadline::after(kLastAnswerAllowance);
  while (!changed_.wait_for(lock, kShutInterval, ended)) {
    if (std::exchange(known, progress_.load()) != known) {
      answer = Deadline::after(kLastAnswerAllowance);
    }
    if (deadline.expired() || answer.expired()) {
      ends_anyway_ = true;
      shut_store();
    }
  }
  lock.unlock();
  thread_.join();
}

AwakeClock::Clock::duration JobMember::silence() {
  awake_.tick(Clock::now());
  if (std::exchange(known_progress_, progress_.load()) != known_progress_) {
    silent_since_ = awake_.awake();
  }
  return awake_.awake() - silent_since_;
}

std::string JobMember::tell_of_silence(bool silent) {
  if (silent_store_.empty() ||
      std::exchange(told_of_silence_, silent) == silent) {
    return "";
  }
  if (!silent) return silent_store_ + " answers again";
  return "no answer from " + silent_store_ + " for " +
         seconds_text(kLongSilence) +
         ": the workers go on, and this node counts as lost if none comes "
         "within " +
         seconds_text(options_.node.keep_alive.allowance()) +
         "; c10d does not replace a connection that is reset";
}

void JobMember::shut_if_silent() {
  std::string line;
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    const auto silent = silence();
    if (silent >= options_.node.keep_alive.allowance()) {
      was_silent_ = true;
      shut_store();
    }
    if (!was_silent_) line = tell_of_silence(silent >= kLongSilence);
  }
  if (!line.empty()) post(Notice{line});
}

std::optional<JobEvent> JobMember::take_event() {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) {
    if (!ended_) make_unreadable(event_fd_);
    return std::nullopt;
  }
  JobEvent event = std::move(events_.front());
  events_.pop_front();
  const auto* joined = std::get_if<Joined>(&event);
  if (joined != nullptr && !joined->line) ++joins_taken_;
  return event;
}

void JobMember::offer_round(int round, RoundOffer offer) {
  queue_for_store(
      [this, round, offer = std::move(offer)](NodeProtocol& protocol) {
        protocol.offer_round(round, offer);
        round_deadline_ = Deadline::after(options_.join_timeout);
      });
}

void JobMember::report_healing() {
  queue_for_store([](NodeProtocol& protocol) { protocol.report_healing(); });
}

void JobMember::report_success() {
  queue_for_store([](NodeProtocol& protocol) { protocol.report_success(); });
}

void JobMember::report_given_up() {
  queue_for_store([](NodeProtocol& protocol) { protocol.report_given_up(); });
}

void JobMember::ask_for_cause(NamedRanks named) {
  queue_for_store([named = std::move(named)](NodeProtocol& protocol) {
    protocol.ask_for_cause(named);
  });
}

void JobMember::report_snapshot() {
  queue_for_store([](NodeProtocol& protocol) { protocol.report_snapshot(); });
}

void JobMember::propose(int round, Verdict verdict) {
  queue([round, verdict = std::move(verdict)](NodeProtocol& protocol) {
    protocol.propose(round, verdict);
  });
}

void JobMember::queue_for_store(Command command) {
  const std::lock_guard lock(mutex_);
  if (joins_taken_ != joins_) return;
  commands_.push_back(std::move(command));
  wake();
}

void JobMember::queue(Command command) {
  const std::lock_guard lock(mutex_);
  commands_.push_back(std::move(command));
  wake();
}

void JobMember::wake() {
  changed_.notify_all();
  make_readable(wake_fd_);
}

void JobMember::run_commands(NodeProtocol& protocol) {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
    if (!stop_) make_unreadable(wake_fd_);
  }
  for (const auto& command : commands) command(protocol);
}

void JobMember::post(JobEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  make_readable(event_fd_);
}

void JobMember::post_end(int exit_code, const std::string& text) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::given_up;
  verdict.exit_code = exit_code;
  verdict.text = text;
  post(verdict);
}

std::string JobMember::describe_lost_store(const AgentStoreError& error) {
  std::string text = "the agents' store at " + connector_.endpoint().text();
  if (!store_host_.empty())
    text = store_host_ + " was lost, and with it " + text;
  else
    text += " was lost";
  const KeepAlive& keep_alive = options_.node.keep_alive;
  text += ": " + (was_silent_
                      ? "no answer for " + seconds_text(keep_alive.allowance())
                      : std::string(error.what()));
  const std::lock_guard lock(mutex_);
  awake_.tick(Clock::now());
  return text + own_pause(awake_, keep_alive, options_.node.host);
}

void decline_job(JobMemberOptions options) noexcept {
  try {
    JobMember member(std::move(options));
    while (true) {
      pollfd entry{member.event_fd(), POLLIN, 0};
      poll(&entry, 1, static_cast<int>(kShutInterval.count()));
      member.shut_if_silent();
      while (const auto event = member.take_event()) {
        if (std::holds_alternative<Verdict>(*event)) return;
      }
    }
  } catch (const std::exception&) {
    // The thread could not be started.
  }
}

bool JobMember::stopping() {
  const std::lock_guard lock(mutex_);
  return stop_;
}

void JobMember::pause() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kPollInterval,
                    [this] { return stop_ || !commands_.empty(); });
}

void JobMember::work() noexcept {
  try {
    std::optional<NodeProtocol> protocol;
    bool moved = true;
    while (std::exchange(moved, false)) {
      const std::optional<OpenedStore> opened = join(protocol);
      if (!opened) break;
      bool ended = false;
      try {
        moved = follow(*protocol, opened->hosted);
        ended = true;
        if (!moved) depart(*protocol, opened->hosted);
      } catch (const AgentStoreError& error) {
        moved = !ended && move_on(*protocol, error);
      } catch (const RankTaken& error) {
        if (protocol->runs()) {
          protocol.reset();
          post_end(kSystemError, error.what());
          break;
        }
        join_again(*protocol, error.what());
        moved = true;
      }
      protocol.reset();  // it refers to the store
    }
  } catch (const std::invalid_argument& error) {
    post_end(kUsageError, error.what());
  } catch (const std::exception& error) {
    post_end(kSystemError, error.what());
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  make_readable(event_fd_);
  changed_.notify_all();
}

bool JobMember::departed() {
  const std::lock_guard lock(mutex_);
  return ended_ && events_.empty();
}

// Tells of the loss of the store. Returns whether the job goes on at another,
// or at this one once it can be reached again.
bool JobMember::move_on(const NodeProtocol& protocol,
                        const AgentStoreError& error) {
  Verdict verdict;
  verdict.text = describe_lost_store(error);
  if (stopping() || (!may_move() && !was_silent_)) {
    post_end(kSystemError, verdict.text);
    return false;
  }
  const size_t next = (endpoint_ + 1) % endpoints_.size();
  return go_on(protocol, verdict.text, next) ||
         move(protocol, std::move(verdict), next);
}

bool JobMember::go_on(const NodeProtocol& protocol, const std::string& loss,
                      size_t endpoint) {
  auto running = protocol.running_round();
  if (!may_move() || !running || !goes_on_) return false;
  running->loss = loss;
  running->generation = generation_;
  post(Notice{loss + "; the workers go on, and the nodes meet at " +
              endpoints_[endpoint].text()});
  EarlierRounds& earlier = options_.node.earlier = protocol.earlier();
  earlier.count = protocol.round();
  earlier.lost_round = -1;
  earlier.running = std::move(running);
  options_.node.run_id = protocol.run_id();
  go_to(endpoint);
  return true;
}

// The round that was to go on is over, or another node has ended its workers.
void JobMember::post_not_resumed(const Membership& membership) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::failed;
  verdict.exit_code = kSystemError;
  verdict.text = options_.node.earlier.running->loss;
  verdict.changes = membership.changes;
  verdict.moves = true;
  post(std::move(verdict));
}

// This node was given up as lost, and another one has its rank. It joins the
// same store again, with another rank.
void JobMember::join_again(const NodeProtocol& protocol,
                           const std::string& why) {
  post(Notice{why + "; it joins again with another one"});
  options_.node.earlier = protocol.earlier();
  options_.node.run_id = protocol.run_id();
  go_to(endpoint_);
}

bool JobMember::move(const NodeProtocol& protocol, Verdict verdict,
                     size_t endpoint) {
  EarlierRounds earlier = protocol.earlier();
  verdict.kind = elastic() ? Verdict::Kind::node_lost : Verdict::Kind::failed;
  verdict.exit_code = kSystemError;
  // Between two rounds no workers run that would have to start again.
  if (protocol.runs()) {
    verdict.healings = generation_;
    earlier.changes = verdict.after(earlier.changes);
  }
  verdict.changes = earlier.changes;
  verdict.moves = !verdict.ends_job(limits());
  if (verdict.moves) {
    verdict.text += may_move()
                        ? "; the nodes meet at " + endpoints_[endpoint].text()
                        : "; this node takes part again once it is in reach";
    options_.node.earlier = earlier;
    options_.node.run_id = protocol.run_id();
    go_to(endpoint);
  }
  const bool moves = verdict.moves;
  post(std::move(verdict));
  return moves;
}

void JobMember::go_to(size_t endpoint) {
  StoreConnectorOptions options = options_.store;
  options.endpoint = endpoints_[endpoint];
  if (options_.node.earlier.any() && may_move()) {
    // It was about the first endpoint, but a spare node hosts no store.
    if (!spare_) options.is_host.reset();
    options.timeout = kConnectAllowance;  // then the next one is tried
  } else if (options_.node.earlier.any()) {
    options.is_host = false;
    options.was_there = true;
    options.timeout = options_.join_timeout;
  } else if (endpoint > 0) {
    // The job was there a moment ago; if it has ended, the next one begins at
    // the first endpoint.
    options.is_host = false;
    options.timeout = kConnectAllowance;
  }
  const std::lock_guard lock(mutex_);
  // The silence was that of the store before.
  was_silent_ = false;
  ++progress_;
  endpoint_ = endpoint;
  connector_ = StoreConnector(rejoining(noting(std::move(options))));
  store_host_.clear();
}

std::optional<size_t> JobMember::find_other_store() {
  for (size_t at = 0; at < endpoints_.size(); ++at) {
    if (at == endpoint_) continue;
    StoreConnectorOptions options = options_.store;
    options.endpoint = endpoints_[at];
    options.is_host = false;
    options.timeout = milliseconds(0);  // one look
    try {
      StoreConnector(noting(std::move(options)))
          .open([this] { return stopping(); }, [](const auto&) {});
      return at;
    } catch (const AgentStoreError&) {
      // Mostly there is none.
    }
  }
  return std::nullopt;
}

// This agent hosts the store and waits alone: it was stopped for so long that
// the others went to another one, or it started when they were on the way.
bool JobMember::rejoin_the_others(NodeProtocol& protocol) {
  const auto others = static_cast<size_t>(options_.node.nnodes) - 1;
  if (protocol.absent_nodes().size() < others) return false;
  const auto at = find_other_store();
  if (!at) return false;
  Verdict verdict;
  verdict.text = "no other node is at " + connector_.endpoint().text();
  return move(protocol, std::move(verdict), *at);
}

// Blocks until this spare node has a rank; returns nothing if the job or this
// agent ends before that. A store that gives no answer is shut by
// shut_if_silent().
std::optional<Membership> JobMember::join_as_spare(NodeProtocol& protocol) {
  bool closed = false;
  while (!stopping()) {
    note_progress();
    try {
      if (closed) {
        post(protocol.last_verdict());
        return std::nullopt;
      }
      if (spare_waits_) {
        protocol.await_free_rank(kLongestWait, wake_fd_.get());
      }
      return protocol.join();
    } catch (const RankTaken&) {
      if (!std::exchange(spare_waits_, true)) {
        post(SpareWaits{protocol.run_id()});
      }
    } catch (const JobClosed&) {
      if (!spare_waits_) throw;
      closed = true;
    }
  }
  return std::nullopt;
}

std::optional<OpenedStore> JobMember::join(
    std::optional<NodeProtocol>& protocol) {
  Deadline deadline = Deadline::after(options_.join_timeout);
  const KeepAlive& keep_alive = options_.node.keep_alive;
  const Deadline rank_deadline = Deadline::after(std::min(
      options_.join_timeout, keep_alive.allowance() + keep_alive.interval));
  const auto cancelled = [this] {
    note_progress();
    return stopping();
  };
  const auto notice = [this](const std::string& text) { post(Notice{text}); };
  const auto is_new = [this] { return !options_.node.earlier.any(); };
  bool told = false;
  if (is_new()) {
    // The job may run already, and have moved.
    if (const auto at = find_other_store()) go_to(*at);
  }
  const auto go_back = [&] {
    if (is_new() && endpoint_ > 0) go_to(0);
  };
  // Set if an elastic job that runs had no place for this node. When that job
  // has ended, this node must not begin it again.
  std::optional<std::string> had_no_place;
  while (true) {
    OpenedStore opened;
    // A broken connection may linger, at the same port of a lost host.
    const auto earlier = connections_to(connector_.endpoint().port);
    try {
      opened = connector_.open(cancelled, notice);
    } catch (const AgentStoreError& error) {
      if (is_new() ? endpoint_ == 0 : !may_move() || deadline.expired()) throw;
      if (cancelled()) return std::nullopt;
      if (is_new()) {
        go_back();
        continue;
      }
      if (!std::exchange(told, true)) {
        std::string all;
        for (const Endpoint& one : endpoints_) {
          all += (all.empty() ? "" : ", ") + one.text();
        }
        notice("looking for the other nodes at " + all + ", for at most " +
               seconds_text(options_.join_timeout) + ": " + error.what());
      }
      go_to((endpoint_ + 1) % endpoints_.size());
      continue;
    }
    // The job ended while this node paused, and its store with it.
    if (opened.hosted && had_no_place && !may_move()) {
      throw JobRefused(*had_no_place);
    }
    NodeDescription node = options_.node;
    node.hosts_store = opened.hosted;
    node.is_spare = spare_;
    if (opened.store->knows_agents()) {
      node.connection = node.id;
      protocol.emplace(*opened.store, node, [store = opened.store.get()] {
        return store->agents();
      });
    } else {
      const int port = connector_.endpoint().port;
      const milliseconds allowed = keep_alive.allowance();
      break_connections_of_dead_hosts(port, allowed);
      node.connection = new_connection(port, earlier);
      protocol.emplace(*opened.store, node, [port, allowed] {
        // Also handles connections that were accepted since.
        break_connections_of_dead_hosts(port, allowed);
        return connections_accepted_at(port);
      });
    }
    try {
      if (options_.declines) {
        protocol->decline(*options_.declines);
        post(*options_.declines);
        return opened;
      }
      Joined joined;
      if (spare_) {
        const auto membership = join_as_spare(*protocol);
        if (!membership) return std::nullopt;
        joined.membership = *membership;
      } else if (options_.node.earlier.running) {
        auto line = protocol->open_line(Deadline::after(kConnectAllowance));
        joined.membership = protocol->join();
        if (protocol->runs()) {
          joined.line = std::move(line);
        } else {
          post_not_resumed(joined.membership);
        }
      } else {
        joined.membership = protocol->join();
      }
      spare_ = spare_waits_ = false;
      joined.hosts_store = opened.hosted;
      joined.master_addr = options_.local_addr.empty() ? opened.reachable_host
                                                       : options_.local_addr;
      joined.reachable_host = joined.master_addr.empty()
                                  ? connector_.endpoint().host
                                  : joined.master_addr;
      store_host_ = protocol->name_of_store_host();
      hosting_ = opened.hosting;
      if (opened.beyond_loopback && !options_.store.secret) {
        notice("the agents' store listens at " + connector_.endpoint().text() +
               " on every interface, without authentication: for trusted "
               "networks only");
      }
      was_silent_ = false;  // until now no answer was due
      if (joined.line) {
        round_deadline_.reset();
      } else {
        round_deadline_ = deadline;
      }
      {
        const std::lock_guard lock(mutex_);
        const bool replaces = opened.hosted || opened.store->knows_agents();
        silent_store_ = replaces ? "" : name_store();
        if (!joined.line) {
          // The entries that were queued since were about the store that is
          // lost.
          if (!is_new()) commands_.clear();
          ++joins_;
        }
      }
      post(joined);
      return opened;
    } catch (const RankTaken& error) {
      if (cancelled()) return std::nullopt;
      if (rank_deadline.expired()) throw;
      if (elastic()) had_no_place = error.what();
    } catch (const JobRefused&) {
      // If this agent hosts the store, it stays until the others have read why.
      try {
        depart(*protocol, opened.hosted);
      } catch (const AgentStoreError&) {
        // The exception that is being thrown says more.
      }
      throw;
    } catch (const JobClosed&) {
      if (cancelled()) return std::nullopt;
      if (had_no_place) throw JobRefused(*had_no_place);
      if (deadline.expired()) throw;
      go_back();
    } catch (const AgentStoreError& error) {
      // Mostly this was the store of a job that was ending, and this job's
      // store comes next.
      if (cancelled()) return std::nullopt;
      if (had_no_place && !may_move()) throw JobRefused(*had_no_place);
      if (spare_waits_ && may_move()) {
        const size_t next = (endpoint_ + 1) % endpoints_.size();
        if (!options_.node.earlier.waited) {
          notice(describe_lost_store(error) + "; this spare node waits at " +
                 endpoints_[next].text());
          options_.node.earlier.waited = true;
          options_.node.run_id = protocol->run_id();
        }
        protocol.reset();
        go_to(next);
        deadline = Deadline::after(options_.join_timeout);
        continue;
      }
      if (spare_waits_ || deadline.expired()) {
        post_end(kSystemError, describe_lost_store(error));
        return std::nullopt;
      }
      go_back();
    }
    protocol.reset();
    pause();
  }
}

bool JobMember::follow(NodeProtocol& protocol, bool hosted) {
  if (protocol.declined()) return false;
  milliseconds next_notice = options_.first_notice;
  milliseconds next_look = kLookForOthers;
  while (true) {
    const bool last = stopping();
    note_progress();
    run_commands(protocol);
    protocol.note_healings(generation_);
    protocol.beat(Clock::now());
    if (store_host_.empty()) store_host_ = protocol.name_of_store_host();
    while (auto notice = protocol.take_notice()) post(Notice{*notice});
    if (auto plan = protocol.take_plan()) {
      round_deadline_.reset();
      next_notice = options_.first_notice;
      next_look = kLookForOthers;
      if (plan->master_addr.empty()) {
        plan->master_addr = connector_.endpoint().host;
      }
      if (options_.serves_workers) {
        // Its host may be stopped for as long as a node may be silent.
        plan->line = protocol.open_line(
            Deadline::after(options_.node.keep_alive.allowance()));
        plan->line_is_renewed = may_move() && options_.node.heals && !elastic();
      }
      post(*plan);
    }
    if (protocol.take_exclusion()) {
      // It waits for as long as the job takes.
      round_deadline_.reset();
      post(Notice{
          "the job runs without this node, which takes part " +
          (protocol.may_grow()
               ? std::string("after the program's next snapshot, or after a "
                             "time")
               : "only if a worker fails and all start again: all " +
                     std::to_string(*limits().membership_changes) +
                     " membership changes are used "
                     "(--max-membership-changes)") +
          ", " + name_place()});
    }
    while (auto node = protocol.take_lost_node()) post(*node);
    if (auto named = protocol.take_question()) post(CauseWanted{*named});
    if (auto wait = protocol.take_wait()) post(NodesWait{*wait});
    if (auto verdict = protocol.take_verdict()) {
      round_deadline_.reset();
      next_notice = options_.first_notice;
      next_look = kLookForOthers;
      const bool ends = verdict->ends_job(limits());
      signalled_ = verdict->kind == Verdict::Kind::signalled;
      post(std::move(*verdict));
      if (ends) return false;
    }
    if (last) return false;
    if (round_deadline_ && hosted && may_move() &&
        round_deadline_->elapsed() > next_look) {
      next_look = round_deadline_->elapsed() + kLookForOthers;
      if (rejoin_the_others(protocol)) return true;
    }
    if (round_deadline_ && round_deadline_->expired()) {
      give_up_late_round(protocol);
    } else if (round_deadline_ && round_deadline_->elapsed() > next_notice) {
      next_notice = round_deadline_->elapsed() + options_.notice_interval;
      post(Notice{"waiting for " + name_wait(protocol) + ", for at most " +
                  seconds_text(options_.join_timeout) + ", " + name_place()});
    }
    protocol.await_news(kLongestWait, wake_fd_.get());
  }
}

// Returns what a round waits for: "nodes 1 and 2 of 3", or how many nodes there
// are if none in particular is awaited.
std::string JobMember::name_wait(NodeProtocol& protocol) const {
  const NodeDescription& node = options_.node;
  const auto absent = protocol.absent_nodes();
  if (!node.elastic()) {
    return name_numbers("node", absent) + " of " + std::to_string(node.nnodes);
  }
  return std::to_string(node.fewest()) + " to " + std::to_string(node.nnodes) +
         " nodes, of which " +
         std::to_string(node.nnodes - static_cast<int>(absent.size())) +
         (static_cast<int>(absent.size()) == node.nnodes - 1 ? " has"
                                                             : " have") +
         " come";
}

// Returns where this node waits: "at node0:29500, where this node hosts ...".
std::string JobMember::name_place() const {
  return "at " + connector_.endpoint().text() + ", where " + hosting_;
}

void JobMember::give_up_late_round(NodeProtocol& protocol) {
  const auto absent = protocol.absent_nodes();
  Verdict verdict;
  verdict.kind = Verdict::Kind::given_up;
  verdict.exit_code = kSystemError;
  verdict.text = "the agents waited " + seconds_text(options_.join_timeout) +
                 " " + name_place() + ", for ";
  if (options_.node.elastic()) {
    verdict.text += name_wait(protocol);
  } else {
    verdict.text += std::to_string(options_.node.nnodes) +
                    " nodes; absent: " + name_numbers("node", absent);
  }
  // If all nodes have come by now, the next look finds the plan.
  if (!absent.empty()) protocol.propose(protocol.round(), verdict);
}

void JobMember::depart(NodeProtocol& protocol, bool hosted) {
  protocol.depart();
  // The others may go on at another store. Then they must have heard why this
  // one ends, so that their workers have the time to end well.
  const bool leaves = !protocol.job_ended() && may_move();
  const auto may_end = [&] {
    return leaves ? protocol.others_have_gone_on()
                  : protocol.others_have_departed();
  };
  // A node that is paused or cut off learns the verdict when it is back, unless
  // it is lost: beat() finds that out. A signal is for all nodes, and its
  // sender waits.
  const bool all_must_know =
      protocol.job_ended() && !protocol.declined() && !signalled_;
  const Deadline deadline = Deadline::after(
      all_must_know ? options_.node.keep_alive.allowance() + kDepartAllowance
                    : kDepartAllowance);
  bool told = false;
  while (hosted && !may_end() && !deadline.expired() && !ends_anyway_) {
    note_progress();
    protocol.beat(Clock::now());
    while (auto notice = protocol.take_notice()) post(Notice{*notice});
    if (all_must_know && !told && deadline.elapsed() > kLongDeparture) {
      told = true;
      post(Notice{"waiting until " + protocol.name_of_those_left() +
                  " knows that the job has ended, for at most " +
                  seconds_text(options_.node.keep_alive.allowance()) + ", " +
                  name_place()});
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace lockstep::internal
