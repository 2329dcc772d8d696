#include "lockstep/comm/mpi/message.h"

#include <c10/util/Exception.h>

#include <list>
#include <utility>

#include "lockstep/comm/mpi/datatypes.h"
#include "lockstep/comm/mpi/pending.h"

namespace lockstep::mpi {
namespace {

using std::chrono::milliseconds;

// A message with all that MPI needs until its end.
struct Transfer {
  template <typename Start>
  Transfer(const char* call, std::shared_ptr<Communicator> through,
           at::Tensor of, Start&& start)
      : communicator(std::move(through)),
        tensor(std::move(of)),
        bytes(tensor.nbytes()),
        pending(call,
                [&](MPI_Request* request) { return start(*this, request); }) {}

  std::shared_ptr<Communicator> communicator;
  at::Tensor tensor;
  Bytes bytes;
  Pending pending;
};

// Those that nobody waits for any more.
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
        return true;  // an end as well
      }
    });
  }

 private:
  std::mutex mutex_;
  std::list<std::unique_ptr<Transfer>> transfers_;
};

Unattended& unattended() {
  // Never destroyed: MPI may still work on what is in it.
  static auto& all = *std::make_unique<Unattended>().release();
  return all;
}

class Message final : public c10d::Work {
 public:
  Message(c10d::OpType type, const char* call,
          std::unique_ptr<Transfer> transfer, milliseconds timeout)
      : Work(transfer->communicator->rank(), type),
        call_(call),
        timeout_(timeout),
        communicator_(transfer->communicator),
        tensor_(transfer->tensor),
        transfer_(std::move(transfer)) {}
  ~Message() override {
    if (!transfer_) return;
    try {
      if (opType_ != c10d::OpType::SEND && !has_ended()) {
        transfer_->pending.cancel();
        if (transfer_->pending.ended()) return;
      }
    } catch (const c10::Error&) {
      // It stays, as one that was not cancelled.
    }
    unattended().add(std::move(transfer_));
  }

  bool isCompleted() override {
    std::lock_guard lock(mutex_);
    if (!transfer_) return true;
    try {
      if (!transfer_->pending.ended()) return false;
      source_ = transfer_->pending.status().MPI_SOURCE;
    } catch (const c10::Error&) {
      exception_ = std::current_exception();
    }
    transfer_.reset();
    return true;
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
    while (!isCompleted()) {
      throw_if_over(call_, deadline, communicator_.get());
      backoff.pause();
    }
    if (auto failure = exception()) std::rethrow_exception(failure);
    return true;
  }

 private:
  const char* call_;
  const milliseconds timeout_;
  const std::shared_ptr<Communicator> communicator_;
  const at::Tensor tensor_;
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
      kCall, std::move(communicator), tensor,
      [&](const Transfer& it, MPI_Request* request) {
        return MPI_Isend(it.tensor.data_ptr(), it.bytes.count(),
                         it.bytes.type(), to, tag, it.communicator->handle(),
                         request);
      });
  return c10::make_intrusive<Message>(c10d::OpType::SEND, kCall,
                                      std::move(transfer), timeout);
}

c10::intrusive_ptr<c10d::Work> start_recv(
    std::shared_ptr<Communicator> communicator, const at::Tensor& tensor,
    int from, int tag, milliseconds timeout) {
  unattended().drop_those_that_ended();
  constexpr auto* kCall = "MPI_Irecv";
  auto transfer = std::make_unique<Transfer>(
      kCall, std::move(communicator), tensor,
      [&](const Transfer& it, MPI_Request* request) {
        return MPI_Irecv(it.tensor.data_ptr(), it.bytes.count(),
                         it.bytes.type(), from, tag, it.communicator->handle(),
                         request);
      });
  return c10::make_intrusive<Message>(
      from == MPI_ANY_SOURCE ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
      kCall, std::move(transfer), timeout);
}

}  // namespace lockstep::mpi
