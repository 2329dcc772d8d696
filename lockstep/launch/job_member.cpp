#include "lockstep/launch/job_member.h"
#include "lockstep/launch/seconds_text.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPollInterval{50};
// How long the host of the store stays for nodes that have not departed.
constexpr milliseconds kDepartAllowance{5000};
// From when on an operation that has no answer is hopeless: the store's host
// is gone or its agent is stopped.
constexpr milliseconds kAnswerAllowance{3000};
// How often a member that is to end shuts what does not answer: the store's
// client connects anew where a connection breaks while it is being opened.
constexpr milliseconds kShutInterval{1000};
constexpr milliseconds kLongWait{10'000};
constexpr int kSystemError = 1;
constexpr int kUsageError = 2;

// "node 1" or "nodes 1, 3 and 4".
std::string list_nodes(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "node " : "nodes ";
  for (size_t at = 0; at < ranks.size(); ++at) {
    if (at > 0) text += at + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[at]);
  }
  return text;
}

FileDescriptor open_event() {
  FileDescriptor fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw_errno("eventfd of the job's events");
  return fd;
}

// Calls `noted` after each operation, as an agent makes many in a row.
class NotingStore : public AgentStore {
 public:
  NotingStore(std::unique_ptr<AgentStore> store, std::function<void()> noted)
      : store_(std::move(store)), noted_(std::move(noted)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, value);
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

 private:
  std::unique_ptr<AgentStore> store_;
  std::function<void()> noted_;
};

}  // namespace

JobMember::JobMember(JobMemberOptions options, StoreConnector::Open open)
    : options_(std::move(options)),
      connector_(options_.store,
                 [this, open = std::move(open)](const auto& address) {
                   note_progress();
                   auto store = open(address);
                   note_progress();
                   return std::make_unique<NotingStore>(
                       std::move(store), [this] { note_progress(); });
                 }),
      event_fd_(open_event()),
      progress_(Clock::now().time_since_epoch()),
      thread_([this] { work(); }) {}

JobMember::~JobMember() {
  std::unique_lock lock(mutex_);
  stop_ = true;
  changed_.notify_all();
  const auto ended = [this] { return ended_; };
  const Deadline deadline =
      Deadline::after(kDepartAllowance + kAnswerAllowance);
  while (!changed_.wait_for(lock, kShutInterval, ended)) {
    if (deadline.expired() || is_silent()) {
      shut_connections_to(connector_.endpoint().port);
    }
  }
  lock.unlock();
  thread_.join();
}

bool JobMember::is_silent() const {
  return Clock::now().time_since_epoch() - progress_.load() > kAnswerAllowance;
}

void JobMember::shut_if_silent() {
  const std::lock_guard lock(mutex_);
  if (!ended_ && is_silent()) {
    was_silent_ = true;
    shut_connections_to(connector_.endpoint().port);
  }
}

std::optional<JobEvent> JobMember::take_event() {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) {
    uint64_t count = 0;
    [[maybe_unused]] auto ignored =
        read(event_fd_.get(), &count, sizeof(count));
    return std::nullopt;
  }
  JobEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void JobMember::offer_round(int round, RoundOffer offer) {
  queue([this, round, offer = std::move(offer)](NodeProtocol& protocol) {
    protocol.offer_round(round, offer);
    round_deadline_ = Deadline::after(options_.join_timeout);
  });
}

void JobMember::report_success() {
  queue([](NodeProtocol& protocol) { protocol.report_success(); });
}

void JobMember::propose(int round, Verdict verdict) {
  queue([round, verdict = std::move(verdict)](NodeProtocol& protocol) {
    protocol.propose(round, verdict);
  });
}

void JobMember::queue(Command command) {
  const std::lock_guard lock(mutex_);
  commands_.push_back(std::move(command));
  changed_.notify_all();
}

void JobMember::run_commands(NodeProtocol& protocol) {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) command(protocol);
}

void JobMember::post(JobEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  const uint64_t one = 1;
  [[maybe_unused]] auto ignored = write(event_fd_.get(), &one, sizeof(one));
}

void JobMember::post_end(int exit_code, const std::string& text) {
  Verdict verdict;
  verdict.kind = Verdict::Kind::given_up;
  verdict.exit_code = exit_code;
  verdict.text = text;
  post(verdict);
}

void JobMember::post_lost_store(const AgentStoreError& error) {
  std::string text = "the agents' store at " + connector_.endpoint().text();
  if (!store_host_.empty())
    text = store_host_ + " was lost, and with it " + text;
  else
    text += " was lost";
  post_end(kSystemError,
           text + ": " +
               (was_silent_ ? "no answer for " + seconds_text(kAnswerAllowance)
                            : error.what()));
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
    const std::optional<OpenedStore> opened = join(protocol);
    if (opened) {
      try {
        follow(*protocol);
        depart(*protocol, opened->hosted);
      } catch (const AgentStoreError& error) {
        post_lost_store(error);
      }
    }
  } catch (const std::invalid_argument& error) {
    post_end(kUsageError, error.what());
  } catch (const std::exception& error) {
    post_end(kSystemError, error.what());
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

std::optional<OpenedStore> JobMember::join(
    std::optional<NodeProtocol>& protocol) {
  const Deadline deadline = Deadline::after(options_.join_timeout);
  const auto cancelled = [this] {
    note_progress();
    return stopping();
  };
  const auto notice = [this](const std::string& text) { post(Notice{text}); };
  while (true) {
    OpenedStore opened = connector_.open(cancelled, notice);
    NodeDescription node = options_.node;
    node.hosts_store = opened.hosted;
    protocol.emplace(*opened.store, node);
    try {
      Joined joined{protocol->join(), opened.reachable_host};
      store_host_ = protocol->name_of_store_host();
      if (!options_.local_addr.empty()) {
        joined.reachable_host = options_.local_addr;
      }
      if (opened.beyond_loopback) {
        notice("the agents' store listens at " + connector_.endpoint().text() +
               " on every interface, without authentication: for trusted "
               "networks only");
      }
      was_silent_ = false;  // until now nobody had to answer
      round_deadline_ = deadline;
      post(joined);
      return opened;
    } catch (const JobRefused&) {
      // A host lets those read why whom it told.
      try {
        depart(*protocol, opened.hosted);
      } catch (const AgentStoreError&) {
        // The reason that is being thrown says more.
      }
      throw;
    } catch (const JobClosed&) {
      if (cancelled()) return std::nullopt;
      if (deadline.expired()) throw;
    } catch (const AgentStoreError& error) {
      // Mostly the store of a job that was ending, and this job's comes next.
      if (cancelled()) return std::nullopt;
      if (deadline.expired()) {
        post_lost_store(error);
        return std::nullopt;
      }
    }
    protocol.reset();
    pause();
  }
}

void JobMember::follow(NodeProtocol& protocol) {
  bool told = false;
  while (true) {
    const bool last = stopping();
    note_progress();
    run_commands(protocol);
    protocol.beat(Clock::now());
    if (store_host_.empty()) store_host_ = protocol.name_of_store_host();
    if (auto plan = protocol.take_plan()) {
      round_deadline_.reset();
      told = false;
      post(*plan);
    }
    if (auto verdict = protocol.take_verdict()) {
      round_deadline_.reset();
      const bool ends =
          verdict->ends_job(protocol.round(), options_.node.max_restarts);
      post(std::move(*verdict));
      if (ends) return;
    }
    if (last) return;
    if (round_deadline_ && round_deadline_->expired()) {
      give_up_late_round(protocol);
    } else if (round_deadline_ && !told &&
               round_deadline_->elapsed() > kLongWait) {
      told = true;
      post(Notice{"waiting for " + list_nodes(protocol.absent_nodes()) +
                  " of " + std::to_string(options_.node.nnodes) +
                  ", for at most " + seconds_text(options_.join_timeout)});
    }
    pause();
  }
}

void JobMember::give_up_late_round(NodeProtocol& protocol) {
  const auto absent = protocol.absent_nodes();
  Verdict verdict;
  verdict.kind = Verdict::Kind::given_up;
  verdict.exit_code = kSystemError;
  verdict.text = "the agents waited " + seconds_text(options_.join_timeout) +
                 " at " + connector_.endpoint().text() + " for " +
                 std::to_string(options_.node.nnodes) +
                 " nodes; absent: " + list_nodes(absent);
  // With all there by now the plan comes with the next look.
  if (!absent.empty()) protocol.propose(protocol.round(), verdict);
}

void JobMember::depart(NodeProtocol& protocol, bool hosted) {
  protocol.depart();
  const Deadline deadline = Deadline::after(kDepartAllowance);
  while (hosted && !protocol.others_have_departed() && !deadline.expired()) {
    note_progress();
    protocol.beat(Clock::now());
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace lockstep
