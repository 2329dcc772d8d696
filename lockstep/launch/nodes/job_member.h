#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/nodes/node_protocol.h"
#include "lockstep/launch/nodes/store_connector.h"

namespace lockstep::internal {

struct JobMemberOptions {
  NodeDescription node{};  // JobMember sets hosts_store
  StoreConnectorOptions store{};
  // Where the nodes meet if the store is lost with its host: at the next one,
  // after the last at the first again. An agent that starts looks at them for
  // the store of a job that has moved.
  std::vector<Endpoint> further_endpoints{};
  // The address by which the other nodes reach this one; if it is empty, it is
  // found out.
  std::string local_addr{};
  // Whether each plan comes with a line for the workers' calls.
  bool serves_workers = false;
  // How long a round may wait for its nodes.
  std::chrono::milliseconds join_timeout{600'000};
  // When the user is told for the first time which nodes a round waits for, and
  // how often after that.
  std::chrono::milliseconds first_notice{10'000};
  std::chrono::milliseconds notice_interval{30'000};
  // Set if this node cannot take part: it then declines with this verdict
  // (NodeProtocol::decline()) and departs.
  std::optional<Verdict> declines{};
};

// This agent has joined the job and has its node rank.
struct Joined {
  Membership membership{};
  bool hosts_store = false;
  std::string reachable_host{};  // this node's address for the others
  std::string master_addr{};     // for RoundOffer
  // The round before goes on at another store: this node offers none, and the
  // calls of its workers go over this line from now on.
  std::shared_ptr<StoreLine> line{};
};
// This agent is a spare one, and waits for a rank.
struct SpareWaits {
  std::string run_id{};
};
// A line for the user.
struct Notice {
  std::string text{};
};
// A node asks whether a worker here was failing (ask_for_cause()).
struct CauseWanted {
  NamedRanks named{};
};
// Nodes wait until this node, which hosts the store, tells of a snapshot of the
// program (report_snapshot()), or for a time.
struct NodesWait {
  std::string text{};  // for the user
};
// On the host of the store, a LostNode: this agent announces that the job goes
// on without its ranks.
using JobEvent = std::variant<SpareWaits, Joined, Notice, RoundPlan, LostNode,
                              CauseWanted, NodesWait, Verdict>;

// One agent's membership in a job of several nodes: opens the store, follows
// the protocol (node_protocol.h) and keeps the heartbeat, all in one thread of
// its own, so that the agent's event loop never waits for the network. That
// loop polls event_fd() and takes events. What the loop has to tell the other
// nodes is queued; the thread writes it at once.
//
// The verdict that ends the job (Verdict::ends_job) is the last event. The
// thread then departs; if it hosts the store, it stays first until the others
// know the verdict or were lost. If the store is lost, that is such a verdict
// too, unless the job may go on: at another endpoint, or, if there are restarts
// left and the store was only out of reach, at the same one. Then the verdict
// says so (Verdict::moves), and another `Joined` comes once this agent has
// joined there. If the workers can go on without the host of the store, no
// verdict comes, but such a `Joined` with a line for them. While the agent is
// joining, the store is tried again until `join_timeout`.
//
// A connection to our own store that breaks is replaced by another one
// (Rejoining, agent_store.h), and a line says so; nothing else changes. The
// store counts as lost if the thread gets no answer for KeepAlive::allowance(),
// because the network is cut or the other agent is stopped, which
// shut_if_silent() looks at; or if its process has ended. No other code of this
// process may connect to the store's port. Each plan may come with one
// connection more, for the workers (RoundPlan::line).
class JobMember {
 public:
  // Starts the thread. Throws std::system_error.
  explicit JobMember(JobMemberOptions options);
  // Writes what is queued, departs and ends the thread. This mostly blocks for
  // some milliseconds, and for at most 12 s; if a look-up of the resolver is
  // under way, also until that ends.
  ~JobMember();
  JobMember(const JobMember&) = delete;
  JobMember& operator=(const JobMember&) = delete;

  // Whether nodes may come and go.
  bool elastic() const { return options_.node.elastic(); }
  bool is_spare() const { return options_.node.is_spare; }
  ChangeLimits limits() const { return options_.node.limits(); }
  // Whether the job goes on at another store if this one is lost.
  bool may_move() const { return endpoints_.size() > 1; }

  // Whether the thread has ended, after the last event: the other nodes know
  // how the job ended, or were lost.
  bool departed();
  // Does not wait for other nodes any more.
  void leave_at_once() { ends_anyway_ = true; }

  // Readable while there are events, and once departed().
  int event_fd() const { return event_fd_.get(); }
  std::optional<JobEvent> take_event();
  // Gives the store up if the thread has had no answer for
  // KeepAlive::allowance(). Must be called every second: a longer gap counts as
  // a pause of this process, in which it could not have heard an answer.
  void shut_if_silent();

  // The functions below return at once.

  // Offers this node for `round`, whose plan then comes as an event. Only after
  // `Joined`.
  void offer_round(int round, RoundOffer offer);
  // Reports that every worker of this node can be healed
  // (NodeProtocol::report_healing()); that every one has ended well; that all
  // were given up.
  void report_healing();
  void report_success();
  void report_given_up();
  // Says which is the last generation of the round that this node knows, and
  // whether its workers can go on if the store is lost with its host.
  void note_generation(int generation, bool goes_on) {
    generation_ = generation;
    goes_on_ = goes_on;
  }
  // See NodeProtocol::ask_for_cause().
  void ask_for_cause(NamedRanks named);
  // Answers NodesWait: a worker here has written a snapshot since.
  void report_snapshot();
  // Ends `round` with `verdict` unless the round has one already. The round's
  // verdict, this one or another, then comes as an event. Allowed before
  // `Joined` too.
  void propose(int round, Verdict verdict);

 private:
  using Command = std::function<void(NodeProtocol&)>;
  using Clock = std::chrono::steady_clock;

  StoreConnectorOptions noting(StoreConnectorOptions options);
  StoreConnectorOptions rejoining(StoreConnectorOptions options);
  void tell_of_broken_link(const std::string& why);
  void tell_of_whole_link();
  void shut_store();
  void work() noexcept;
  // Returns the first other endpoint at which there is a store of this job.
  std::optional<size_t> find_other_store();
  // Posts `verdict` and goes to another endpoint, unless that ends the job.
  // Returns whether it did.
  bool move(const NodeProtocol& protocol, Verdict verdict, size_t endpoint);
  bool move_on(const NodeProtocol& protocol, const AgentStoreError& error);
  // The same for a round that can go on. Returns false if it cannot.
  bool go_on(const NodeProtocol& protocol, const std::string& loss,
             size_t endpoint);
  void go_to(size_t endpoint);
  void join_again(const NodeProtocol& protocol, const std::string& why);
  std::string name_store() const;
  std::optional<Membership> join_as_spare(NodeProtocol& protocol);
  void post_not_resumed(const Membership& membership);
  // Returns the opened store once this agent has joined.
  std::optional<OpenedStore> join(std::optional<NodeProtocol>& protocol);
  // Returns whether the job goes on at another store.
  bool follow(NodeProtocol& protocol, bool hosted);
  bool rejoin_the_others(NodeProtocol& protocol);
  void give_up_late_round(NodeProtocol& protocol);
  std::string name_wait(NodeProtocol& protocol) const;
  std::string name_place() const;
  void depart(NodeProtocol& protocol, bool hosted);

  void post(JobEvent event);
  void post_end(int exit_code, const std::string& text);
  std::string describe_lost_store(const AgentStoreError& error);
  void queue(Command command);
  // The same for what is about the store of the last `Joined` that was taken.
  // If this agent has joined another one since, does nothing.
  void queue_for_store(Command command);
  void run_commands(NodeProtocol& protocol);
  void pause();
  void wake();
  bool stopping();
  // Returns for how long the store has given no answer while this process ran.
  AwakeClock::Clock::duration silence();
  // Returns a line for the user, or nothing. The caller holds mutex_.
  std::string tell_of_silence(bool silent);
  void note_progress() {
    answered_ = Clock::now();
    ++progress_;
  }

  JobMemberOptions options_;
  std::vector<Endpoint> endpoints_;
  size_t endpoint_ = 0;  // the one of connector_
  // Replaced by the thread, under mutex_.
  StoreConnector connector_;
  FileDescriptor event_fd_;
  FileDescriptor wake_fd_;  // readable while the thread has something to do
  std::atomic<uint64_t> progress_{0};  // counts answers
  // For silence(): the number of answers that it has seen, the time since
  // which no other has come, and a clock that leaves out the time in which this
  // process was stopped.
  uint64_t known_progress_ = 0;
  AwakeClock::Clock::duration silent_since_{};
  AwakeClock awake_{options_.node.keep_alive.longest_step()};
  std::atomic<bool> was_silent_{false};   // so the store was given up
  std::atomic<bool> ends_anyway_{false};  // this member, without an answer
  std::atomic<int> generation_{0};        // both of note_generation()
  std::atomic<bool> goes_on_{false};
  // Both for the thread: this node has no rank yet; SpareWaits was posted.
  bool spare_ = options_.node.is_spare;
  bool spare_waits_ = false;
  bool signalled_ = false;  // the last verdict
  std::string store_host_;  // for the message if the store is lost
  std::string hosting_;     // OpenedStore::hosting
  // The last answer of the store; when a connection that broke had its last.
  Clock::time_point answered_{};
  Clock::time_point broken_since_{};
  std::optional<Deadline> round_deadline_;

  std::mutex mutex_;
  // name_store(), if this agent has joined at a store that replaces no
  // connection, so that nothing else tells of a silence.
  std::string silent_store_{};
  bool told_of_silence_ = false;
  std::condition_variable changed_;
  std::deque<JobEvent> events_;
  std::vector<Command> commands_;
  int joins_ = 0;        // how many `Joined` were posted
  int joins_taken_ = 0;  // and taken
  bool stop_ = false;
  bool ended_ = false;  // the thread is done

  std::thread thread_;
};

// Tells the nodes that wait for this one that it cannot take part, as
// `options.declines` says. Blocks until they have been told: for at most
// `options.join_timeout` to reach the store and, if the store is hosted here,
// for the others to come 5 s more. Never throws: if it fails, there is no node
// that it could tell.
void decline_job(JobMemberOptions options) noexcept;

}  // namespace lockstep::internal
