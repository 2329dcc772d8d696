#pragma once

#include <string>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/message_bytes.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep::internal {

// Announces the next generation of an attempt (worker/healing_place.h) in the
// workers' store. That store may be on another node whose agent is slow,
// stopped or cut off, so no call here blocks: the owner polls fd(). For one
// thread.
class Announcement {
 public:
  // Connects to the workers' store (WorkerStoreService::name_for()) and asks
  // for the first free number from `first` to `most`. `attempt` is
  // TORCHELASTIC_RESTART_COUNT. The cause of `notice` names a rank of this
  // node, so that no other node announces the same. Throws WorkerStoreLost.
  Announcement(const std::string& store_socket, int attempt, int first,
               int most, GenerationNotice notice);

  enum class State { asked, made, none_free };
  // Takes the answers that have come. Throws WorkerStoreLost.
  State look();
  // The generation that was announced, once it is made.
  int generation() const { return next_; }
  const GenerationNotice& notice() const { return notice_; }
  int fd() const { return socket_.get(); }

 private:
  void ask();

  const int attempt_;
  const int most_;
  const GenerationNotice notice_;
  const std::string text_;
  int next_;
  FileDescriptor socket_{};
  MessageBuffer input_{};
};

}  // namespace lockstep::internal
