#include <algorithm>
#include <chrono>

#include "lockstep/comm/shm/protocol/message_engine.h"

// Decides what becomes of messages whose peer is gone.
namespace lockstep::internal::shm {
namespace {

// How often the peers' sockets are looked at: the death of a process wakes no
// thread.
constexpr milliseconds kBetweenLooks{50};

}  // namespace

void MessageEngine::look_if_due() {
  using Clock = std::chrono::steady_clock;
  const Clock::duration now = Clock::now().time_since_epoch();
  int64_t due = next_look_.load(std::memory_order_relaxed);
  if (now.count() < due && !waiting_.broken()) return;
  const Clock::duration next = now + kBetweenLooks;
  if (next_look_.compare_exchange_strong(due, next.count(),
                                         std::memory_order_relaxed)) {
    look();
  }
}

void MessageEngine::look() {
  const auto departures = waiting_.departures();
  const bool broken = waiting_.broken();
  if (departures.empty() && !broken) return;
  const Lock lock(mutex_);
  for (const auto& departure : departures) {
    // Take all that the rank had written. Nothing more can come, as its
    // departure was seen before.
    while (pull(departure.rank)) {
    }
    departed_[departure.rank] = departure.words;
    if (departure.failed && broken_.empty()) broken_ = departure.words;
  }
  move();
  if (broken && broken_.empty()) {
    try {
      waiting_.throw_if_broken();
    } catch (const GroupBroken& error) {
      broken_ = error.what();
    }
  }
  settle();
}

std::optional<std::string> MessageEngine::hopeless(int peer) const {
  if (!broken_.empty()) return broken_;
  if (peer != Group::kAnySource) {
    if (departed_[peer].empty()) return std::nullopt;
    return departed_[peer];
  }
  std::string all;
  for (int other = 0; other < size_; ++other) {
    if (other == rank_) continue;
    if (departed_[other].empty()) return std::nullopt;
    all += (all.empty() ? "" : "; ") + departed_[other];
  }
  return all;
}

void MessageEngine::settle() {
  for (int peer = 0; peer < size_; ++peer) {
    const auto why = peer == rank_ ? std::nullopt : hopeless(peer);
    if (!why) continue;
    Outgoing& out = outgoing_[peer];
    // If the first message is cut off, all after it are lost, too: nothing will
    // be sent any more, as hopeless() never changes back.
    size_t done = std::exchange(out.begun, false) ? out.done : 0;
    for (const Shared& message : std::exchange(out.queue, {})) {
      if (message->ended) {  // given up; the receiver will not be told any more
        --under_way_;
        done = 0;
      } else {
        fail(*message, *why, std::exchange(done, 0));
      }
    }
    if (incoming_[peer].head) cut_off_from(peer, *why);
  }
  for (auto one = receives_.begin(); one != receives_.end();) {
    if (const auto why = hopeless((*one)->peer)) {
      --posted((*one)->peer);
      const Shared message = std::move(*one);
      one = receives_.erase(one);
      fail(*message, *why);
    } else {
      ++one;
    }
  }
}

void MessageEngine::cut_off_from(int from, const std::string& why) {
  Incoming& in = incoming_[from];
  in.cut_off = true;
  in.head.reset();
  Shared receiver = std::move(in.receiver);
  if (Aside* const aside = std::exchange(in.aside, nullptr)) {
    receiver = std::move(aside->receiver);
    erase(*aside);
    --under_way_;
  }
  if (receiver) fail(*receiver, why, in.done);
}

void MessageEngine::fail(Message& message, const std::string& why,
                         size_t done) {
  message.failure = Message::Failure::broken;
  message.words =
      why + ": " + described(message) +
      (message.is_send ? " was not taken" : " did not come") +
      (done > 0 ? ", except for " + std::to_string(done) + " of its bytes"
                : "");
  end(message);
}

std::string MessageEngine::described(const Message& message) const {
  return std::string("a message ") + (message.is_send ? "to " : "from ") +
         (message.peer == Group::kAnySource ? "any rank"
                                            : waiting_.name(message.peer)) +
         " (tag " + std::to_string(message.tag) + ", " +
         std::to_string(message.bytes) + " bytes)";
}

}  // namespace lockstep::internal::shm
