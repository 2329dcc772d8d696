#pragma once

#include <cstdint>
#include <memory>

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
};

}  // namespace lockstep::shm
