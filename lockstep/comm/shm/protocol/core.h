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
#include "lockstep/comm/shm/protocol/staging_stores.h"
#include "lockstep/comm/shm/protocol/standstill.h"
#include "lockstep/comm/shm/protocol/waiting.h"

namespace lockstep::internal::shm {

// The parts that a group is made of. Internal to the protocol.
struct Core {
  explicit Core(const Membership& membership);

  int rank;
  int size;
  Tuning tuning;
  Segment segment;
  std::shared_ptr<PeerLinks> links;
  Waiting waiting;
  Standstill standstill;
  RegisteredMemory registered;
  MessageEngine messages;
  StagingStores staging_stores{};  // used on rank 0
  uint64_t sequence = 0;           // collectives that were begun
  // The texts from which each slot of this rank's CallWords was written (they
  // are literals). A call with the same words as the call before last writes
  // nothing.
  struct WrittenWords {
    uint64_t ahead = 0;
    uint8_t units = 0;
    const char* function = nullptr;
    const char* operation = nullptr;
    const char* dtype = nullptr;
    bool operator==(const WrittenWords&) const = default;
  };
  std::array<WrittenWords, kSlots> written_words{};
  // How many chunks of staging, or steps of reductions in place, large
  // operations have used. It is the same on all ranks; the counters of
  // RankState go on from it.
  uint64_t chunks = 0;

  RankState& own() const { return segment.state(rank); }

  // Returns the ranks, as bits, that are still waited for, reading with this
  // memory order.
  using Missing = std::function<uint64_t(std::memory_order)>;
  // Returns what the error says about these ranks when a wait times out.
  using Complaint = std::function<std::string(uint64_t ranks)>;
  // The rest of a wait after Waiting::spin(), until no rank is missing. Moves
  // messages meanwhile, and looks for a standstill, in which this rank is
  // described by current_name() and `detail`. Breaks the group and throws
  // GroupBroken if the time is over, if a rank that is missing has gone, or if
  // a rank has failed while some rank is missing. A rank that has left and is
  // not missing does no harm.
  void sleep(Patience& patience, const Missing& missing,
             const Complaint& complaint, const std::string& detail = {});
  // Returns the call that this thread is in, as call_name() has it, also before
  // it is announced.
  std::string current_name() const;
  // Returns what rank `of` announced with this sequence number, with the user's
  // number: "barrier #3", "save_snapshot(), at broadcast #5".
  std::string call_name(int of, uint64_t announced) const;
  // Returns the text of a Complaint about these ranks: for each its name,
  // `what` that it has not done ("has not come to barrier #4"), and
  // last_call_of().
  std::string complain(uint64_t ranks,
                       const std::function<std::string(int peer)>& what) const;
  // Returns " (the last collective that it announced was barrier #3)", for
  // error texts.
  std::string last_call_of(int peer) const;
};

}  // namespace lockstep::internal::shm
