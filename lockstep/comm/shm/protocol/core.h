#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/comm/shm/protocol/group.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol/message_engine.h"
#include "lockstep/comm/shm/protocol/registered_memory.h"
#include "lockstep/comm/shm/protocol/waiting.h"

namespace lockstep::shm {

// What a group is made of. Internal to the protocol.
struct Core {
  explicit Core(const Membership& membership);

  int rank;
  int size;
  Tuning tuning;
  Segment segment;
  std::shared_ptr<PeerLinks> links;
  Waiting waiting;
  RegisteredMemory registered;
  MessageEngine messages;
  uint64_t sequence = 0;  // collectives that were begun
  // Chunks of staging that large operations have used: the same number on all
  // ranks, and where the counters of RankState go on from.
  uint64_t chunks = 0;

  RankState& own() const { return segment.state(rank); }

  // The ranks, as bits, whose doing is waited for; read in this order.
  using Missing = std::function<uint64_t(std::memory_order)>;
  // What a wait whose time is over says of them.
  using Complaint = std::function<std::string(uint64_t ranks)>;
  // The whole wait behind Waiting::spin(), until nobody is missing; moves
  // messages meanwhile. Breaks the group where the time is over, or a rank that
  // is missing has gone; one that has left without being needed any more does
  // no harm. Throws GroupBroken.
  void sleep(Patience& patience, const Missing& missing,
             const Complaint& complaint);
  // " (its last was barrier #3)", for complaints.
  std::string last_call_of(int peer) const;
};

}  // namespace lockstep::shm
