#pragma once

#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/message_bytes.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/worker_call.h"
#include "lockstep/worker/worker_store_link.h"

namespace lockstep::internal {

// Announces the next generation of an attempt (worker/healing_place.h) in the
// workers' store. That store may be on another node whose agent is slow,
// stopped or cut off, so no call here blocks: the owner polls fd(). For one
// thread.
class Announcement {
 public:
  // Connects to the workers' store (WorkerStoreService::name_for()) and asks
  // for the first free number from `first` to `most`. `attempt` is
  // TORCHELASTIC_RESTART_COUNT. `notice` has places that were lost, so that no
  // other node announces the same. Its places are those that were left at
  // `first`; `given_up` are given up now, and then it names all. Throws
  // WorkerStoreLost.
  Announcement(const std::string& store_socket, int attempt, int first,
               int most, GenerationNotice notice,
               std::vector<int> given_up = {});

  // none_left: no place would be left. has_ended: a rank has ended its
  // training, which must not go on without those that are given up.
  enum class State { asked, made, none_free, none_left, has_ended };
  // Takes the answers that have come. Throws WorkerStoreLost.
  State look();
  // The generation that was announced, once it is made.
  int generation() const { return next_; }
  // With the places that are left by then.
  const GenerationNotice& notice() const { return notice_; }
  int fd() const { return socket_.get(); }

 private:
  void send(const WorkerCall& call);
  void ask();
  bool none_is_left() const {
    return !given_up_.empty() && notice_.places.empty();
  }

  const int attempt_;
  const int most_;
  GenerationNotice notice_;
  const std::vector<int> given_up_;
  std::string text_{};
  int next_;
  bool asks_for_end_ = false;  // whether a rank has ended its training
  FileDescriptor socket_{};
  MessageBuffer input_{};
};

// Writes the notices of the generations from 1 to `last` that the workers'
// store lacks, since it is not the one where they were announced: a rank that
// has not taken all of them waits for the first that it has not. Agents of
// other nodes may write the same or, if they do not know all of them, announce
// one of these numbers; each is that of the agent whose call comes first.
// Returns the places that such an announcement leaves; none if all are left.
// Blocks until `deadline` at most. Throws WorkerStoreLost.
std::vector<int> announce_earlier(WorkerStoreLink& store, int attempt, int last,
                                  const Deadline& deadline);

}  // namespace lockstep::internal
