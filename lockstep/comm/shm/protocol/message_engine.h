#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/group.h"
#include "lockstep/comm/shm/protocol/message_ring.h"
#include "lockstep/comm/shm/protocol/waiting.h"
#include "lockstep/kernels/dtype.h"

// Messages between two ranks, through one ring of bytes for each direction.
namespace lockstep::internal::shm {

// One side of a message. The engine holds it, and uses its state and its data,
// until the message has ended. Dropping it does not cancel the message. What
// was asked for does not change. Until `ended` is true, the outcome belongs to
// the thread that drives.
class Message {
 public:
  enum class Failure : uint8_t { none, mismatch, given_up, broken };

  bool is_send;
  int peer;  // or Group::kAnySource
  int32_t tag;
  const std::byte* from;  // of a send
  std::byte* to;          // of a receive
  size_t bytes;
  kernels::DType dtype;

  int source{-1};
  Failure failure{Failure::none};
  std::string words{};  // of the failure
  // Stored after the outcome. seq_cst: a thread that sleeps for the message
  // reads this once more after it has said that it sleeps.
  std::atomic<bool> ended{false};
};

// All messages of one rank. Threads: any; one at a time drives, that is, moves
// bytes between rings and memory.
//
// A message is a head (size, tag, dtype) and its bytes, streamed through the
// ring of its direction: a large one through a small ring, while both sides
// drive. A receive takes the first message of its tag. If the first message in
// a ring has another tag than all receives that wait for its sender, the
// message is put aside in memory of its own, so that the messages after it can
// be reached. If no receive at all waits for its sender, the message stays in
// the ring.
//
// Giving up. A message whose wait times out, or for which give_up() is called,
// fails, and its data is not used from then on. Messages and receives still
// belong together in the order in which they were started:
// - A receive that was given up has taken no message. The message that was on
//   its way to it goes, whole, to the next receive of that tag; the part that
//   has come by then is copied into memory of its own first.
// - A send that was given up is a message without content. The receive that it
//   belongs to fails with MessageGivenUp, which names the sender. The send
//   waits for its place in the ring like any other message, but without its
//   data.
//
// Messages that a peer had written before it left or died are received. Its
// other messages fail with GroupBroken, which names it. If the peer said that
// the group is broken, all other messages fail, too.
class MessageEngine {
 public:
  MessageEngine(const Segment& segment, Waiting& waiting, int rank, int size);
  MessageEngine(const MessageEngine&) = delete;
  MessageEngine& operator=(const MessageEngine&) = delete;
  // Forgets all messages that are under way.
  ~MessageEngine();

  // Both start a message and do at once what can be done without waiting. They
  // throw std::invalid_argument if the peer is not another rank of the group;
  // GroupBroken if the group is broken.
  std::shared_ptr<Message> start_send(int to, int32_t tag, ConstBytes data,
                                      DType dtype);
  std::shared_ptr<Message> start_receive(int from, int32_t tag, Bytes data,
                                         DType dtype);
  // Waits until the message has ended; gives it up after `timeout`. Throws
  // MessageGivenUp, GroupBroken or CallMismatch if it has failed.
  void wait(Message& message, milliseconds timeout);
  bool has_ended(Message& message);
  // Gives the message up, unless it has ended. `why` ends the words of its
  // failure.
  void give_up(Message& message, const std::string& why);
  // Fails all messages that are under way, and all that are started later, with
  // GroupBroken, whose words begin with `why`. Afterwards no data is used any
  // more.
  void end_all(const std::string& why);
  // Throws the failure of the message; nothing while it is under way.
  static void throw_if_failed(const Message& message);
  // Returns the rank that sent the message, for a receive that has ended well.
  static int source(const Message& message);

  // Returns whether some message is under way, so that drive() could be of use.
  // Cheap.
  bool busy() const { return under_way_.load(std::memory_order_relaxed) > 0; }
  // Moves what can be moved, without waiting; returns whether anything moved.
  // Every thread of the rank that waits calls this, in a collective too: the
  // peer that it waits for may be waiting for the rest of a message. If another
  // thread is driving, this does nothing; but with seq_cst, the last look
  // before sleeping, it waits until that thread is done.
  bool drive(std::memory_order order = std::memory_order_acquire);

  // Drives while messages are under way, sleeps in between, and returns soon
  // after `stop` was requested. For a thread of its own.
  void serve(std::stop_token stop);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Shared = std::shared_ptr<Message>;

  // A message that was put aside, or is about to be.
  struct Aside {
    int source;
    MessageHead head;
    std::unique_ptr<std::byte[]> data;  // none if the sender gave it up
    bool complete = false;
    Shared receiver{};  // takes the message when it is complete
  };
  // The sends to one rank. When `begun` is true, the first of the queue is in
  // the ring. If a message of the queue has ended it was given up: its data is
  // not used any more.
  struct Outgoing {
    RingWriter ring;
    std::deque<Shared> queue{};
    bool begun = false;
    size_t done = 0;
  };
  // The messages from one rank. `head` is that of the message that is being
  // taken out of the ring: into its receiver, or aside; it is dropped if there
  // is neither.
  struct Incoming {
    RingReader ring;
    size_t posted = 0;  // receives that wait for this rank, not for any
    std::optional<MessageHead> head{};
    size_t done = 0;
    Shared receiver{};
    Aside* aside = nullptr;
    bool cut_off = false;  // in the middle of a message: the ring is useless
  };

  void check_peer(int peer, const char* argument) const;
  // The caller of the following holds mutex_, except for look(), look_if_due()
  // and described().
  size_t& posted(int from);
  bool move();
  bool push(int to);
  bool pull(int from);
  bool begin(int from);
  void finish(int from);
  Aside* put_aside(int from, const MessageHead& head);
  std::unique_ptr<std::byte[]> room_for(int from, const MessageHead& head);
  // Returns the first receive that waits for such a message, and takes it out
  // of receives_; nullptr if there is none.
  Shared match(int source, int32_t tag);
  Aside* find_aside(const Message& receive);
  void hand_over(Aside& aside);
  void erase(const Aside& aside);
  // Takes the first message, which was moved or given up, out of the queue.
  void pop(Outgoing& out);
  void let_go(Message& receive);

  void end(Message& message);
  // Ends a receive: all of the message's bytes are in its memory, if they fit
  // and were sent.
  void conclude(Message& receive, int source, const MessageHead& head);
  void fail_given_up(Message& receive, int source, const MessageHead& head);
  void fail_mismatch(Message& receive, int source, const MessageHead& head);
  static std::string described(const MessageHead& head);

  // These fail the messages that cannot be completed any more.
  void look();
  void look_if_due();
  void settle();
  void cut_off_from(int from, const std::string& why);
  std::optional<std::string> hopeless(int peer) const;
  void fail(Message& message, const std::string& why, size_t done = 0);
  std::string described(const Message& message) const;

  Waiting& waiting_;
  const int rank_;
  const int size_;

  std::mutex mutex_;  // guards all below, and both ends of the rings
  std::condition_variable_any started_;
  std::vector<Outgoing> outgoing_;  // by rank
  std::vector<Incoming> incoming_;
  std::list<Shared> receives_;         // those without a message, as started
  size_t posted_to_any_ = 0;           // how many of them take any source
  std::list<Aside> asides_;            // as they came
  int first_ = 0;                      // the rank whose ring is read first
  std::vector<std::string> departed_;  // by rank; empty while it is here
  std::string broken_;                 // why no message can go on, or empty

  // How many messages are under way or being put aside.
  std::atomic<int> under_way_{0};
  std::atomic<int64_t> next_look_{0};  // steady_clock's ticks
};

}  // namespace lockstep::internal::shm
