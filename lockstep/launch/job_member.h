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
#include "lockstep/launch/node_protocol.h"
#include "lockstep/launch/store_connector.h"

namespace lockstep {

struct JobMemberOptions {
  NodeDescription node{};  // hosts_store is filled in
  StoreConnectorOptions store{};
  // By which the other nodes reach this one; found out where empty.
  std::string local_addr{};
  // How long a round may wait for its nodes.
  std::chrono::milliseconds join_timeout{600'000};
  // This node cannot take part: it says so (NodeProtocol::decline) and departs.
  std::optional<Verdict> declines{};
};

// This agent has its node rank.
struct Joined {
  Membership membership{};
  bool hosts_store = false;
  std::string reachable_host{};  // by which the others reach this node
  std::string master_addr{};     // for RoundOffer
};
// A line for the user.
struct Notice {
  std::string text{};
};
// A node wants to know whether a worker here was failing (ask_for_cause()).
struct CauseWanted {};
using JobEvent = std::variant<Joined, Notice, RoundPlan, CauseWanted, Verdict>;

// One agent's membership in a job of several nodes: opens the store, follows
// the protocol (node_protocol.h) and keeps the heartbeat, all in one thread of
// its own, so that the agent's event loop never waits for the network. That
// loop polls event_fd() and takes events; what it has to say is queued and
// written within 50 ms, mostly at once.
//
// The verdict that ends the job (Verdict::ends_job) is the last event. The
// thread then departs; if it hosts the store it first stays for the others, up
// to 5 s. A store that is lost is such a
// verdict, too; while joining it is tried again until `join_timeout`. Its
// connection is broken by the kernel 3 s after the other host has ceased to
// acknowledge anything, and by shut_if_silent() if the thread gets no answer
// for KeepAlive::allowance(), as from an agent that is stopped. Nothing else
// may connect to the store's port from this process.
class JobMember {
 public:
  // Starts the thread. Throws std::system_error.
  explicit JobMember(JobMemberOptions options,
                     StoreConnector::Open open = open_c10d_store);
  // Writes what is queued, departs, ends the thread: blocks for at most 12 s,
  // mostly for some milliseconds, and for a look-up of the resolver where that
  // is under way.
  ~JobMember();
  JobMember(const JobMember&) = delete;
  JobMember& operator=(const JobMember&) = delete;

  // Readable while there are events.
  int event_fd() const { return event_fd_.get(); }
  std::optional<JobEvent> take_event();
  // To be called every second: a longer gap is taken for a pause of this
  // process, in which it could not have heard an answer.
  void shut_if_silent();

  // These return at once. After `Joined`: asks for the plan of a round.
  void offer_round(int round, RoundOffer offer);
  // Every worker of this node has ended well.
  void report_success();
  // NodeProtocol::ask_for_cause().
  void ask_for_cause();
  // Ends `round` unless it has a verdict; the answer is the round's verdict,
  // this or another. Before `Joined` too.
  void propose(int round, Verdict verdict);

 private:
  using Command = std::function<void(NodeProtocol&)>;
  using Clock = std::chrono::steady_clock;

  void work() noexcept;
  // Returns the opened store once this agent has joined.
  std::optional<OpenedStore> join(std::optional<NodeProtocol>& protocol);
  void follow(NodeProtocol& protocol);
  void give_up_late_round(NodeProtocol& protocol);
  void depart(NodeProtocol& protocol, bool hosted);

  void post(JobEvent event);
  void post_end(int exit_code, const std::string& text);
  void post_lost_store(const AgentStoreError& error);
  std::string own_connection() const;
  void queue(Command command);
  void run_commands(NodeProtocol& protocol);
  void pause();
  bool stopping();
  bool is_silent();
  void note_progress() { ++progress_; }

  JobMemberOptions options_;
  StoreConnector connector_;
  FileDescriptor event_fd_;
  std::atomic<uint64_t> progress_{0};  // counts answers
  // For is_silent(): how many answers it has seen, since when no other has
  // come, and a clock that leaves out the time in which this process was
  // stopped.
  uint64_t known_progress_ = 0;
  AwakeClock::Clock::duration silent_since_{};
  AwakeClock awake_{options_.node.keep_alive.longest_step()};
  std::atomic<bool> was_silent_{false};  // so that its connection was shut
  std::string store_host_;               // for the message when it is lost
  std::optional<Deadline> round_deadline_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<JobEvent> events_;
  std::vector<Command> commands_;
  bool stop_ = false;
  bool ended_ = false;  // the thread is done

  std::thread thread_;
};

// For a node that cannot take part, as its `options.declines` says: tells the
// nodes that wait for it. Blocks until they have been told, for at most
// `options.join_timeout` to reach the store, and, if the store is hosted here,
// 5 s more for the others to come. Never throws: there is nobody to tell then.
void decline_job(JobMemberOptions options,
                 StoreConnector::Open open = open_c10d_store) noexcept;

}  // namespace lockstep
