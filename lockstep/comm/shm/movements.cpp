// The collectives of Backend that move data and compute nothing.

#include <ATen/ATen.h>

#include <stdexcept>
#include <utility>

#include "lockstep/comm/shm/arguments.h"
#include "lockstep/comm/shm/backend.h"
#include "lockstep/comm/shm/piece.h"

namespace lockstep::internal::shm {

using c10d::OpType;
using Tensors = Backend::Tensors;
using Use = Piece::Use;

namespace {

void require_like_own(const char* operation, const Tensors& tensors,
                      const at::Tensor& own, int rank) {
  for (const auto& tensor : tensors) {
    require_same_dtype(operation, tensor, own);
  }
  require_elements(operation, tensors[rank], own.numel());
}

// One all_gather, whose outputs are separate tensors or parts of one tensor.
struct Gathering {
  Piece input;
  Pieces outputs;
  std::vector<Bytes> places;

  void run(Group& group, const Deadline& deadline) const {
    group.all_gather(places, input.const_bytes(), input.moved_as(),
                     left(deadline));
    write_back(outputs);
  }
};

Gathering gather_apart(const char* operation, const Tensors& outputs,
                       const at::Tensor& input, int rank) {
  Gathering gathering{.input = Piece(operation, input, Use::read),
                      .outputs = pieces(operation, outputs, Use::write),
                      .places = {}};
  require_like_own(operation, outputs, input, rank);
  gathering.places = bytes(gathering.outputs);
  for (int i = 0; i < static_cast<int>(outputs.size()); ++i) {
    gathering.input.part_from(gathering.outputs[i], i == rank);
  }
  return gathering;
}

Gathering gather_whole(const at::Tensor& output, const at::Tensor& input,
                       int rank, int size) {
  constexpr const char* kName = "all_gather_into_tensor";
  Gathering gathering{.input = Piece(kName, input, Use::read),
                      .outputs = {Piece(kName, output, Use::write)},
                      .places = {}};
  require_same_dtype(kName, output, input);
  require_elements(kName, output, input.numel() * size);
  gathering.places =
      parts_of(gathering.outputs[0], std::vector<size_t>(size, input.numel()));
  // If the input is this rank's own part of the output, the operation is in
  // place and needs no copy.
  if (gathering.input.data() != gathering.places[rank].data) {
    gathering.input.part_from(gathering.outputs[0], false);
  }
  return gathering;
}

Tensors flattened(const Backend::TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

Backend::WorkPtr Backend::broadcast(Tensors& tensors,
                                    const c10d::BroadcastOptions& options) {
  const auto& tensor = single("broadcast", tensors);
  const int root = checked_rank("broadcast", options.rootRank, getSize());
  const Piece data("broadcast", tensor,
                   root == getRank() ? Use::read : Use::write);
  return issue(OpType::BROADCAST, options, tensors,
               [data, root](Group& group, const Deadline& deadline) {
                 group.broadcast(data.bytes(), root, data.moved_as(),
                                 left(deadline));
                 data.write_back();
               });
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  const auto& input = single("all_gather", inputs);
  const auto& list = one_a_rank("all_gather", outputs, getSize());
  return issue(OpType::ALLGATHER, options, list,
               [all = gather_apart("all_gather", list, input, getRank())](
                   Group& group, const Deadline& deadline) {
                 all.run(group, deadline);
               });
}

Backend::WorkPtr Backend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  return issue(OpType::_ALLGATHER_BASE, options, {output},
               [all = gather_whole(output, input, getRank(), getSize())](
                   Group& group, const Deadline& deadline) {
                 all.run(group, deadline);
               });
}

Backend::WorkPtr Backend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_coalesced";
  require_same_length(kName, outputs.size(), getSize());
  for (const auto& list : outputs) {
    require_same_length(kName, list.size(), inputs.size());
  }
  std::vector<Gathering> all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_input;
    for (const auto& list : outputs) of_input.push_back(list[i]);
    all.push_back(gather_apart(kName, of_input, inputs[i], getRank()));
  }
  return issue(OpType::ALLGATHER_COALESCED, options, flattened(outputs),
               [all = std::move(all)](Group& group, const Deadline& deadline) {
                 for (const auto& each : all) each.run(group, deadline);
               });
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  const int root = checked_rank("gather", options.rootRank, getSize());
  Piece input("gather", single("gather", inputs), Use::read);
  Pieces received;
  if (root == getRank()) {
    const auto& list = one_a_rank("gather", outputs, getSize());
    received = pieces("gather", list, Use::write);
    require_like_own("gather", list, input.tensor(), root);
    for (int i = 0; i < getSize(); ++i) {
      input.part_from(received[i], i == root);
    }
  }
  return issue(OpType::GATHER, options, flattened(outputs),
               [input, received, root](Group& group, const Deadline& deadline) {
                 group.gather(bytes(received), input.const_bytes(), root,
                              input.moved_as(), left(deadline));
                 write_back(received);
               });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                  const c10d::ScatterOptions& options) {
  const int root = checked_rank("scatter", options.rootRank, getSize());
  Piece output("scatter", single("scatter", outputs), Use::write);
  Pieces sent;
  if (root == getRank()) {
    const auto& list = one_a_rank("scatter", inputs, getSize());
    sent = pieces("scatter", list, Use::read);
    require_like_own("scatter", list, output.tensor(), root);
    for (int i = 0; i < getSize(); ++i) output.part_from(sent[i], i == root);
  }
  return issue(OpType::SCATTER, options, outputs,
               [output, sent, root](Group& group, const Deadline& deadline) {
                 group.scatter(output.bytes(), const_bytes(sent), root,
                               output.moved_as(), left(deadline));
                 output.write_back();
               });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  constexpr const char* kName = "all_to_all_single";
  Piece sent(kName, input, Use::read);
  const Piece received(kName, output, Use::write);
  require_same_dtype(kName, output, input);
  sent.part_from(received, false);
  const auto inputs =
      parts_of(sent, element_counts(kName, input, input_splits, getSize()));
  const auto outputs = parts_of(
      received, element_counts(kName, output, output_splits, getSize()));
  return issue(OpType::ALLTOALL_BASE, options, {output},
               [sent, received, inputs, outputs](Group& group,
                                                 const Deadline& deadline) {
                 group.all_to_all(outputs, as_const(inputs),
                                  received.moved_as(), left(deadline));
                 received.write_back();
               });
}

}  // namespace lockstep::internal::shm
