#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/comm/shm/protocol/group.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol/message_engine.h"
#include "lockstep/comm/shm/protocol/registered_memory.h"
#include "lockstep/comm/shm/protocol/standstill.h"
#include "lockstep/comm/shm/protocol/waiting.h"

namespace lockstep::shm {

// What a group is made of. Internal to the protocol.
struct Core {
  explicit Core(const Membership& membership);

  int rank;
  int size;
  milliseconds timeout;  // in which the group was to meet
  Tuning tuning;
  Segment segment;
  std::shared_ptr<PeerLinks> links;
  Waiting waiting;
  Standstill standstill;
  RegisteredMemory registered;
  MessageEngine messages;
  uint64_t sequence = 0;  // collectives that were begun
  // What each slot of this rank's CallWords was written from (the texts are
  // literals), so that a call like the one before last writes nothing.
  struct WrittenWords {
    uint64_t ahead = 0;
    uint8_t units = 0;
    const char* function = nullptr;
    const char* operation = nullptr;
    const char* dtype = nullptr;
    bool operator==(const WrittenWords&) const = default;
  };
  std::array<WrittenWords, kSlots> written_words{};
  // Chunks of staging that large operations have used: the same number on all
  // ranks, and where the counters of RankState go on from.
  uint64_t chunks = 0;

  RankState& own() const { return segment.state(rank); }

  // The ranks, as bits, whose doing is waited for; read in this order.
  using Missing = std::function<uint64_t(std::memory_order)>;
  // What a wait whose time is over says of them.
  using Complaint = std::function<std::string(uint64_t ranks)>;
  // The whole wait behind Waiting::spin(), until nobody is missing; moves
  // messages meanwhile, and looks for a standstill (of which this
  // rank says current_name() and `detail`). Breaks the group where the time is
  // over, or a rank that is missing has gone; one that has left without being
  // needed any more does no harm. Throws GroupBroken.
  void sleep(Patience& patience, const Missing& missing,
             const Complaint& complaint, const std::string& detail = {});
  // What this thread is in: as call_name(), before its announcement too.
  std::string current_name() const;
  // "barrier #3", "save_snapshot(), at broadcast #5": what `of` announced with
  // this sequence number. With the user's number.
  std::string call_name(int of, uint64_t announced) const;
  // " (the last collective that it announced was barrier #3)", for complaints.
  std::string last_call_of(int peer) const;
};

}  // namespace lockstep::shm
