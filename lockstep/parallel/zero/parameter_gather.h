#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/zero/partition.h"

namespace lockstep {

// Gives every rank the elements that the others have stepped.
//
// Parameters that are cut travel where they lie, one all_gather each; what is
// whole and smaller than kLarge, and the last few elements of those that are
// cut, together in one all_gather a device, through a buffer; what is whole and
// large is broadcast. Use from one thread. Errors: those of the collectives,
// behind which parameters hold what had come.
class ParameterGather {
 public:
  static constexpr size_t kLarge = size_t{1} << 20;  // bytes

  // `parameters` are alike on all ranks of `group`, and keep their memory.
  ParameterGather(const std::vector<at::Tensor>& parameters,
                  const std::vector<Ranges>& ranges, ProcessGroupPtr group);

  // Collective; blocking as collectives are.
  void run();

 private:
  struct InPlace {
    at::Tensor all;
    at::Tensor mine;
  };
  struct Broadcast {
    at::Tensor parameter;
    int source;  // of the default group
  };
  // Small pieces of one device, as bytes.
  struct Packed {
    at::Tensor all;
    at::Tensor mine;
    // Pairs of the same shape and dtype: in a parameter, and in `all`.
    std::vector<at::Tensor> my_pieces, my_places;
    std::vector<at::Tensor> their_pieces, their_places;
  };
  struct Small {
    at::Tensor piece;
    size_t rank;
  };
  void pack(const std::vector<Small>& small);

  ProcessGroupPtr group_;
  std::vector<InPlace> in_place_;
  std::vector<Broadcast> broadcasts_;
  std::vector<Packed> packed_;
};

}  // namespace lockstep
