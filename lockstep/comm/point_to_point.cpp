#include "lockstep/comm/point_to_point.h"

#include <ATen/ATen.h>

#include <deque>
#include <map>

#include "lockstep/comm/collective_work.h"

namespace lockstep {
namespace {

using Use = internal::Buffers::Use;

void require_tag(const internal::Call& call, int tag) {
  if (tag < 0 || tag > kMaxTag) {
    throw call.mistake(
        c10::str("tag is ", tag, "; allowed are 0 to ", kMaxTag));
  }
}

int require_peer(const internal::Call& call, const char* argument, int peer) {
  const int member = call.member(argument, peer);
  if (member == call.group->rank()) {
    throw call.mistake(
        c10::str(argument, " is this rank itself; name another"));
  }
  return member;
}

WorkPtr start_send(const char* operation, const at::Tensor& tensor, int dst,
                   const PointToPointOptions& options, bool async_op) {
  internal::Call call(operation, options.group, options.timeout);
  internal::require_dense(call, "the tensor", tensor);
  require_tag(call, options.tag);
  auto& backend = call.backend(tensor);  // first: the group may be lost
  const int peer = require_peer(call, "dst", dst);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> payload{buffers.move(tensor, Use::read)};
  return internal::run_message(
      std::move(call), async_op, std::move(buffers),
      [&] { return backend.send(payload, peer, options.tag); });
}

// `source`, if given, becomes the sender once a blocking operation has ended.
WorkPtr start_recv(const char* operation, const at::Tensor& tensor, int src,
                   const PointToPointOptions& options, bool async_op,
                   int* source = nullptr) {
  internal::Call call(operation, options.group, options.timeout);
  internal::require_dense(call, "the tensor", tensor);
  require_tag(call, options.tag);
  const auto group = call.group;
  auto& backend = call.backend(tensor);
  const int peer =
      src == kAnySource ? kAnySource : require_peer(call, "src", src);
  internal::Buffers buffers(call);
  std::vector<at::Tensor> payload{buffers.move(tensor, Use::write)};
  WorkPtr work;
  auto handle =
      internal::run_message(std::move(call), async_op, std::move(buffers), [&] {
        work = peer == kAnySource ? backend.recvAnysource(payload, options.tag)
                                  : backend.recv(payload, peer, options.tag);
        return work;
      });
  if (source != nullptr) {
    *source = peer == kAnySource ? group->global_rank(work->sourceRank()) : src;
  }
  return handle;
}

// A message of a batch, ready for its backend.
struct BatchedMessage {
  explicit BatchedMessage(const P2POp& op)
      : call(op.op == P2POp::Kind::isend ? "isend" : "irecv", op.group,
             op.timeout),
        buffers(call),
        sends(op.op == P2POp::Kind::isend),
        peer(call.member("peer", op.peer)),
        tag(op.tag) {
    payload.push_back(buffers.move(op.tensor, sends ? Use::read : Use::write));
  }

  WorkPtr start(c10d::Backend& backend) {
    return sends ? backend.send(payload, peer, tag)
                 : backend.recv(payload, peer, tag);
  }

  internal::Call call;
  internal::Buffers buffers;
  std::vector<at::Tensor> payload{};
  bool sends;
  int peer;
  int tag;
};

// Starts the messages ops[places...] at once, and puts their works in the same
// places; each has ended when all have. Such a backend starts single messages
// one after the other, so that two ranks which both receive first would wait
// for each other.
void start_together(c10d::Backend& backend, const std::vector<P2POp>& ops,
                    const std::vector<size_t>& places,
                    std::vector<WorkPtr>& works) {
  std::deque<BatchedMessage> messages;  // do not move: buffers refer to calls
  for (const auto place : places) messages.emplace_back(ops[place]);
  const auto start_all = [&] {
    backend.startCoalescing();
    try {
      for (auto& message : messages) message.start(backend);
    } catch (...) {
      // End it in any case: otherwise nothing would be started ever again.
      try {
        if (auto begun = backend.endCoalescing()) internal::give_up(*begun);
      } catch (const std::exception&) {
        // The first failure is the one to tell.
      }
      throw;
    }
    return backend.endCoalescing();
  };
  WorkPtr all;
  for (size_t i = 0; i < places.size(); ++i) {
    works[places[i]] =
        internal::run_message(std::move(messages[i].call), /*async_op=*/true,
                              std::move(messages[i].buffers), [&] {
                                if (!all) all = start_all();
                                return all;
                              });
  }
}

}  // namespace

void send(const at::Tensor& tensor, int dst,
          const PointToPointOptions& options) {
  start_send("send", tensor, dst, options, /*async_op=*/false);
}

int recv(const at::Tensor& tensor, int src,
         const PointToPointOptions& options) {
  int source = src;
  start_recv("recv", tensor, src, options, /*async_op=*/false, &source);
  return source;
}

WorkPtr isend(const at::Tensor& tensor, int dst,
              const PointToPointOptions& options) {
  return start_send("isend", tensor, dst, options, /*async_op=*/true);
}

WorkPtr irecv(const at::Tensor& tensor, int src,
              const PointToPointOptions& options) {
  return start_recv("irecv", tensor, src, options, /*async_op=*/true);
}

std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list) {
  internal::Call call("batch_isend_irecv",
                      p2p_op_list.empty() ? nullptr : p2p_op_list[0].group, {});
  if (p2p_op_list.empty()) {
    throw call.mistake("the list is empty; give at least one operation");
  }
  std::vector<at::Tensor> received;
  for (const auto& op : p2p_op_list) {
    if (op.group != p2p_op_list[0].group) {
      throw call.mistake(
          "the operations name different groups; give operations of one group");
    }
    // All are checked before the first is started. This checks the timeout.
    const internal::Call one(call.operation, op.group, op.timeout);
    internal::require_dense(one, "a tensor of the list", op.tensor);
    require_tag(one, op.tag);
    one.backend(op.tensor);
    require_peer(one, "peer", op.peer);
    if (op.op == P2POp::Kind::irecv) received.push_back(op.tensor);
  }
  internal::require_apart(call, received);
  std::vector<WorkPtr> works(p2p_op_list.size());
  try {
    std::map<c10d::Backend*, std::vector<size_t>> together;
    for (size_t i = 0; i < p2p_op_list.size(); ++i) {
      const auto& op = p2p_op_list[i];
      auto& backend = call.backend(op.tensor);
      if (backend.supportsCoalescing()) {
        together[&backend].push_back(i);
        continue;
      }
      const PointToPointOptions options{
          .group = op.group, .tag = op.tag, .timeout = op.timeout};
      works[i] = op.op == P2POp::Kind::isend
                     ? isend(op.tensor, op.peer, options)
                     : irecv(op.tensor, op.peer, options);
    }
    for (const auto& [backend, places] : together) {
      start_together(*backend, p2p_op_list, places, works);
    }
  } catch (...) {
    // The caller gets no handles of the operations that were started.
    for (const auto& work : works) {
      if (work) internal::give_up(*work);
    }
    throw;
  }
  return works;
}

}  // namespace lockstep
