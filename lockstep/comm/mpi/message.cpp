#include "lockstep/comm/mpi/operations.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <list>
#include <utility>

#include "lockstep/base/no_destructor.h"
#include "lockstep/comm/mpi/datatypes.h"
#include "lockstep/comm/mpi/pending.h"

namespace lockstep::internal::mpi {
namespace {

using std::chrono::milliseconds;

// A message with everything that MPI needs until its end.
struct Transfer {
  template <typename Start>
  Transfer(const char* call, std::shared_ptr<Communicator> through,
           at::Tensor content, Start&& start)
      : communicator(std::move(through)),
        staged(std::move(content)),
        bytes(staged.nbytes()),
        pending(call,
                [&](MPI_Request* request) { return start(*this, request); }) {}

  std::shared_ptr<Communicator> communicator;
  at::Tensor staged;  // the content, in memory of its own
  Bytes bytes;
  Pending pending;
};

// The transfers whose end no Work waits for any more.
class Unattended {
 public:
  void add(std::unique_ptr<Transfer> transfer) {
    std::lock_guard lock(mutex_);
    transfers_.push_back(std::move(transfer));
  }
  void drop_those_that_ended() {
    std::lock_guard lock(mutex_);
    std::erase_if(transfers_, [](const std::unique_ptr<Transfer>& transfer) {
      try {
        return transfer->pending.ended();
      } catch (const c10::Error&) {
        return true;  // an error ends it, too
      }
    });
  }

 private:
  std::mutex mutex_;
  std::list<std::unique_ptr<Transfer>> transfers_;
};

Unattended& unattended() {
  // Never destroyed: MPI may still work on the transfers.
  static NoDestructor<Unattended> all;
  return *all;
}

class Message final : public c10d::Work {
 public:
  Message(c10d::OpType type, const char* call, at::Tensor tensor,
          std::unique_ptr<Transfer> transfer, milliseconds timeout)
      : Work(transfer->communicator->rank(), type),
        call_(call),
        timeout_(timeout),
        communicator_(transfer->communicator),
        tensor_(std::move(tensor)),
        transfer_(std::move(transfer)) {}
  ~Message() override { give_up({}); }

  bool isCompleted() override {
    std::lock_guard lock(mutex_);
    return has_ended();
  }
  bool isSuccess() const override {
    std::lock_guard lock(mutex_);
    return !transfer_ && !exception_;
  }
  std::exception_ptr exception() const override {
    std::lock_guard lock(mutex_);
    return exception_;
  }
  int sourceRank() const override {
    std::lock_guard lock(mutex_);
    return source_;
  }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  void synchronize() override { wait(::kNoTimeout); }

  bool wait(milliseconds timeout) override {
    const auto deadline =
        Deadline::after(timeout == ::kNoTimeout ? timeout_ : timeout);
    Backoff backoff(tensor_.nbytes());
    try {
      while (!isCompleted()) {
        throw_if_over(call_, deadline, communicator_.get());
        backoff.pause();
      }
    } catch (const c10::DistBackendError&) {
      give_up(std::current_exception());
    }
    if (auto failure = exception()) std::rethrow_exception(failure);
    return true;
  }
  void abort() override {
    give_up(std::make_exception_ptr(
        c10::DistBackendError(std::string(call_) + " was aborted")));
  }

 private:
  // The mutex must be held.
  bool has_ended() {
    if (!transfer_) return true;
    try {
      if (!transfer_->pending.ended()) return false;
      source_ = transfer_->pending.status().MPI_SOURCE;
      if (receives()) {
        const c10::NoGradGuard no_grad;
        tensor_.copy_(transfer_->staged);
      }
    } catch (const c10::Error&) {
      exception_ = std::current_exception();
    }
    transfer_.reset();
    return true;
  }

  // Lets the message fail with `why`, unless it has ended.
  void give_up(std::exception_ptr why) {
    std::lock_guard lock(mutex_);
    if (!transfer_) return;
    exception_ = std::move(why);
    try {
      if (receives()) {
        transfer_->pending.cancel();
        if (transfer_->pending.ended()) return transfer_.reset();
      }
    } catch (const c10::Error&) {
      // The transfer stays, like one that was not cancelled.
    }
    unattended().add(std::move(transfer_));
  }

  bool receives() const { return opType_ != c10d::OpType::SEND; }

  const char* call_;
  const milliseconds timeout_;
  const std::shared_ptr<Communicator> communicator_;
  at::Tensor tensor_;
  std::unique_ptr<Transfer> transfer_;  // none once it has ended
  int source_ = -1;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> start_send(
    std::shared_ptr<Communicator> communicator, const at::Tensor& tensor,
    int to, int tag, milliseconds timeout) {
  unattended().drop_those_that_ended();
  constexpr auto* kCall = "MPI_Isend";
  auto transfer = std::make_unique<Transfer>(
      kCall, std::move(communicator), tensor.clone(),
      [&](const Transfer& it, MPI_Request* request) {
        return MPI_Isend(it.staged.data_ptr(), it.bytes.count(),
                         it.bytes.type(), to, tag, it.communicator->handle(),
                         request);
      });
  return c10::make_intrusive<Message>(c10d::OpType::SEND, kCall, tensor,
                                      std::move(transfer), timeout);
}

c10::intrusive_ptr<c10d::Work> start_recv(
    std::shared_ptr<Communicator> communicator, const at::Tensor& tensor,
    int from, int tag, milliseconds timeout) {
  unattended().drop_those_that_ended();
  constexpr auto* kCall = "MPI_Irecv";
  auto transfer = std::make_unique<Transfer>(
      kCall, std::move(communicator), at::empty_like(tensor),
      [&](const Transfer& it, MPI_Request* request) {
        return MPI_Irecv(it.staged.data_ptr(), it.bytes.count(),
                         it.bytes.type(), from, tag, it.communicator->handle(),
                         request);
      });
  return c10::make_intrusive<Message>(
      from == MPI_ANY_SOURCE ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
      kCall, tensor, std::move(transfer), timeout);
}

}  // namespace lockstep::internal::mpi
