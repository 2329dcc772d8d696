#include "lockstep/comm/shm/protocol/core.h"

#include "lockstep/comm/shm/protocol/collective.h"

namespace lockstep::shm {

Core::Core(const Membership& membership)
    : rank(membership.meeting.rank),
      size(membership.meeting.size),
      tuning(membership.meeting.tuning),
      segment(membership.segment, size, tuning),
      links(membership.links),
      waiting(segment, *links, rank, size, membership.meeting.global_ranks),
      registered(*links, segment.news(), rank, size),
      messages(segment, waiting, rank, size) {}

void Core::sleep(Patience& patience, const Missing& missing,
                 const Complaint& complaint) {
  auto ready = [&](std::memory_order order) {
    if (messages.busy()) messages.drive(order);
    return missing(order) == 0;
  };
  auto look = [&] {
    waiting.throw_if_broken();
    for (const auto& departure : waiting.departures()) {
      // What it published before it went may have come since: asked again.
      const uint64_t needed = missing(std::memory_order_acquire);
      if (needed != 0 && (departure.failed || needed >> departure.rank & 1)) {
        waiting.fail(departure.words);
      }
    }
  };
  const auto& deadline = patience.deadline();
  // The peer that is missing may wait for the rest of a message.
  const uint32_t bells =
      Waiting::kCalls | (messages.busy() ? Waiting::kMessages : 0U);
  if (waiting.sleep(ready, bells, deadline, look) == Waiting::Outcome::ready) {
    return;
  }
  waiting.fail(complaint(missing(std::memory_order_acquire)) + " after " +
               std::to_string(deadline.elapsed().count()) + " ms (allowed " +
               std::to_string(deadline.allowed().count()) + " ms)");
}

std::string Core::last_call_of(int peer) const {
  const auto& state = segment.state(peer);
  const auto last = state.last_sequence.load(std::memory_order_relaxed);
  const auto operation = static_cast<Operation>(
      state.last_operation.load(std::memory_order_relaxed));
  return last == 0 ? " (it has called nothing yet)"
                   : std::string(" (its last was ") + name_of(operation) +
                         " #" + std::to_string(last) + ")";
}

}  // namespace lockstep::shm
