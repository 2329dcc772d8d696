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
// are in docs/shared-memory.md.
namespace lockstep::shm {

using kernels::DType;
using kernels::ReduceOp;
using std::chrono::milliseconds;

class Message;
struct Core;

// Where a piece of memory lies.
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
// Every rank calls the same collectives in the same order. Each call compares
// its number, operation, dtype, sizes, root and reduce operation with those of
// all other ranks before any data is touched; where they differ all ranks
// throw CallMismatch with every rank's description (of sizes that differ by
// pair: with the first pair that disagrees), and the group goes on. So every
// collective, a broadcast too, waits for all ranks to come. What a rank can see
// by itself (a root that is none, too few sizes, an operation that the dtype
// does not have) is not checked here: the caller does.
//
// Threads: one collective at a time, from any thread (the caller's affair).
// Messages and registered memory: any thread, at any time. hang_up(): any.
//
// Blocking: each call blocks for `timeout` at most, in all its waits together.
// It spins while there is a core for every rank, then yields the core, then
// sleeps and looks at the peers every 50 ms.
//
// Errors: GroupBroken names the rank that died or left, or the one that did not
// come with what it called last, elapsed and allowed time. All peers then fail
// within a second. A rank that comes late to a call that its peers gave up may
// still see that call end well, and fails at the next. Ranks that wait for each
// other in different collective calls are told so within a second
// (standstill.h): all throw GroupBroken with each rank's call.
//
// Results are bit-equal on all ranks and independent of timing: element i of a
// reduction is ((rank 0 op rank 1) op rank 2) ..., in the arithmetic of
// kernels::reduce().
class Group {
 public:
  explicit Group(const Membership& membership);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  // Leaves, if it has not. No call may be under way.
  ~Group();

  int rank() const;
  int size() const;
  const Tuning& tuning() const;
  // Collectives that were begun.
  uint64_t sequence_number() const;

  void barrier(milliseconds timeout);

  // `count` elements each.
  void all_reduce(void* data, size_t count, DType dtype, ReduceOp op,
                  milliseconds timeout);
  // Only the root's data becomes the result; that of the others stays.
  void reduce(void* data, size_t count, DType dtype, ReduceOp op, int root,
              milliseconds timeout);
  // `output`, `counts[rank()]` elements, becomes the reduction of all ranks'
  // `inputs[rank()]`. inputs[r] holds counts[r] elements; counts are the same
  // on all ranks. The output may be inputs[rank()].
  void reduce_scatter(void* output, std::span<const void* const> inputs,
                      std::span<const size_t> counts, DType dtype, ReduceOp op,
                      milliseconds timeout);

  // Bytes of elements of `dtype`, which is only compared.
  void broadcast(Bytes data, int root, DType dtype, milliseconds timeout);
  // outputs[r] becomes rank r's input. Sizes may differ between ranks.
  void all_gather(std::span<const Bytes> outputs, ConstBytes input, DType dtype,
                  milliseconds timeout);
  // As all_gather, on the root only; `outputs` is empty elsewhere.
  void gather(std::span<const Bytes> outputs, ConstBytes input, int root,
              DType dtype, milliseconds timeout);
  // `output` becomes the root's inputs[rank()]; `inputs` is empty elsewhere.
  void scatter(Bytes output, std::span<const ConstBytes> inputs, int root,
               DType dtype, milliseconds timeout);
  // outputs[r] becomes rank r's inputs[rank()].
  void all_to_all(std::span<const Bytes> outputs,
                  std::span<const ConstBytes> inputs, DType dtype,
                  milliseconds timeout);

  // Messages: kept in order between two ranks for one tag. The bytes of a
  // message that is sent and those of what receives it are compared by the
  // receiver (CallMismatch, and the message is gone), and so are the dtypes.
  // Data must live until the message has ended. A send ends when its bytes
  // are in shared memory, which may be before they are received.
  static constexpr int kAnySource = -1;
  std::shared_ptr<Message> start_send(int to, int32_t tag, ConstBytes data,
                                      DType dtype);
  std::shared_ptr<Message> start_receive(int from, int32_t tag, Bytes data,
                                         DType dtype);
  // Blocks; drives all of this rank's messages meanwhile. A message whose wait
  // runs out of time is given up, as by give_up(), unless it ended just then.
  // A message whose peer has gone fails with GroupBroken.
  void wait(Message& message, milliseconds timeout);
  // Without blocking; also drives.
  bool has_ended(Message& message);
  // The message ends, failed with MessageGivenUp, whose words end with `why`,
  // unless it has ended. Its data is the caller's again when this returns. What
  // a receive would have got goes to the next one of its tag; the receive that
  // a send belongs to fails, with an error that names this rank.
  void give_up(Message& message, const std::string& why);
  // Throws what an ended message failed with.
  static void throw_if_failed(const Message& message);
  // Who sent it; of a receive that has ended well.
  static int source(const Message& message);
  // Moves this rank's messages while nobody waits for them; returns soon after
  // `stop` is requested. For a thread of its own. Throws nothing.
  void serve_messages(std::stop_token stop);

  // Memory that the peers can read and write directly, without staging: what
  // reductions of it cost is their own reading and writing only. Owned by the
  // group until free_registered(), which must come before the group's end.
  // Throws std::system_error if there is not that much.
  void* allocate_registered(size_t bytes);
  void free_registered(void* data);

  // "rank 3 died": the peers that are not there any more and did not leave in
  // peace, with what they said; empty if all are well, or if this rank has left
  // itself. A system call; any thread. Call it while waiting for something
  // else.
  std::string departures() const;

  // The peers see this rank as one that has left; what it has published stays
  // readable, and its own messages that have not ended fail. For who must keep
  // the memory for longer: no call may be under way, and only what asks for an
  // ended message and free_registered() come after it.
  void leave();
  // Leaves by an error: pending calls of this rank throw GroupBroken with
  // `reason`, those of the peers name this rank and `reason`. This rank's
  // messages have ended when it returns.
  void hang_up(const std::string& reason);

  // For the rest of the protocol: bucket_exchange.h, arrivals.h,
  // common_memory.h.
  Core& core() const { return *core_; }

 private:
  std::unique_ptr<Core> core_;
  std::atomic<bool> hung_up_{false};
};

}  // namespace lockstep::shm
