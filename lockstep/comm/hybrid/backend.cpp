#include "lockstep/comm/hybrid/backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/errors.h"
#include "lockstep/comm/shm/arguments.h"
#include "lockstep/comm/shm/protocol/bucket_layout.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol_call.h"
#include "lockstep/kernels/kernels.h"
#include "lockstep/state/box.h"

namespace lockstep::internal::hybrid {
namespace {

using shm::left;
using shm::Piece;
using std::chrono::milliseconds;

// A smaller tensor goes over one lane as a whole: a second lane would save less
// than its messages cost.
constexpr int64_t kOneLaneBytes = 64 << 10;
// Larger tensors go in parts of this size: while one part is in the network,
// the next is reduced in memory.
constexpr int64_t kPartBytes = 4 << 20;

template <typename Options>
Options gloo_options(const Deadline& deadline) {
  Options options;
  options.timeout = left(deadline);
  return options;
}

void finish(const c10::intrusive_ptr<c10d::Work>& work,
            const Deadline& deadline) {
  if (!work->wait(left(deadline))) {
    throw c10::DistBackendError("it was aborted");
  }
}

void reduce_into(const at::Tensor& result, const std::vector<at::Tensor>& of,
                 const shm::Reduction& by) {
  std::vector<const void*> sources;
  for (const auto& each : of) sources.push_back(each.const_data_ptr());
  void* const destination = result.mutable_data_ptr();
  kernels::reduce({&destination, 1}, sources,
                  static_cast<size_t>(result.numel()), by.dtype, by.op);
}

at::Tensor cut(const at::Tensor& data, Range range) {
  return data.narrow(0, range.begin, range.size());
}

}  // namespace

Backend::Backend(int rank, int size, Topology topology, Links links,
                 milliseconds timeout)
    : c10d::Backend(rank, size),
      topology_(std::move(topology)),
      links_(std::move(links)),
      timeout_(timeout) {
  queue_.emplace("lockstep-hybrid");
}

std::string Backend::departures() const {
  if (!links_.local) return {};
  return shm::translated([&] { return links_.local->departures(); });
}

void Backend::leave() {
  // Ends the queue first: pending operations use what is declared before it.
  queue_.reset();
  if (links_.local) links_.local->leave();
}

void Backend::await_peers(const Deadline& deadline) const {
  traits_of(*links_.flat).await_peers(deadline);
  if (links_.lane) traits_of(*links_.lane).await_peers(deadline);
}

Backend::~Backend() { leave(); }

template <typename CallOptions, typename Operation>
Backend::WorkPtr Backend::issue(c10d::OpType type, const CallOptions& options,
                                Tensors results, Operation operation) {
  const auto timeout =
      options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
  const auto deadline = Deadline::after(timeout);
  auto step = [this, deadline, run = std::move(operation)]() mutable {
    at::NoGradGuard no_grad;
    try {
      shm::translated([&] { run(deadline); });
    } catch (const std::exception& error) {  // Gloo's are not c10::Error
      std::string reason = words_of(error);
      // The death of a rank on this host often shows in the network first,
      // because the ranks that waited for it fail.
      auto dead = links_.local ? links_.local->departures() : std::string();
      const auto blame = dead.empty() ? Blame::self : Blame::others;
      if (reason.find(dead) == reason.npos) reason = dead + "; " + reason;
      // Other hosts may have gone on with this call: there is no way back.
      break_down(blame == Blame::self ? reason : dead, blame);
      // The kind of the failure says whether this rank was its cause.
      if (dynamic_cast<const Disagreement*>(&error) != nullptr) {
        throw Disagreement(reason);
      }
      const bool is_of_peers =
          dynamic_cast<const c10::DistError*>(&error) != nullptr;
      if (dynamic_cast<const std::logic_error*>(&error) != nullptr ||
          (dynamic_cast<const c10::Error*>(&error) != nullptr &&
           !is_of_peers)) {
        throw;
      }
      throw c10::DistBackendError(reason);
    }
  };
  if (options.asyncOp) {
    return queue_->enqueue(getRank(), type, timeout, std::move(results),
                           std::move(step));
  }
  bool begun = false;
  try {
    queue_->run(timeout, [&] {
      begun = true;
      step();
    });
  } catch (const std::exception& error) {
    // The peers count a call in which this rank did not take part.
    if (!begun) break_down(words_of(error), Blame::self);
    throw;
  }
  return completed_work();
}

template <typename CallOptions, typename Operation>
Backend::WorkPtr Backend::forward(c10d::OpType type, const CallOptions& options,
                                  Tensors results, Operation operation) {
  return issue(type, options, std::move(results),
               [run = std::move(operation)](const Deadline& deadline) mutable {
                 finish(run(), deadline);
               });
}

void Backend::finish_lane(const WorkPtr& work, const Deadline& deadline) const {
  try {
    finish(work, deadline);
  } catch (const std::exception& error) {
    throw c10::DistBackendError(c10::str("between the hosts, with rank ",
                                         links_.lane_peers, ": ",
                                         words_of(error)));
  }
}

void Backend::break_down(const std::string& reason, Blame blame) {
  if (links_.local && blame == Blame::self) links_.local->hang_up(reason);
  if (links_.local && blame == Blame::others) links_.local->pass_on(reason);
  if (links_.lane) links_.lane->abort();
  links_.flat->abort();
}

void Backend::abort() { abort("the group was aborted", Blame::self); }

void Backend::abort_because(const std::string& cause) {
  abort(cause, Blame::others);
}

void Backend::abort(const std::string& reason, Blame blame) {
  queue_->close(
      std::make_exception_ptr(c10::DistBackendError("the group was aborted")),
      [&] { break_down(reason, blame); });
}

void Backend::keep_cause(const std::string& cause) {
  if (links_.local) links_.local->keep_cause(cause);
}

int Backend::host_of(int rank) const {
  for (size_t host = 0; host < topology_.hosts.size(); ++host) {
    if (std::ranges::count(topology_.hosts[host], rank)) {
      return static_cast<int>(host);
    }
  }
  throw std::invalid_argument(
      c10::str("there is no rank ", rank, " in a group of ", getSize()));
}

void Backend::all_reduce(const at::Tensor& data, ReduceOpType op,
                         std::optional<int> only_host,
                         const Deadline& deadline) {
  const auto element = static_cast<int64_t>(data.element_size());
  const int lanes =
      data.numel() * element <= kOneLaneBytes ? 1 : topology_.lanes();
  const bool average = op == c10d::ReduceOp::AVG;
  const bool half = c10::isReducedFloatingType(data.scalar_type());
  // Half types are averaged inside each host already: their sum may be too
  // large.
  const auto inner =
      shm::require_reduction("all_reduce", data.scalar_type(),
                             average && !half ? c10d::ReduceOp::SUM : op);
  // Gloo's MIN and MAX may lose a NaN, which wins in ours. So Gloo only gathers
  // the hosts' slices then, and reduce_into() reduces them.
  const bool extreme =
      (op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX) &&
      c10::isFloatingType(data.scalar_type()) &&
      topology_.hosts.size() <= shm::kMaxRanks;
  const bool has_lane = topology_.local < lanes;
  const int neighbours = local_size();
  auto options = gloo_options<c10d::AllreduceOptions>(deadline);
  options.reduceOp = average ? c10d::ReduceOp::SUM : op;
  auto* bytes = static_cast<std::byte*>(data.mutable_data_ptr());

  auto slices_of = [&](Range part) {
    std::vector<Range> slices;
    for (int local = 0; local < neighbours; ++local) {
      slices.push_back(local < lanes
                           ? shm::equal_slice(part, local, lanes, element)
                           : Range{part.end, part.end});
    }
    return slices;
  };
  auto reduce_inside = [&](Range part) {
    if (!links_.local) return;
    std::vector<const void*> inputs;
    std::vector<size_t> counts;
    for (const auto& slice : slices_of(part)) {
      inputs.push_back(bytes + slice.begin * element);
      counts.push_back(slice.size());
    }
    links_.local->reduce_scatter(const_cast<void*>(inputs[topology_.local]),
                                 inputs, counts, inner.dtype, inner.op,
                                 left(deadline));
  };
  auto gather_inside = [&](Range part) {
    if (!links_.local || (only_host && *only_host != topology_.host)) return;
    std::vector<shm::Bytes> outputs;
    for (const auto& slice : slices_of(part)) {
      outputs.push_back({bytes + slice.begin * element,
                         static_cast<size_t>(slice.size() * element)});
    }
    const auto& own = outputs[topology_.local];
    links_.local->all_gather(outputs, {own.data, own.size}, inner.dtype,
                             left(deadline));
  };

  struct UnderWay {
    Range part;
    at::Tensor slice{};  // of this rank's lane
    Tensors of_hosts{};  // if Gloo only gathers
    WorkPtr work{};
  };
  std::vector<UnderWay> parts;
  const int64_t step = std::max<int64_t>(1, kPartBytes / element);
  for (int64_t begin = 0; begin == 0 || begin < data.numel(); begin += step) {
    const Range part{begin, std::min(begin + step, data.numel())};
    reduce_inside(part);
    parts.push_back({.part = part});
    if (!has_lane) continue;
    parts.back().slice = cut(data, slices_of(part)[topology_.local]);
    if (parts.back().slice.numel() == 0) continue;
    Tensors list{parts.back().slice};
    if (extreme) {
      auto& of_hosts = parts.back().of_hosts;
      for (size_t host = 0; host < topology_.hosts.size(); ++host) {
        of_hosts.push_back(at::empty_like(list[0]));
      }
      std::vector<Tensors> outputs{of_hosts};
      parts.back().work = links_.lane->allgather(
          outputs, list, gloo_options<c10d::AllgatherOptions>(deadline));
      continue;
    }
    if (average && half) {
      list[0].mul_(static_cast<double>(neighbours) / getSize());
    }
    parts.back().work = links_.lane->allreduce(list, options);
  }
  for (auto& [part, slice, of_hosts, work] : parts) {
    if (work) {
      finish_lane(work, deadline);
      if (average && !half) slice.div_(getSize());
      if (extreme) reduce_into(slice, of_hosts, inner);
    }
    gather_inside(part);
  }
}

void Backend::broadcast_inside(const at::Tensor& data, int local_root,
                               const Deadline& deadline) {
  if (!links_.local) return;
  links_.local->broadcast({data.mutable_data_ptr(), data.nbytes()}, local_root,
                          shm::moved_as(data.scalar_type()), left(deadline));
}

void Backend::broadcast(const at::Tensor& data, int root,
                        const Deadline& deadline) {
  const int root_host = host_of(root);
  const bool at_home = root_host == topology_.host;
  if (at_home) {
    const auto& here = topology_.hosts[topology_.host];
    broadcast_inside(
        data, static_cast<int>(std::ranges::find(here, root) - here.begin()),
        deadline);
  }
  if (topology_.local == 0 && data.numel() != 0) {
    auto options = gloo_options<c10d::BroadcastOptions>(deadline);
    options.rootRank = root_host;
    Tensors list{data};
    finish_lane(links_.lane->broadcast(list, options), deadline);
  }
  if (!at_home) broadcast_inside(data, 0, deadline);
}

void Backend::all_gather(
    const at::Tensor& input,
    const std::function<void(int rank, const at::Tensor&)>& take,
    const Deadline& deadline) {
  // One block for each host, with one row for each of its ranks.
  std::vector<at::Tensor> blocks;
  for (const auto& ranks : topology_.hosts) {
    blocks.push_back(at::empty(
        {static_cast<int64_t>(ranks.size()), input.numel()}, input.options()));
  }
  auto& own = blocks[topology_.host];
  own[topology_.local].copy_(input);
  if (links_.local) {
    std::vector<shm::Bytes> rows;
    for (int local = 0; local < local_size(); ++local) {
      rows.push_back({own[local].mutable_data_ptr(), input.nbytes()});
    }
    links_.local->all_gather(rows, {rows[topology_.local].data, input.nbytes()},
                             shm::moved_as(input.scalar_type()),
                             left(deadline));
  }
  if (topology_.local == 0 && input.numel() != 0) {
    std::vector<WorkPtr> works;
    for (size_t host = 0; host < blocks.size(); ++host) {
      auto options = gloo_options<c10d::BroadcastOptions>(deadline);
      options.rootRank = static_cast<int64_t>(host);
      Tensors list{blocks[host].view({-1})};
      works.push_back(links_.lane->broadcast(list, options));
    }
    for (const auto& work : works) finish_lane(work, deadline);
  }
  for (size_t host = 0; host < blocks.size(); ++host) {
    if (static_cast<int>(host) != topology_.host) {
      broadcast_inside(blocks[host], 0, deadline);
    }
    for (size_t local = 0; local < topology_.hosts[host].size(); ++local) {
      take(topology_.hosts[host][local],
           blocks[host][static_cast<int64_t>(local)]);
    }
  }
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors,
                                    const c10d::AllreduceOptions& options) {
  const auto& tensor = shm::single("allreduce", tensors);
  if (tensor.is_sparse()) {
    return forward(c10d::OpType::ALLREDUCE, options, tensors,
                   [this, list = tensors, options]() mutable {
                     return links_.flat->allreduce(list, options);
                   });
  }
  const ReduceOpType op = options.reduceOp;
  shm::require_reduction("allreduce", tensor.scalar_type(), op);
  Piece piece("allreduce", tensor, Piece::Use::update);
  return issue(c10d::OpType::ALLREDUCE, options, tensors,
               [this, piece = std::move(piece), op](const Deadline& deadline) {
                 all_reduce(piece.flat(), op, std::nullopt, deadline);
                 piece.write_back();
               });
}

Backend::WorkPtr Backend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const ReduceOpType op = options.reduceOp;
  for (const auto& tensor : tensors) {
    shm::require_reduction("allreduce_coalesced", tensor.scalar_type(), op);
  }
  auto list = shm::pieces("allreduce_coalesced", tensors, Piece::Use::update);
  return issue(c10d::OpType::ALLREDUCE_COALESCED, options, tensors,
               [this, list = std::move(list), op](const Deadline& deadline) {
                 for (const auto& piece : list) {
                   all_reduce(piece.flat(), op, std::nullopt, deadline);
                 }
                 shm::write_back(list);
               });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors,
                                 const c10d::ReduceOptions& options) {
  const auto& tensor = shm::single("reduce", tensors);
  const ReduceOpType op = options.reduceOp;
  shm::require_reduction("reduce", tensor.scalar_type(), op);
  const int root = shm::checked_rank("reduce", options.rootRank, getSize());
  Piece piece("reduce", tensor, Piece::Use::update);
  return issue(
      c10d::OpType::REDUCE, options, tensors,
      [this, piece = std::move(piece), op, root](const Deadline& deadline) {
        if (root == getRank()) {
          all_reduce(piece.flat(), op, host_of(root), deadline);
          piece.write_back();
        } else {
          // The tensors of the other ranks stay as they were.
          all_reduce(piece.flat().clone(), op, host_of(root), deadline);
        }
      });
}

Backend::WorkPtr Backend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs,
    const c10d::ReduceScatterOptions& options) {
  const auto& output = shm::single("reduce_scatter", outputs);
  const auto& list = shm::one_a_rank("reduce_scatter", inputs, getSize());
  const ReduceOpType op = options.reduceOp;
  shm::require_reduction("reduce_scatter", output.scalar_type(), op);
  return issue(
      c10d::OpType::REDUCE_SCATTER, options, outputs,
      [this, output, list, op](const Deadline& deadline) {
        std::vector<at::Tensor> rows;
        int64_t own = 0;
        for (int rank = 0; rank < getSize(); ++rank) {
          rows.push_back(list[rank].reshape({-1}));
          if (rank < getRank()) own += rows.back().numel();
        }
        const auto all = at::cat(rows);
        all_reduce(all, op, std::nullopt, deadline);
        output.copy_(all.narrow(0, own, output.numel()).view(output.sizes()));
      });
}

Backend::WorkPtr Backend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  shm::require_same_dtype("_reduce_scatter_base", output, input);
  shm::require_elements("_reduce_scatter_base", input,
                        output.numel() * getSize());
  Tensors outputs{output};
  TensorLists inputs(1);
  for (const auto& row : input.reshape({getSize(), -1}).unbind(0)) {
    inputs[0].push_back(row);
  }
  return reduce_scatter(outputs, inputs, options);
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors,
                                    const c10d::BroadcastOptions& options) {
  const auto& tensor = shm::single("broadcast", tensors);
  const int root = shm::checked_rank("broadcast", options.rootRank, getSize());
  Piece piece("broadcast", tensor, Piece::Use::update);
  return issue(
      c10d::OpType::BROADCAST, options, tensors,
      [this, piece = std::move(piece), root](const Deadline& deadline) {
        broadcast(piece.flat(), root, deadline);
        if (root != getRank()) piece.write_back();
      });
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  const auto& input = shm::single("allgather", inputs);
  const auto& list = shm::one_a_rank("allgather", outputs, getSize());
  for (const auto& output : list) {
    shm::require_same_dtype("allgather", output, input);
    shm::require_elements("allgather", output, input.numel());
  }
  Piece piece("allgather", input, Piece::Use::read);
  return issue(
      c10d::OpType::ALLGATHER, options, list,
      [this, piece = std::move(piece), list](const Deadline& deadline) {
        all_gather(
            piece.flat(),
            [&](int rank, const at::Tensor& row) {
              list[rank].copy_(row.view(list[rank].sizes()));
            },
            deadline);
      });
}

Backend::WorkPtr Backend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  shm::require_same_dtype("_allgather_base", output, input);
  shm::require_elements("_allgather_base", output, input.numel() * getSize());
  Piece from("_allgather_base", input, Piece::Use::read);
  Piece to("_allgather_base", output, Piece::Use::write);
  return issue(
      c10d::OpType::_ALLGATHER_BASE, options, {output},
      [this, from = std::move(from),
       to = std::move(to)](const Deadline& deadline) {
        const auto rows = to.flat().view({getSize(), -1});
        all_gather(
            from.flat(),
            [&](int rank, const at::Tensor& row) { rows[rank].copy_(row); },
            deadline);
        to.write_back();
      });
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  return forward(c10d::OpType::GATHER, options,
                 outputs.empty() ? Tensors{} : outputs[0],
                 [this, outputs, inputs, options]() mutable {
                   return links_.flat->gather(outputs, inputs, options);
                 });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                  const c10d::ScatterOptions& options) {
  return forward(c10d::OpType::SCATTER, options, outputs,
                 [this, outputs, inputs, options]() mutable {
                   return links_.flat->scatter(outputs, inputs, options);
                 });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  return forward(
      c10d::OpType::ALLTOALL_BASE, options, {output},
      [this, output, input, output_splits, input_splits, options]() mutable {
        return links_.flat->alltoall_base(output, input, output_splits,
                                          input_splits, options);
      });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return issue(
      c10d::OpType::BARRIER, options, {}, [this](const Deadline& deadline) {
        if (links_.local) links_.local->barrier(left(deadline));
        if (topology_.local == 0) {
          finish_lane(links_.lane->barrier(
                          gloo_options<c10d::BarrierOptions>(deadline)),
                      deadline);
        }
        if (links_.local) links_.local->barrier(left(deadline));
      });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return links_.flat->send(tensors, to, tag);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return links_.flat->recv(tensors, from, tag);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return links_.flat->recvAnysource(tensors, tag);
}

}  // namespace lockstep::internal::hybrid
