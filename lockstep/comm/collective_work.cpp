#include "lockstep/comm/collective_work.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/number_list.h"
#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/param_comms.h"
#include "lockstep/comm/roll_call.h"
#include "lockstep/comm/running_call.h"
#include "lockstep/comm/work_queue.h"
#include "lockstep/state/digest.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// On a GPU a synchronous operation, too, goes on when its call returns.
Operation::Spans spans_of(bool async_op, const Buffers& buffers) {
  return async_op || !buffers.device().value_or(c10::kCPU).is_cpu()
             ? Operation::Spans::detached
             : Operation::Spans::nested;
}

// c10d's NCCL backend tells profilers of its operations itself.
bool is_nccl(const Call& call, const Buffers& buffers) {
  const auto device = buffers.device().value_or(call.group->control_device());
  return inside(call.group).has_backend(device.type()) &&
         inside(call.group).backend(device.type()).getBackendName() == "nccl";
}

CommsCall comms_call(const Call& call, bool async_op, const Buffers& buffers,
                     const AgreedCall& agreement) {
  Agreed agreed;
  if (agreement) agreed = agreement();
  return {.call = call,
          .extent = buffers.extent(),
          .async_op = async_op,
          .in_splits = std::move(agreed.sends),
          .out_splits = std::move(agreed.receives),
          .inputs = buffers.inputs(),
          .outputs = buffers.results()};
}

// Whether the future of a backend's work completes when the operation itself
// has ended: CUDA's completes when the operation is on its stream, and Gloo's
// messages have no future.
bool has_telling_future(const Call& call, const Buffers& buffers) {
  return call.number > 0 &&
         buffers.device().value_or(call.group->control_device()).is_cpu();
}

// Ends an operation, in the backend's thread or in the thread that waits,
// whichever is first. Does not keep the group alive: otherwise the group's
// destructor might run in the backend's own thread.
class Ending {
 public:
  Ending(Operation operation, std::shared_ptr<FlightRecorder> flight)
      : flight_(std::move(flight)), operation_(std::move(operation)) {}
  const Operation& operation() const { return operation_; }
  void end(bool failed) {
    std::lock_guard lock(mutex_);
    operation_.end(failed);
  }

 private:
  std::mutex mutex_;
  const std::shared_ptr<FlightRecorder> flight_;  // operation_ needs it
  Operation operation_;
};

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Returns the future that a watchdog completes when an operation on a stream of
// a GPU has itself ended, with the result of the operation. Returns null for
// all other operations.
FuturePtr stream_ending(Work& work, const Buffers& buffers) {
  if (buffers.device().value_or(c10::kCPU).is_cpu()) return {};
  try {
    return work.getFutureResult();
  } catch (const c10::Error&) {
    return {};  // Gloo goes through host memory, not a stream
  }
}

void end_with(const FuturePtr& ending_future, std::shared_ptr<Ending> ending) {
  ending_future->addCallback(
      [ending = std::move(ending)](c10::ivalue::Future& ended) {
        ending->end(ended.hasError() ||
                    ended.value().toInt() !=
                        static_cast<int64_t>(c10d::WorkResult::SUCCESS));
      });
}

// Returns the time to give to the wait for an operation on a stream. If NCCL's
// wait is given no time, it makes the current stream wait and returns; if it is
// given one, it blocks and asks every 10 ms. The watchdog enforces the group's
// timeout, so only a shorter timeout of the call itself is worth that.
milliseconds stream_wait_time(const Call& call, const Deadline& started) {
  if (call.timeout >= call.group->timeout()) return ::kNoTimeout;
  return std::max(started.remaining(), milliseconds(1));
}

// Makes the span of a thread that waits for `work`, if it will block: not if
// the work is done, nor if only the current stream waits.
Span begin_wait_span(Work& work, milliseconds time) {
  if (!Span::observed() || time == ::kNoTimeout || work.isCompleted()) {
    return Span();
  }
  return Span("comm", "wait");
}

// A backend's work with the user's tensors, and errors in the words of Call.
class CollectiveWork final : public Work {
 public:
  CollectiveWork(Call call, Deadline started, Buffers buffers, WorkPtr work,
                 Operation operation)
      : Work(call.group->rank(), work->retrieveOpType()),
        call_(std::move(call)),
        started_(started),
        work_(std::move(work)),
        buffers_(std::move(buffers)),
        ending_(std::make_shared<Ending>(std::move(operation),
                                         inside(call_.group).flight())),
        stream_ending_(stream_ending(*work_, buffers_)) {
    if (stream_ending_) {
      end_with(stream_ending_, ending_);
      return;
    }
    const auto& begun = ending_->operation();
    const bool records =
        begun.is_recorded() && has_telling_future(call_, buffers_);
    if (!records && !begun.has_span()) return;
    // Record the end itself, if the backend tells it, and not the wait for it.
    if (auto* queued = dynamic_cast<QueueWork*>(work_.get())) {
      queued->at_end([ending = ending_](bool failed) { ending->end(failed); });
      return;
    }
    try {
      work_->getFuture()->addCallback(
          [ending = ending_](c10::ivalue::Future& ended) {
            ending->end(ended.hasError());
          });
    } catch (const c10::Error&) {
      // A message of Gloo has no future.
    }
  }

  bool isCompleted() override {
    if (!work_->isCompleted()) return false;
    if (!work_->exception()) finish();
    return true;
  }
  // Asks for the failure, because NCCL's works do not answer isSuccess().
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    if (auto failure = work_->exception()) return failure;
    std::lock_guard lock(finish_mutex_);
    if (!failure_) return nullptr;
    return std::make_exception_ptr(
        c10::DistBackendError(call_.where() + " failed: " + *failure_));
  }
  int sourceRank() const override {
    return call_.group->global_rank(work_->sourceRank());
  }
  std::vector<at::Tensor> result() override { return buffers_.results(); }
  void synchronize() override { wait(::kNoTimeout); }
  void abort() override { work_->abort(); }
  uint64_t getSequencenumber() const override { return call_.number; }

  // The future's value is the list of the tensors that were written, in the
  // order of the call.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto self = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(this);
    return work_->getFuture()->then(
        [self](c10::ivalue::Future& ended) -> c10::IValue {
          if (ended.hasError()) std::rethrow_exception(ended.exception_ptr());
          self->finish_or_throw();
          return self->buffers_.results();
        },
        c10::ListType::ofTensors());
  }

  bool wait(milliseconds timeout) override {
    inside(call_.group).require_own_process();
    if (finished()) {
      // isCompleted() or the future came first, maybe with another stream
      // current, so make the current stream wait, too.
      if (written_) written_->block(*current_stream(*buffers_.device()));
      // Do not wait for the backend's work again: that of a Gloo message would
      // wait for the next message.
      throw_failure();
      return true;
    }
    const auto deadline = timeout == ::kNoTimeout
                              ? started_
                              : Deadline::after(bounded_timeout(timeout));
    // The copies of write_back() follow the operation on the same stream, so
    // the thread need not wait for its end.
    const auto time = stream_ending_ && timeout == ::kNoTimeout
                          ? stream_wait_time(call_, started_)
                          : deadline.allowed();
    Span span = begin_wait_span(*work_, time);
    try {
      if (!work_->wait(time)) {
        throw std::runtime_error("it was aborted");
      }
    } catch (const std::exception& error) {
      span.end(true);
      end_failed();
      call_.fail(deadline, error);
    }
    span.end();
    finish_or_throw();
    return true;
  }

 private:
  // Runs after the backend is done, and only once: afterwards the tensors are
  // the user's.
  void finish() {
    std::lock_guard lock(finish_mutex_);
    if (finished_) return;
    finished_ = true;
    try {
      if (auto modified = buffers_.modified()) {
        throw std::runtime_error(
            "a tensor, " + *modified +
            ", was modified in place while the operation was under way; "
            "wait() before you write to it");
      }
      buffers_.write_back();
      if (stream_ending_) {
        const auto stream = current_stream(*buffers_.device());
        written_.emplace(stream->device_type()).record(*stream);
      }
    } catch (const std::exception&) {
      failure_ = words_of(std::current_exception());
    }
    // An operation on a stream may not have ended yet; if so, the callback of
    // end_with() ends the record.
    if (failure_ || !stream_ending_ || work_->isCompleted()) {
      ending_->end(failure_.has_value());
    }
  }
  bool finished() {
    std::lock_guard lock(finish_mutex_);
    return finished_;
  }
  void throw_failure() {
    std::lock_guard lock(finish_mutex_);
    if (failure_) call_.fail(started_, std::logic_error(*failure_));
  }
  void finish_or_throw() {
    finish();
    throw_failure();
  }
  // A wait that ran out of time does not end the operation.
  void end_failed() {
    if (work_->isCompleted()) ending_->end(true);
  }

  Call call_;
  Deadline started_;
  WorkPtr work_;
  mutable std::mutex finish_mutex_;
  Buffers buffers_;
  bool finished_ = false;
  std::optional<c10::Event> written_{};  // if stream_ending_ and not failed
  std::optional<std::string> failure_{};
  std::shared_ptr<Ending> ending_;
  FuturePtr stream_ending_;
};

class JoinedWorks final : public Work {
 public:
  explicit JoinedWorks(std::vector<WorkPtr> works)
      : Work(-1, works.front()->retrieveOpType()), works_(std::move(works)) {}

  bool isCompleted() override {
    for (auto& work : works_) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto failure = work->exception()) return failure;
    }
    return nullptr;
  }
  bool wait(milliseconds timeout) override {
    if (timeout == ::kNoTimeout) {
      for (auto& work : works_) work->wait(timeout);
      return true;
    }
    auto deadline = Deadline::after(timeout);
    for (auto& work : works_) {
      // A time of zero would mean no limit.
      work->wait(std::max(deadline.remaining(), milliseconds(1)));
    }
    return true;
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (auto& work : works_) append(all, work->result());
    return all;
  }
  void synchronize() override { wait(::kNoTimeout); }
  void abort() override {
    for (auto& work : works_) work->abort();
  }
  FuturePtr getFuture() override {
    c10::List<FuturePtr> futures(
        c10::FutureType::create(c10::ListType::ofTensors()));
    for (auto& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures)->then(
        [futures](c10::ivalue::Future& ended) -> c10::IValue {
          if (ended.hasError()) std::rethrow_exception(ended.exception_ptr());
          std::vector<at::Tensor> all;
          for (size_t i = 0; i < futures.size(); ++i) {
            append(all, futures.get(i)->value().toTensorVector());
          }
          return all;
        },
        c10::ListType::ofTensors());
  }

 private:
  static void append(std::vector<at::Tensor>& all,
                     const std::vector<at::Tensor>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }

  std::vector<WorkPtr> works_;
};

// The description of its call that a rank gives the others. `function`, the
// function of the library that the user called, is only for the message and is
// not compared: a reduction that one rank left out in backward() is done in its
// next forward().
struct Told {
  Agreed agreed;
  std::string function;  // empty if there is none

  std::string words() const {
    return function.empty() ? agreed.text : function + ", at " + agreed.text;
  }
};

// Writes four lines: the text, what goes out, what comes in, the function.
std::string encode(const Told& told) {
  std::ostringstream out;
  out << told.agreed.text << '\n';
  for (auto count : told.agreed.sends) out << count << ' ';
  out << '\n';
  for (auto count : told.agreed.receives) out << count << ' ';
  out << '\n' << told.function;
  return out.str();
}

Told decode(const std::string& lines) {
  std::istringstream in(lines);
  Told told;
  std::string numbers;
  std::getline(in, told.agreed.text);
  for (auto* counts : {&told.agreed.sends, &told.agreed.receives}) {
    std::getline(in, numbers);
    std::istringstream line(numbers);
    for (int64_t count = 0; line >> count;) counts->push_back(count);
  }
  std::getline(in, told.function);
  return told;
}

// Shortens a description that would not fit into a value of the store, or into
// a line of an error. The digest tells those apart that begin alike.
std::string shortened(const std::string& text) {
  constexpr size_t longest = 2 << 10;
  if (text.size() <= longest) return text;
  Digest digest;
  digest.add(text);
  return c10::str(text.substr(0, longest), "... (", text.size(),
                  " characters, digest ", digest.value(), ")");
}

// This is not an Agreement, because its error lists the calls of all ranks and
// not the first two that differ, and because what a rank sends is compared with
// what another one expects.
void compare(const Call& call, Agreed own, const Deadline& deadline) {
  const char* function = user_function();
  own.text = shortened(c10::str(call.operation, " #", call.number,
                                own.text.empty() ? "" : " ", own.text));
  const Told told{own, function != nullptr ? function : ""};
  std::vector<Told> given;
  for (const auto& lines : roll_call(*call.group, encode(told), deadline)) {
    given.push_back(decode(lines));
  }
  auto global = [&](size_t member) {
    return call.group->global_rank(static_cast<int>(member));
  };
  if (!std::all_of(given.begin(), given.end(), [&](const Told& other) {
        return other.agreed.text == own.text;
      })) {
    std::vector<RanksOfText> all;
    for (size_t member = 0; member < given.size(); ++member) {
      add_text(all, global(member), given[member].words());
    }
    throw Disagreement("the ranks disagree about this call (" +
                       name_texts(all) +
                       "); all must make the same calls in one order");
  }
  for (size_t from = 0; from < given.size(); ++from) {
    for (size_t to = 0; to < given[from].agreed.sends.size(); ++to) {
      const auto sent = given[from].agreed.sends[to];
      const auto expected = given[to].agreed.receives.at(from);
      if (sent == expected) continue;
      throw Disagreement(c10::str("the ranks disagree about this call: rank ",
                                  global(from), " sends ", sent,
                                  " elements to rank ", global(to),
                                  ", which expects ", expected, " from it"));
    }
  }
}

// After a call that the ranks had compared has failed, returns which ranks are
// gone ("; rank 3 died"), because most backends cannot tell. A rank that is one
// call ahead meets this roll call when it compares its next call, and fails,
// too.
std::string absent_after_failure(const Call& call) {
  constexpr milliseconds kAnswer{1'000};
  try {
    auto& backend = call.backend();
    if (traits_of(backend).failure_needs_abort()) backend.abort();
    const Agreed failed{
        .text = c10::str(call.operation, " #", call.number, " failed"),
        .sends = {},
        .receives = {}};
    roll_call(*call.group, encode({failed, {}}), Deadline::after(kAnswer));
  } catch (const RollCallError& error) {
    return c10::str("; ", error.what());
  } catch (const c10::Error&) {  // the store is gone, too
  }
  return {};
}

// Returns CurrentCall::others.
std::vector<ElementType> other_types(const Call& call, const Buffers& buffers) {
  if (call.parts <= 1) return {};
  auto types = buffers.types();
  types.resize(std::min<size_t>(types.size(), call.parts));
  types.erase(types.begin());
  return types;
}

WorkPtr start_and_wait(Call call, bool async_op, Buffers buffers,
                       const AgreedCall& agreement,
                       const std::function<WorkPtr()>& start) {
  const bool compares = agreement && call.group->checks_calls();
  RunningCall running(
      call, buffers.extent(),
      compares || async_op ? FlightState::scheduled : FlightState::started,
      spans_of(async_op, buffers), other_types(call, buffers));
  const ParamComms seen([&]() -> std::optional<CommsCall> {
    if (is_nccl(call, buffers)) return std::nullopt;
    return comms_call(call, async_op, buffers, agreement);
  });
  WorkPtr work;
  FuturePtr on_stream;
  bool compared = false;
  try {
    if (compares) compare(call, agreement(), running.started());
    compared = true;
    if (!async_op) running.start();
    work = start();
    if (!async_op) {
      on_stream = stream_ending(*work, buffers);
      if (!work->wait(on_stream ? stream_wait_time(call, running.started())
                                : std::max(running.started().remaining(),
                                           milliseconds(1)))) {
        throw std::runtime_error("it was aborted");
      }
      buffers.write_back();
    }
  } catch (const std::exception& error) {
    if (work && call.number == 0) give_up(*work);
    const bool asks = compares && compared;
    running.fail(error, asks ? absent_after_failure(call) : std::string());
  }
  if (!async_op) {
    if (on_stream && !work->isCompleted()) {
      end_with(on_stream, std::make_shared<Ending>(
                              running.take(), inside(call.group).flight()));
    } else {
      running.succeed();
    }
    return nullptr;
  }
  return c10::make_intrusive<CollectiveWork>(std::move(call), running.started(),
                                             std::move(buffers),
                                             std::move(work), running.take());
}

}  // namespace

WorkPtr run_collective(Call call, bool async_op, Buffers buffers,
                       const AgreedCall& agreement,
                       const std::function<WorkPtr()>& start) {
  buffers.require_apart(call);
  call.take_numbers();
  return start_and_wait(std::move(call), async_op, std::move(buffers),
                        agreement, start);
}

void run_step(Call call, const std::function<void()>& step) {
  call.take_numbers();
  RunningCall running(call, {}, FlightState::started, Operation::Spans::none);
  try {
    step();
  } catch (const c10::DistError& error) {
    running.fail(error);
  }
  running.succeed();
}

WorkPtr run_message(Call call, bool async_op, Buffers buffers,
                    const std::function<WorkPtr()>& start) {
  buffers.require_apart(call);
  return start_and_wait(std::move(call), async_op, std::move(buffers), {},
                        start);
}

void give_up(Work& message) {
  try {
    message.abort();
  } catch (const c10::Error&) {
    // The backend cannot abort.
  }
}

WorkPtr join_works(std::vector<WorkPtr> works) {
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<JoinedWorks>(std::move(works));
}

}  // namespace lockstep::internal
