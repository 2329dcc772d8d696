#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/errors.h"
#include "lockstep/comm/shm/protocol/handshake.h"
#include "lockstep/kernels/dtype.h"

// Collectives and messages between processes that share memory. Knows nothing
// of torch. The algorithms, the layout of the segment and the order of memory
// are in docs/internals/shared-memory.md.
namespace lockstep::internal::shm {

using kernels::DType;
using kernels::ReduceOp;
using std::chrono::milliseconds;

class Message;
struct Core;

// A piece of memory.
struct Bytes {
  void* data;
  size_t size;
};
struct ConstBytes {
  const void* data;
  size_t size;
};

// One rank's place in a group.
//
// Every rank calls the same collectives in the same order. Before any data is
// touched, each call compares its number, operation, dtype, sizes, root and
// reduce operation with those of all other ranks. If they differ, all ranks
// throw CallMismatch with every rank's description (if sizes differ by pair:
// with the first pair that disagrees), and the group goes on. So every
// collective, a broadcast too, waits for all ranks to come. Mistakes that a
// rank can see by itself (a root that is not in the group, too few sizes, an
// operation that the dtype does not have) are not checked here: the caller must
// check them.
//
// Threads: one collective at a time, from any thread; the caller must ensure
// that. Messages and registered memory: any thread, at any time. hang_up(),
// pass_on(), keep_cause(): any thread.
//
// Blocking: each call blocks for `timeout` at most, in all its waits together.
// It spins while there is a core for every rank, then yields the core, then
// sleeps and looks at the peers every 10 ms.
//
// Errors: GroupBroken names the rank that died or left; or the rank that did
// not come, with its last call and the elapsed and allowed time. All peers then
// fail within a second. A rank that comes late to a call that its peers gave up
// may still see that call end well, and fails at the next. If ranks wait for
// each other in different collective calls, all throw GroupBroken within a
// second, with each rank's call (standstill.h).
//
// Results are bit-equal on all ranks and independent of timing: element i of a
// reduction is ((rank 0 op rank 1) op rank 2) ..., in the arithmetic of
// kernels::reduce().
class Group {
 public:
  explicit Group(const Membership& membership);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  // Leaves, if this rank has not left. No call may be under way.
  ~Group();

  int rank() const;
  int size() const;

  void barrier(milliseconds timeout);

  // Reduces the `count` elements at `data` of all ranks, into `data` of every
  // rank.
  void all_reduce(void* data, size_t count, DType dtype, ReduceOp op,
                  milliseconds timeout);
  // Like all_reduce(), but only the root's data becomes the result; the data of
  // the others stays.
  void reduce(void* data, size_t count, DType dtype, ReduceOp op, int root,
              milliseconds timeout);
  // `output`, `counts[rank()]` elements, becomes the reduction of all ranks'
  // `inputs[rank()]`. inputs[r] holds counts[r] elements; counts are the same
  // on all ranks. The output may be inputs[rank()].
  void reduce_scatter(void* output, std::span<const void* const> inputs,
                      std::span<const size_t> counts, DType dtype, ReduceOp op,
                      milliseconds timeout);

  // The next five take the bytes of elements of `dtype`, which is only
  // compared.
  void broadcast(Bytes data, int root, DType dtype, milliseconds timeout);
  // outputs[r] becomes rank r's input. Sizes may differ between ranks.
  void all_gather(std::span<const Bytes> outputs, ConstBytes input, DType dtype,
                  milliseconds timeout);
  // Like all_gather(), but only on the root; `outputs` is empty on the other
  // ranks.
  void gather(std::span<const Bytes> outputs, ConstBytes input, int root,
              DType dtype, milliseconds timeout);
  // `output` becomes the root's inputs[rank()]; `inputs` is empty on the other
  // ranks.
  void scatter(Bytes output, std::span<const ConstBytes> inputs, int root,
               DType dtype, milliseconds timeout);
  // outputs[r] becomes rank r's inputs[rank()].
  void all_to_all(std::span<const Bytes> outputs,
                  std::span<const ConstBytes> inputs, DType dtype,
                  milliseconds timeout);

  // Messages between two ranks stay in order for one tag. The receiver compares
  // the bytes and the dtype of a message with those of the receive: if they
  // differ, the receive fails with CallMismatch, and the message is dropped.
  // Data must live until the message has ended. A send ends when its bytes are
  // in shared memory, which may be before they are received.
  static constexpr int kAnySource = -1;
  std::shared_ptr<Message> start_send(int to, int32_t tag, ConstBytes data,
                                      DType dtype);
  std::shared_ptr<Message> start_receive(int from, int32_t tag, Bytes data,
                                         DType dtype);
  // Waits until the message has ended, and moves all of this rank's messages
  // meanwhile. A message whose wait times out is given up, as by give_up(),
  // unless it ended just then. A message whose peer has gone fails with
  // GroupBroken.
  void wait(Message& message, milliseconds timeout);
  // Returns whether the message has ended. Moves messages, but does not block.
  bool has_ended(Message& message);
  // Ends the message, unless it has ended: it fails with MessageGivenUp, whose
  // words end with `why`. When this returns, the caller may use the data again.
  // If the message is a receive, the next receive of its tag gets what it would
  // have got. If it is a send, the receive that it belongs to fails with an
  // error that names this rank.
  void give_up(Message& message, const std::string& why);
  // Throws the failure of an ended message, if it failed.
  static void throw_if_failed(const Message& message);
  // Returns the rank that sent the message, for a receive that has ended well.
  static int source(const Message& message);
  // Moves this rank's messages while no thread waits for them; returns soon
  // after `stop` is requested. For a thread of its own. Throws nothing.
  void serve_messages(std::stop_token stop);

  // Allocates memory that the peers can read and write directly, without
  // staging: a reduction of it costs only its own reading and writing. The
  // group owns it until free_registered(), which must come before the group's
  // end. Throws std::system_error if the system does not have that much.
  void* allocate_registered(size_t bytes);
  void free_registered(void* data);

  // Returns the peers that are gone and did not leave normally, with their last
  // words: "rank 3 died". A peer that went because of another rank has that
  // rank's words, and equal words are returned once. Returns an empty text if
  // all are well, or if this rank has left itself. Makes a system call; any
  // thread. Call it while waiting for something else.
  std::string departures() const;

  // Ends this rank's part in the group normally. What it has published stays
  // readable. Its messages that have not ended fail. Call this instead of the
  // destructor if the memory must stay: no call may be under way, and
  // afterwards only has_ended(), throw_if_failed(), source() and
  // free_registered() may be called.
  void leave();
  // Leaves with an error: pending calls of this rank throw GroupBroken with
  // `reason`; those of the peers name this rank and `reason`. When this
  // returns, all messages of this rank have ended.
  void hang_up(const std::string& reason);
  // Does the same for a failure that another rank had first, or whose words
  // name this rank already: the peers get `cause` as it is.
  void pass_on(const std::string& cause);
  // Says that an operation of this rank, in whatever group, failed because of
  // another rank: if this rank ends, peers that miss it get `cause` ("rank 3
  // died") in place of its own end. The first cause counts. The group goes on.
  // Any thread.
  void keep_cause(const std::string& cause);

  // For other parts of the protocol: bucket_exchange.h,
  // common_memory.h.
  Core& core() const { return *core_; }

 private:
  void hang_up(const std::string& reason, uint32_t how);

  std::unique_ptr<Core> core_;
  std::atomic<bool> hung_up_{false};
};

}  // namespace lockstep::internal::shm
