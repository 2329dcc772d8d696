#include "lockstep/comm/shm/messages.h"

#include <pthread.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/shm/protocol_call.h"

namespace lockstep::internal::shm {

class Messages::MessageWork final : public c10d::Work {
 public:
  MessageWork(std::shared_ptr<Messages> messages, c10d::OpType type,
              UnderWay started)
      : Work(messages->group_->rank(), type),
        messages_(std::move(messages)),
        started_(std::move(started)) {}

  ~MessageWork() override {
    // A forked child has a copy of a message that its parent sends or receives.
    if (messages_->made_in_.is_foreign()) {
      keep_for_ever();
      return;
    }
    std::unique_lock lock(mutex_);
    const bool ended = completed_;
    lock.unlock();
    if (!ended) messages_->adopt(std::move(started_));
  }

  bool isCompleted() override {
    refuse_in_child(messages_->made_in_);
    {
      std::lock_guard lock(mutex_);
      if (completed_) return true;
    }
    if (!group().has_ended(*started_.message)) return false;
    settle();
    return true;
  }
  bool isSuccess() const override {
    std::lock_guard lock(mutex_);
    return completed_ && !exception_;
  }
  std::exception_ptr exception() const override {
    std::lock_guard lock(mutex_);
    return exception_;
  }
  int sourceRank() const override { return Group::source(*started_.message); }
  std::vector<at::Tensor> result() override { return {started_.data.tensor()}; }
  void synchronize() override { wait(::kNoTimeout); }

  bool wait(milliseconds timeout) override {
    if (timeout == ::kNoTimeout) timeout = messages_->timeout_;
    if (!isCompleted()) {
      try {
        translated([&] { group().wait(*started_.message, timeout); });
      } catch (const c10::DistBackendError&) {
        // If the message has ended, this is the message's own failure, which
        // settle() keeps.
        if (!group().has_ended(*started_.message)) throw;
      }
      settle();
    }
    std::lock_guard lock(mutex_);
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void abort() override {
    if (messages_->made_in_.is_foreign()) return;
    group().give_up(*started_.message, " was given up: its work was aborted");
  }

 private:
  Group& group() const { return *messages_->group_; }

  void keep_for_ever() {
    (void)std::make_unique<UnderWay>(std::move(started_)).release();
    (void)std::make_unique<std::shared_ptr<Messages>>(messages_).release();
  }

  // Called when the message has ended: keeps its failure, or writes its content
  // to the tensor.
  void settle() {
    std::lock_guard lock(mutex_);
    if (completed_) return;
    try {
      translated([&] { Group::throw_if_failed(*started_.message); });
      started_.data.write_back();
    } catch (...) {
      exception_ = std::current_exception();
    }
    completed_ = true;
  }

  const std::shared_ptr<Messages> messages_;
  UnderWay started_;
};

Messages::Messages(std::shared_ptr<Group> group, milliseconds timeout)
    : group_(std::move(group)), timeout_(timeout) {}

Messages::~Messages() { close(); }

void Messages::close() {
  std::jthread server;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    server.swap(server_);
  }
}

c10::intrusive_ptr<c10d::Work> Messages::send(const at::Tensor& tensor, int to,
                                              int32_t tag) {
  Piece data("send", tensor, Piece::Use::read);
  auto message = translated([&] {
    return group_->start_send(to, tag, data.const_bytes(), data.moved_as());
  });
  return track(c10d::OpType::SEND, {std::move(message), std::move(data)});
}

c10::intrusive_ptr<c10d::Work> Messages::receive(const char* operation,
                                                 const at::Tensor& tensor,
                                                 int from, int32_t tag) {
  Piece data(operation, tensor, Piece::Use::write);
  auto message = translated([&] {
    return group_->start_receive(from, tag, data.bytes(), data.moved_as());
  });
  return track(from == Group::kAnySource ? c10d::OpType::RECVANYSOURCE
                                         : c10d::OpType::RECV,
               {std::move(message), std::move(data)});
}

c10::intrusive_ptr<c10d::Work> Messages::track(c10d::OpType type,
                                               UnderWay started) {
  auto work = c10::make_intrusive<MessageWork>(shared_from_this(), type,
                                               std::move(started));
  if (!work->isCompleted()) {
    std::lock_guard lock(mutex_);
    if (!server_.joinable() && !closed_) {
      server_ = std::jthread([group = group_](const std::stop_token& stop) {
        ::pthread_setname_np(::pthread_self(), "shm messages");
        group->serve_messages(stop);
      });
    }
  }
  return work;
}

void Messages::adopt(UnderWay dropped) {
  std::lock_guard lock(mutex_);
  std::erase_if(dropped_, [this](const UnderWay& each) {
    return group_->has_ended(*each.message);
  });
  if (!group_->has_ended(*dropped.message)) {
    dropped_.push_back(std::move(dropped));
  }
}

}  // namespace lockstep::internal::shm
