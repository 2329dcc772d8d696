#include "lockstep/comm/shm/protocol/message_engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm {
namespace {

// How many messages of one ring a drive() moves, so that threads that wait for
// the mutex, and other rings, get their turn.
constexpr int kAtOnce = 16;

bool fits(const Message& receive, const MessageHead& head) {
  return receive.bytes == head.bytes &&
         receive.dtype == static_cast<DType>(head.dtype);
}

bool is_sound(const MessageHead& head) {
  return head.magic == MessageHead::kMagic &&
         head.dtype < kernels::kDTypeCount &&
         head.content <= MessageHead::Content::given_up;
}

bool was_given_up(const MessageHead& head) {
  return head.content == MessageHead::Content::given_up;
}

}  // namespace

MessageEngine::MessageEngine(const Segment& segment, Waiting& waiting, int rank,
                             int size)
    : waiting_(waiting), rank_(rank), size_(size), departed_(size) {
  outgoing_.reserve(size);
  incoming_.reserve(size);
  for (int peer = 0; peer < size; ++peer) {
    outgoing_.push_back({.ring = {segment, waiting, rank, peer}});
    incoming_.push_back({.ring = {segment, waiting, peer, rank}});
  }
}

MessageEngine::~MessageEngine() = default;

std::shared_ptr<Message> MessageEngine::start_send(int to, int32_t tag,
                                                   ConstBytes data,
                                                   DType dtype) {
  check_peer(to, "to");
  waiting_.throw_if_broken();
  const auto message = std::make_shared<Message>(
      true, to, tag, static_cast<const std::byte*>(data.data), nullptr,
      data.size, dtype);
  {
    const Lock lock(mutex_);
    ++under_way_;
    if (const auto why = hopeless(to)) {
      fail(*message, *why);
      return message;
    }
    outgoing_[to].queue.push_back(message);
    push(to);
  }
  if (!message->ended) started_.notify_one();
  return message;
}

std::shared_ptr<Message> MessageEngine::start_receive(int from, int32_t tag,
                                                      Bytes data, DType dtype) {
  if (from != Group::kAnySource) {
    check_peer(from, "from");
  } else if (size_ == 1) {
    throw std::invalid_argument(
        "this rank cannot receive from any rank: its group has no other rank");
  }
  waiting_.throw_if_broken();
  const auto message = std::make_shared<Message>(
      false, from, tag, nullptr, static_cast<std::byte*>(data.data), data.size,
      dtype);
  {
    const Lock lock(mutex_);
    ++under_way_;
    if (Aside* aside = find_aside(*message)) {
      aside->receiver = message;
      if (aside->complete) hand_over(*aside);
      return message;
    }
    receives_.push_back(message);
    ++posted(from);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != from && from != Group::kAnySource) continue;
      // If the rank has gone, take all that it had written: there will be no
      // more.
      while (pull(peer) && !departed_[peer].empty()) {
      }
    }
    if (!message->ended && hopeless(from)) settle();
  }
  if (!message->ended) started_.notify_one();
  return message;
}

void MessageEngine::wait(Message& message, milliseconds timeout) {
  const auto ready = [&](std::memory_order order) {
    if (!message.ended) drive(order);
    return message.ended.load();
  };
  Patience patience(timeout);
  if (!waiting_.spin(ready)) {
    const Deadline deadline = patience.deadline();
    if (waiting_.sleep(ready, Waiting::kMessages, deadline,
                       [this] { look(); }) == Waiting::Outcome::timed_out) {
      give_up(message, (message.is_send ? " has not been taken after "
                                        : " has not come after ") +
                           std::to_string(deadline.elapsed().count()) +
                           " ms (allowed " +
                           std::to_string(deadline.allowed().count()) +
                           " ms), and was given up");
    }
  }
  throw_if_failed(message);
}

bool MessageEngine::has_ended(Message& message) {
  if (message.ended) return true;
  drive();
  if (!message.ended) look_if_due();
  return message.ended;
}

void MessageEngine::give_up(Message& message, const std::string& why) {
  // A thread that drives uses the data with this mutex held, so no thread uses
  // it after this returns.
  const Lock lock(mutex_);
  if (message.ended) return;
  if (!message.is_send) let_go(message);
  if (message.ended) return;  // it did not fit its message, and has failed
  message.failure = Message::Failure::given_up;
  message.words = described(message) + why;
  // A send keeps its place in the queue, and is under way until the receiver
  // has been told that it was given up.
  if (message.is_send) ++under_way_;
  end(message);
  if (message.is_send) push(message.peer);
}

// Takes a receive out of wherever it waits for its message.
void MessageEngine::let_go(Message& receive) {
  const auto is_it = [&](const Shared& one) { return one.get() == &receive; };
  if (const auto found = std::ranges::find_if(receives_, is_it);
      found != receives_.end()) {
    receives_.erase(found);
    --posted(receive.peer);
    return;
  }
  for (Aside& aside : asides_) {
    if (is_it(aside.receiver)) {
      aside.receiver = match(aside.source, aside.head.tag);
      return;
    }
  }
  for (int from = 0; from < size_; ++from) {
    Incoming& in = incoming_[from];
    if (!is_it(in.receiver)) continue;
    const Shared kept = std::move(in.receiver);
    // If the message does not fit, the receive fails and the rest of the
    // message is dropped, as without giving up.
    if (!fits(receive, *in.head)) {
      return fail_mismatch(receive, from, *in.head);
    }
    in.aside = put_aside(from, *in.head);
    if (!in.aside) return;
    if (in.done > 0) kernels::copy(in.aside->data.get(), receive.to, in.done);
    in.aside->receiver = match(from, in.head->tag);
    return;
  }
}

void MessageEngine::end_all(const std::string& why) {
  const Lock lock(mutex_);
  if (broken_.empty()) broken_ = why;
  settle();
}

void MessageEngine::throw_if_failed(const Message& message) {
  if (!message.ended) return;
  switch (message.failure) {
    case Message::Failure::none:
      return;
    case Message::Failure::mismatch:
      throw CallMismatch(message.words);
    case Message::Failure::given_up:
      throw MessageGivenUp(message.words);
    case Message::Failure::broken:
      throw GroupBroken(message.words);
  }
}

int MessageEngine::source(const Message& message) { return message.source; }

bool MessageEngine::drive(std::memory_order order) {
  if (!busy()) return false;
  Lock lock(mutex_, std::defer_lock);
  if (order == std::memory_order_seq_cst) {
    // Wait for the mutex: another thread may have looked into the ring before
    // the bytes came, and may not look again.
    lock.lock();
  } else if (!lock.try_lock()) {
    return false;
  }
  return move();
}

void MessageEngine::serve(std::stop_token stop) {
  const Waiting::Helper helper;
  const std::stop_callback wake(stop,
                                [this] { waiting_.wake_for_message(rank_); });
  const auto idle = [&](std::memory_order order) {
    drive(order);
    return stop.stop_requested() || !busy();
  };
  while (true) {
    {
      Lock lock(mutex_);
      started_.wait(lock, stop, [this] { return busy(); });
    }
    if (stop.stop_requested()) return;
    if (!waiting_.spin(idle)) {
      waiting_.sleep(idle, Waiting::kMessages,
                     Deadline::after(std::chrono::hours(1)),
                     [this] { look(); });
    }
  }
}

void MessageEngine::check_peer(int peer, const char* argument) const {
  if (peer >= 0 && peer < size_ && peer != rank_) return;
  throw std::invalid_argument(
      std::string(argument) + " = " + std::to_string(peer) +
      (peer == rank_
           ? " is this rank itself; name another"
           : " is not a rank of this group of " + std::to_string(size_)));
}

size_t& MessageEngine::posted(int from) {
  return from == Group::kAnySource ? posted_to_any_ : incoming_[from].posted;
}

bool MessageEngine::move() {
  bool moved = false;
  for (int to = 0; to < size_; ++to) moved |= push(to);
  // Begin with another rank each time, so that a rank that sends much does not
  // keep a receive from any source from the messages of others.
  first_ = (first_ + 1) % size_;
  for (int i = 0; i < size_; ++i) moved |= pull((first_ + i) % size_);
  return moved;
}

bool MessageEngine::push(int to) {
  Outgoing& out = outgoing_[to];
  bool moved = false;
  for (int i = 0; i < kAtOnce && !out.queue.empty(); ++i) {
    const Message& message = *out.queue.front();
    const bool given_up = message.ended;
    if (!out.begun) {
      using Content = MessageHead::Content;
      if (!out.ring.begin(
              {.bytes = message.bytes,
               .tag = message.tag,
               .dtype = static_cast<uint8_t>(message.dtype),
               .content = given_up ? Content::given_up : Content::follows,
               .magic = MessageHead::kMagic})) {
        break;
      }
      moved = true;
      if (given_up) {
        out.ring.put(nullptr, 0);
        pop(out);
        continue;
      }
      out.begun = true;
      out.done = 0;
    } else if (given_up) {
      if (!out.ring.cut()) break;
      moved = true;
      pop(out);
      continue;
    }
    const size_t put =
        out.ring.put(message.from + out.done, message.bytes - out.done);
    out.done += put;
    moved |= put > 0;
    if (out.done < message.bytes) break;
    pop(out);
  }
  return moved;
}

void MessageEngine::pop(Outgoing& out) {
  const Shared message = std::move(out.queue.front());
  out.queue.pop_front();
  out.begun = false;
  if (message->ended) {
    --under_way_;
  } else {
    end(*message);
  }
}

bool MessageEngine::pull(int from) {
  Incoming& in = incoming_[from];
  bool moved = false;
  for (int i = 0; i < kAtOnce; ++i) {
    if (!in.head) {
      if (!begin(from)) break;
      moved = true;
    }
    std::byte* to = nullptr;
    if (in.aside) {
      to = in.aside->data.get();
    } else if (in.receiver && fits(*in.receiver, *in.head)) {
      to = in.receiver->to;
    }
    const auto [taken, cut_off] =
        in.ring.take(to ? to + in.done : nullptr,
                     was_given_up(*in.head) ? 0 : in.head->bytes - in.done);
    in.done += taken;
    moved |= taken > 0;
    if (cut_off) in.head->content = MessageHead::Content::given_up;
    if (in.done < in.head->bytes && !was_given_up(*in.head)) break;
    finish(from);
  }
  return moved;
}

bool MessageEngine::begin(int from) {
  Incoming& in = incoming_[from];
  if (in.posted + posted_to_any_ == 0 || in.cut_off) return false;
  const auto head = in.ring.head();
  if (!head) return false;
  if (!is_sound(*head)) {
    in.cut_off = true;
    waiting_.break_down("what came from " + waiting_.name(from) +
                        " is not a message: the shared memory was overwritten");
    return false;
  }
  in.receiver = match(from, head->tag);
  if (!in.receiver) {
    in.aside = put_aside(from, *head);
    if (!in.aside) return false;
  }
  in.ring.begin();
  in.head = head;
  in.done = 0;
  return true;
}

void MessageEngine::finish(int from) {
  Incoming& in = incoming_[from];
  const MessageHead head = *in.head;
  in.head.reset();
  if (Aside* const aside = std::exchange(in.aside, nullptr)) {
    --under_way_;
    aside->head = head;
    aside->complete = true;
    if (was_given_up(head)) aside->data.reset();
    if (aside->receiver) hand_over(*aside);
  } else if (const Shared receiver = std::move(in.receiver)) {
    conclude(*receiver, from, head);
  }
}

void MessageEngine::conclude(Message& receive, int source,
                             const MessageHead& head) {
  if (was_given_up(head)) return fail_given_up(receive, source, head);
  if (!fits(receive, head)) return fail_mismatch(receive, source, head);
  receive.source = source;
  end(receive);
}

MessageEngine::Aside* MessageEngine::put_aside(int from,
                                               const MessageHead& head) {
  std::unique_ptr<std::byte[]> data;
  if (!was_given_up(head)) {
    data = room_for(from, head);
    if (!data) return nullptr;
  }
  asides_.push_back({.source = from, .head = head, .data = std::move(data)});
  ++under_way_;
  return &asides_.back();
}

std::unique_ptr<std::byte[]> MessageEngine::room_for(int from,
                                                     const MessageHead& head) {
  try {
    return std::make_unique_for_overwrite<std::byte[]>(head.bytes);
  } catch (const std::bad_alloc&) {
    waiting_.break_down(waiting_.name(rank_) + " has no memory for " +
                        std::to_string(head.bytes) + " bytes that " +
                        waiting_.name(from) + " sent with tag " +
                        std::to_string(head.tag) +
                        ", for which no receive waits");
    return nullptr;
  }
}

MessageEngine::Shared MessageEngine::match(int source, int32_t tag) {
  const auto found = std::ranges::find_if(receives_, [&](const Shared& one) {
    return one->tag == tag &&
           (one->peer == source || one->peer == Group::kAnySource);
  });
  if (found == receives_.end()) return nullptr;
  const Shared receiver = std::move(*found);
  receives_.erase(found);
  --posted(receiver->peer);
  return receiver;
}

MessageEngine::Aside* MessageEngine::find_aside(const Message& receive) {
  const auto found = std::ranges::find_if(asides_, [&](const Aside& aside) {
    return !aside.receiver && aside.head.tag == receive.tag &&
           (receive.peer == aside.source || receive.peer == Group::kAnySource);
  });
  return found == asides_.end() ? nullptr : &*found;
}

void MessageEngine::hand_over(Aside& aside) {
  const Shared receiver = std::move(aside.receiver);
  const auto head = aside.head;
  const int source = aside.source;
  if (aside.data && fits(*receiver, head) && head.bytes > 0) {
    kernels::copy(receiver->to, aside.data.get(), head.bytes);
  }
  erase(aside);
  conclude(*receiver, source, head);
}

void MessageEngine::erase(const Aside& aside) {
  asides_.erase(std::ranges::find_if(
      asides_, [&](const Aside& one) { return &one == &aside; }));
}

void MessageEngine::end(Message& message) {
  --under_way_;
  message.ended = true;
  // Wake the threads of this rank that sleep for the message. Such a thread
  // says that it sleeps before it looks at `ended`, and this stores `ended`
  // before it looks for sleepers. All four are seq_cst and so in one order:
  // either the thread sees `ended`, or it is seen here.
  waiting_.wake_for_message(rank_);
}

std::string MessageEngine::described(const MessageHead& head) {
  return std::to_string(head.bytes) + " bytes of " +
         kernels::name_of(static_cast<DType>(head.dtype)) + " with tag " +
         std::to_string(head.tag);
}

void MessageEngine::fail_given_up(Message& receive, int source,
                                  const MessageHead& head) {
  receive.failure = Message::Failure::given_up;
  receive.words = waiting_.name(source) + " gave up sending " +
                  described(head) + " to " + waiting_.name(rank_) +
                  "; the message is dropped";
  end(receive);
}

void MessageEngine::fail_mismatch(Message& receive, int source,
                                  const MessageHead& head) {
  receive.failure = Message::Failure::mismatch;
  receive.words = waiting_.name(source) + " sent " + described(head) +
                  ", but " + waiting_.name(rank_) + " receives " +
                  std::to_string(receive.bytes) + " bytes of " +
                  kernels::name_of(receive.dtype) + "; the message is dropped";
  end(receive);
}

}  // namespace lockstep::internal::shm
