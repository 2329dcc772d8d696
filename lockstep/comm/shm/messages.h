#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/base/environment.h"
#include "lockstep/comm/shm/piece.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::internal::shm {

// The messages of one rank as works of c10d. Threads: any.
//
// While a work's wait() blocks it moves this rank's messages. Messages that no
// thread waits for are moved by a thread of this object, which starts with the
// first message that does not end at once. If the wait of a work times out, or
// abort() is called, the work has failed and the caller may use its tensor
// again (Group::give_up()). If a work is dropped, its message goes on and keeps
// the tensor alive until it ends. Works have no futures.
class Messages : public std::enable_shared_from_this<Messages> {
 public:
  // `timeout` is for waits that name none.
  Messages(std::shared_ptr<Group> group, milliseconds timeout);
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;
  ~Messages();

  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& tensor, int to,
                                      int32_t tag);
  // `from` may be Group::kAnySource.
  c10::intrusive_ptr<c10d::Work> receive(const char* operation,
                                         const at::Tensor& tensor, int from,
                                         int32_t tag);

  // Stops the thread.
  void close();

 private:
  class MessageWork;
  struct UnderWay {
    std::shared_ptr<Message> message;
    Piece data;
  };

  c10::intrusive_ptr<c10d::Work> track(c10d::OpType type, UnderWay started);
  void adopt(UnderWay dropped);

  const ProcessMark made_in_{};
  const std::shared_ptr<Group> group_;
  const milliseconds timeout_;
  std::mutex mutex_;
  bool closed_ = false;
  std::list<UnderWay> dropped_;
  std::jthread server_;
};

}  // namespace lockstep::internal::shm
