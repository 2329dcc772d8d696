#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/zero/partition.h"

namespace lockstep::internal {

class FlightRecorder;

// Gives every rank the elements that the others have stepped.
//
// Cut parameters are gathered in place, by one all_gather each. Whole
// parameters smaller than kLarge, and the last few elements of cut ones, travel
// together through a buffer, by one all_gather for each device, in which every
// rank's part is padded to the longest. Ranks that have much more of them than
// others broadcast theirs instead, through a buffer of their own, so that all
// buffers have about twice the bytes of what travels through them, plus
// kLeast for each rank. Large whole parameters are broadcast. Use from one
// thread. Throws the errors of the collectives; parameters then hold what has
// arrived.
class ParameterGather {
 public:
  static constexpr size_t kLarge = size_t{1} << 20;  // bytes
  static constexpr int64_t kLeast = 4096;            // bytes

  // `parameters` must be alike on all ranks of `group`, and keep their memory.
  ParameterGather(const std::vector<at::Tensor>& parameters,
                  const std::vector<Ranges>& ranges, ProcessGroupPtr group);

  // Collective. Blocks as collectives do.
  void run();

  // The bytes of all buffers.
  int64_t buffer_bytes() const;

 private:
  struct InPlace {
    at::Tensor all;
    at::Tensor mine;
  };
  struct Broadcast {
    at::Tensor parameter;
    int source;  // in the default group
  };
  // Small pieces of one device, as bytes.
  struct Packed {
    // In the default group; -1 if it is gathered from all ranks.
    int source = -1;
    at::Tensor all;
    at::Tensor mine;
    // Pairs of equal shape and dtype: pieces in parameters, places in `all`.
    std::vector<at::Tensor> my_pieces, my_places;
    std::vector<at::Tensor> their_pieces, their_places;
  };
  struct Small {
    at::Tensor piece;
    size_t rank;
  };
  void pack(const std::vector<Small>& small);
  void pack(const std::vector<Small>& small, bool gathered);

  ProcessGroupPtr group_;
  std::vector<InPlace> in_place_;
  std::vector<Broadcast> broadcasts_;
  std::vector<Packed> packed_;
};

// One copy of the parameters for all ranks of one host, in memory that they
// share, and the synchronisation of reading and writing it.
//
// A step calls begin_step(), writes, then calls end_step() and wait(). Threads:
// one at a time.
class SharedParameters {
 public:
  // Collective. Moves `parameters`, which must be the same on all ranks, into
  // shared memory, where they get rank 0's values; the memory lives as long as
  // any of them. Throws std::invalid_argument, on all ranks, if the group has
  // no such memory or a parameter cannot be moved there. As long as the group
  // is apart (comm/reconfigure.h) they stay where they are: make this object
  // again when it is not.
  SharedParameters(const std::vector<at::Tensor>& parameters,
                   const ProcessGroupPtr& group);

  // Waits until every rank has come to its step, so that no rank computes with
  // the parameters any more.
  void begin_step();
  // Tells the other ranks that this rank has finished writing; they may read it
  // after their wait(). Does not block.
  void end_step();
  // Waits until every rank's step has ended. Returns at once if no step is
  // running, or if the group was made again since: the step that a rank died in
  // does not end.
  void wait();

 private:
  ProcessGroupPtr group_;
  std::weak_ptr<FlightRecorder> generation_;  // each has a record of its own
  std::unique_ptr<SplitBarrier> barrier_;     // null if nothing is shared
};

}  // namespace lockstep::internal
