#include "lockstep/comm/shm/protocol/core.h"

#include "lockstep/comm/shm/protocol/collective.h"

namespace lockstep::internal::shm {

Core::Core(const Membership& membership)
    : rank(membership.meeting.rank),
      size(membership.meeting.size),
      tuning(membership.meeting.tuning),
      segment(membership.segment, size, tuning),
      links(membership.links),
      waiting(segment, *links, rank, size, membership.meeting.global_ranks),
      standstill(segment, waiting, rank, size),
      registered(*links, segment.news(), rank, size),
      messages(segment, waiting, rank, size) {}

void Core::sleep(Patience& patience, const Missing& missing,
                 const Complaint& complaint, const std::string& detail) {
  auto ready = [&](std::memory_order order) {
    if (messages.busy()) messages.drive(order);
    return missing(order) == 0;
  };
  auto look = [&] {
    waiting.throw_if_broken();
    for (const auto& departure : waiting.departures()) {
      // The rank may have published something before it went, so ask again.
      const uint64_t needed = missing(std::memory_order_acquire);
      if (needed != 0 && (departure.failed || needed >> departure.rank & 1)) {
        waiting.fail(departure.words, RankState::kTold);
      }
    }
  };
  const BlockedCall blocked(standstill, std::cref(missing),
                            [&] { return current_name() + detail; });
  const auto& deadline = patience.deadline();
  // The missing peer may be waiting for the rest of a message from this rank,
  // so messages wake this thread too.
  const uint32_t bells =
      Waiting::kCalls | (messages.busy() ? Waiting::kMessages : 0U);
  if (waiting.sleep(ready, bells, deadline, look) == Waiting::Outcome::ready) {
    return;
  }
  waiting.fail(complaint(missing(std::memory_order_acquire)) + " after " +
               std::to_string(deadline.elapsed().count()) + " ms (allowed " +
               std::to_string(deadline.allowed().count()) + " ms)");
}

std::string Core::current_name() const {
  const auto* call = current_call();
  if (call == nullptr || call->operation == nullptr) {
    return sequence == 0 ? "its first call" : call_name(rank, sequence);
  }
  std::string words = call->operation;
  if (call->number != 0) words += " #" + std::to_string(call->number);
  return call->function ? call->function + (", at " + words) : words;
}

std::string Core::call_name(int of, uint64_t announced) const {
  const auto& words = segment.words(of, announced);
  const auto call =
      text_of(words.operation) + " #" + std::to_string(announced + words.ahead);
  const auto function = text_of(words.function);
  return function.empty() ? call : function + ", at " + call;
}

std::string Core::complain(
    uint64_t ranks, const std::function<std::string(int peer)>& what) const {
  std::string all;
  for (int peer = 0; peer < size; ++peer) {
    if ((ranks >> peer & 1) == 0) continue;
    all += (all.empty() ? "" : ", ") + waiting.name(peer) + " " + what(peer) +
           last_call_of(peer);
  }
  return all;
}

std::string Core::last_call_of(int peer) const {
  // Pairs with the release in finish_announcement(). The words are not
  // overwritten meanwhile: the peer writes those of its next call into the
  // other slot.
  const auto last =
      segment.state(peer).last_sequence.load(std::memory_order_acquire);
  return last == 0 ? " (it has called nothing yet)"
                   : " (the last collective that it announced was " +
                         call_name(peer, last) + ")";
}

}  // namespace lockstep::internal::shm
