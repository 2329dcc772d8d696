#include "lockstep/parallel/ddp/equal_replicas.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <string_view>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {
namespace {

constexpr int64_t kPieceBytes = int64_t{250} << 20;
constexpr size_t kMostInFlight = 2;  // enough to hide the copies of one piece

// One broadcast: tensors of one dtype and device as one flat tensor.
class Piece {
 public:
  Piece(std::vector<at::Tensor> members, int src, const ProcessGroupPtr& group)
      : members_(std::move(members)) {
    std::vector<at::Tensor> flat;
    for (const auto& member : members_) {
      flat.push_back(member.contiguous().view({-1}));
    }
    // A single contiguous tensor is broadcast in place.
    flat_ = flat.size() == 1 ? flat[0] : at::cat(flat);
    work_ = broadcast(flat_, src, {.group = group, .async_op = true});
  }

  void finish() {
    work_->wait();
    int64_t offset = 0;
    for (auto& member : members_) {
      auto part = flat_.narrow(0, offset, member.numel());
      offset += member.numel();
      if (member.numel() == 0 || part.data_ptr() == member.data_ptr()) continue;
      member.copy_(part.view(member.sizes()));
    }
  }

 private:
  std::vector<at::Tensor> members_;
  at::Tensor flat_;
  WorkPtr work_;
};

}  // namespace

void broadcast_coalesced(const std::vector<at::Tensor>& tensors, int src,
                         const ProcessGroupPtr& group) {
  // A process that takes a place gets these tensors with the rest of the state.
  if (inside(group).is_apart()) return;
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  auto pieces = assign_buckets(tensors, order, {kPieceBytes, kPieceBytes});
  std::ranges::sort(pieces);  // by their first tensor

  std::deque<Piece> in_flight;
  auto finish_first = [&] {
    in_flight.front().finish();
    in_flight.pop_front();
  };
  for (const auto& piece : pieces) {
    if (in_flight.size() == kMostInFlight) finish_first();
    std::vector<at::Tensor> members;
    for (size_t index : piece) members.push_back(tensors[index].detach());
    in_flight.emplace_back(std::move(members), src, group);
  }
  while (!in_flight.empty()) finish_first();
}

std::string replica_difference(const std::vector<NamedParameter>& tensors,
                               const ProcessGroupPtr& group) {
  const at::NoGradGuard no_grad;
  Agreement agreement(group);
  for (const auto& [name, tensor] : tensors) {
    const auto data = tensor.cpu().contiguous();
    Digest digest;
    digest.add(std::string_view(static_cast<const char*>(data.const_data_ptr()),
                                data.nbytes()));
    agreement.hold(name, std::to_string(digest.value()));
  }
  const auto found = agreement.compare();
  if (!found) return {};
  return c10::str(found->name, " of rank ", found->rank,
                  " differs from that of rank ", found->first_rank);
}

}  // namespace lockstep::internal
