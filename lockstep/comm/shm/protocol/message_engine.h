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

// Messages between two ranks, through one ring of bytes for each direction.
namespace lockstep::shm {

// One side of a message. Its state belongs to the engine, which holds it, and
// uses its data, until it has ended: dropping it is no cancelling.
class Message;

// All messages of one rank. Threads: any; one at a time drives.
//
// A message is a head (size, tag, dtype) and its bytes, streamed through the
// ring of its direction: a large one through a small ring, while both sides
// drive. Who receives takes what fits the first head in a ring; where that is
// of another tag than any receive that waits, the message is put aside in
// memory of its own, so that those behind it can be reached. Where no receive
// waits for its sender at all it stays in the ring.
//
// Giving up. A message whose wait runs out of time, or that give_up() is called
// for, ends as failed, and nobody uses its data from then on. Messages and
// receives still belong together in the order in which they were started:
// - A receive that was given up has taken no message. What was on its way to it
//   goes, whole, to the next receive of that tag; what has come by then is
//   copied into memory of its own first.
// - A send that was given up is a message without content. The receive that it
//   belongs to fails with MessageGivenUp, which names the sender. It waits for
//   its place in the ring like any other message, but without its data.
//
// What a peer had written before it left or died is received. Otherwise its
// messages fail with GroupBroken, which names it, and so do all others where it
// said that the group is broken.
class MessageEngine {
 public:
  MessageEngine(const Segment& segment, Waiting& waiting, int rank, int size);
  MessageEngine(const MessageEngine&) = delete;
  MessageEngine& operator=(const MessageEngine&) = delete;
  // Forgets what is under way.
  ~MessageEngine();

  // Do at once what can be done without waiting. std::invalid_argument for a
  // peer that is none; GroupBroken in a broken group.
  std::shared_ptr<Message> start_send(int to, int32_t tag, ConstBytes data,
                                      DType dtype);
  std::shared_ptr<Message> start_receive(int from, int32_t tag, Bytes data,
                                         DType dtype);
  // Blocks until it has ended. Gives it up after `timeout`. Throws
  // MessageGivenUp, GroupBroken or CallMismatch if it failed.
  void wait(Message& message, milliseconds timeout);
  bool has_ended(Message& message);
  // Does nothing to a message that has ended. `why` ends the words of its
  // failure.
  void give_up(Message& message, const std::string& why);
  // Fails all that is under way, and all that is started later, with
  // GroupBroken, which begins with `why`. Afterwards no data is used any more.
  void end_all(const std::string& why);
  // Throws what it failed with; nothing while it is under way.
  static void throw_if_failed(const Message& message);
  // Who sent it; of a receive that has ended well.
  static int source(const Message& message);

  // Whether drive() could be of use: some message is under way. Cheap.
  bool busy() const { return under_way_.load(std::memory_order_relaxed) > 0; }
  // Moves what can be moved, without waiting; returns whether anything moved.
  // Every waiting thread of the rank calls this, a collective's too: the peer
  // it waits for may wait for the rest of a message. While another thread
  // drives it does nothing; with seq_cst, the last look before sleeping, it
  // waits until that one is done.
  bool drive(std::memory_order order = std::memory_order_acquire);

  // Drives while messages are under way, sleeps meanwhile, and returns soon
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
    Shared receiver{};  // what takes it when it is complete
  };
  // To one rank. The first of the queue is in the ring from `begun` on. One
  // that has ended was given up: its data is not used any more.
  struct Outgoing {
    RingWriter ring;
    std::deque<Shared> queue{};
    bool begun = false;
    size_t done = 0;
  };
  // From one rank. `head` is of the message that is being taken out: into its
  // receiver, or aside; dropped where there is neither.
  struct Incoming {
    RingReader ring;
    size_t posted = 0;  // receives that wait for this very rank
    std::optional<MessageHead> head{};
    size_t done = 0;
    Shared receiver{};
    Aside* aside = nullptr;
    bool cut_off = false;  // in the middle of a message: of no use any more
  };

  void check_peer(int peer, const char* argument) const;
  // From here on with mutex_ held, but for look(), look_if_due() and
  // described().
  size_t& posted(int from);
  bool move();
  bool push(int to);
  bool pull(int from);
  bool begin(int from);
  void finish(int from);
  Aside* put_aside(int from, const MessageHead& head);
  std::unique_ptr<std::byte[]> room_for(int from, const MessageHead& head);
  // The first receive that waits for it.
  Shared match(int source, int32_t tag);
  Aside* find_aside(const Message& receive);
  void hand_over(Aside& aside);
  void erase(const Aside& aside);
  // What is left of the queue when a message of it was moved or given up.
  void pop(Outgoing& out);
  void let_go(Message& receive);

  void end(Message& message);
  // All of `head`'s bytes are in the receive's memory, if they fit and were
  // sent.
  void conclude(Message& receive, int source, const MessageHead& head);
  void fail_given_up(Message& receive, int source, const MessageHead& head);
  void fail_mismatch(Message& receive, int source, const MessageHead& head);
  static std::string described(const MessageHead& head);

  // What cannot be completed any more fails.
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
  std::list<Shared> receives_;         // that nothing has come for, as started
  size_t posted_to_any_ = 0;           // of them
  std::list<Aside> asides_;            // as they came
  int first_ = 0;                      // whose ring is looked at first
  std::vector<std::string> departed_;  // by rank; empty while it is here
  std::string broken_;                 // why nothing goes any more

  // Messages, and those that are being put aside.
  std::atomic<int> under_way_{0};
  std::atomic<int64_t> next_look_{0};  // steady_clock's ticks
};

}  // namespace lockstep::shm
