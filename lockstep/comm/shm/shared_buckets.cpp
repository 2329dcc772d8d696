#include <ATen/ATen.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/param_comms.h"
#include "lockstep/comm/running_call.h"
#include "lockstep/comm/shm/backend.h"
#include "lockstep/comm/shm/piece.h"
#include "lockstep/comm/shm/protocol/bucket_exchange.h"
#include "lockstep/comm/shm/protocol_call.h"

namespace lockstep::internal::shm {
namespace {

// Reduces buckets by a BucketExchange. c10d sees nothing of it, so this class
// gives each reduction a number, a flight record and errors, like those of any
// other collective of the group.
class SharedBuckets final : public BucketReduction {
 public:
  SharedBuckets(std::shared_ptr<Group> group,
                std::vector<ReducedBucket> buckets, at::Tensor arena,
                std::unique_ptr<BucketExchange> exchange, Call call)
      : group_(std::move(group)),
        buckets_(std::move(buckets)),
        arena_(std::move(arena)),
        exchange_(std::move(exchange)),
        call_(std::move(call)) {
    call_.reduce_op = "SUM";
    if (!buckets_.empty()) {
      extent_.type.name = c10::toString(buckets_[0].flat.scalar_type());
    }
    for (const auto& bucket : buckets_) extent_.in += bucket.flat.numel();
    extent_.out = extent_.in;
  }
  ~SharedBuckets() override { end(/*failed=*/true); }

  void begin(int64_t iteration, double divisor) override {
    refuse_in_child(made_in_);
    end(/*failed=*/true);  // if one was abandoned
    current_.number = call_.number = inside(call_.group).next_sequence_number();
    const auto now = Deadline::Clock::now();
    started_ = Deadline::after(call_.timeout, now);
    operation_.emplace(begin_operation(call_, extent_, FlightState::started,
                                       Operation::Spans::none, now));
    checked([&] { exchange_->begin(iteration, divisor); });
  }
  void abandon() override {
    if (made_in_.is_foreign()) return;
    end(/*failed=*/true);
    exchange_->abandon();
  }
  void abandon_all() override {
    if (made_in_.is_foreign()) return;
    end(/*failed=*/true);
    exchange_->abandon_all();
  }
  void reclaim() override {
    call_.number = 0;  // no reduction has begun
    started_ = Deadline::after(call_.timeout);
    checked([&] { exchange_->reclaim(); });
  }
  bool word_iterations(IterationWords words) override {
    exchange_->word_iterations(std::move(words));
    return true;
  }
  double contribution_factor() const override { return 1; }
  bool moves() const override { return exchange_->moves(); }
  using BucketReduction::publish;
  void publish(size_t bucket, std::span<const uint64_t> places) override {
    refuse_in_child(made_in_);
    const ParamComms seen([&]() -> std::optional<CommsCall> {
      if (bucket >= buckets_.size()) return std::nullopt;  // a mistake
      const auto& flat = buckets_[bucket].flat;
      const auto count = static_cast<uint64_t>(flat.numel());
      const auto dtype = static_cast<uint8_t>(flat.scalar_type());
      return CommsCall{
          .call = call_,
          .extent = {.type = {.code = dtype}, .in = count, .out = count},
          .async_op = true,
          .inputs = {flat},
          .outputs = {flat}};
    });
    exchange_->publish(bucket, places);
  }
  size_t advance() override {
    size_t complete = 0;
    checked([&] { complete = exchange_->advance(); });
    return complete;
  }
  void finish() override {
    checked([&] { exchange_->finish(); });
    end(/*failed=*/false);
  }

 private:
  template <typename Step>
  void checked(Step step) {
    refuse_in_child(made_in_);
    current_.function = user_function();
    const CurrentCallScope scope(&current_);
    try {
      translated(step);
    } catch (const c10::DistError& error) {
      end(/*failed=*/true);
      call_.fail(started_, error);
    }
  }
  void end(bool failed) {
    if (operation_) operation_->end(failed);
  }

  const ProcessMark made_in_{};
  // exchange_ uses the others, so it is declared after them.
  const std::shared_ptr<Group> group_;
  const std::vector<ReducedBucket> buckets_;
  const at::Tensor arena_;
  const std::unique_ptr<BucketExchange> exchange_;
  Call call_;
  CurrentCall current_{.operation = call_.operation};
  Buffers::Extent extent_{};
  Deadline started_ = Deadline::after(milliseconds(0));
  std::optional<Operation> operation_{};
};

// Returns the memory of `buckets`.
std::vector<Bucket> memory_of(const std::vector<ReducedBucket>& buckets) {
  std::vector<Bucket> result;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const auto& [flat, owned, movable] = buckets[i];
    if (!flat.defined() || !flat.device().is_cpu() ||
        flat.layout() != at::kStrided || !flat.is_contiguous() ||
        !kernels::is_floating(moved_as(flat.scalar_type()))) {
      throw std::invalid_argument(c10::str(
          "reduce_buckets: bucket ", i, " is ",
          flat.defined() ? flat.toString() : "undefined",
          "; give contiguous cpu tensors of float, double, half or bfloat16"));
    }
    result.push_back({.data = flat.data_ptr(),
                      .count = static_cast<size_t>(flat.numel()),
                      .dtype = moved_as(flat.scalar_type()),
                      .owned = owned,
                      .movable = movable});
  }
  return result;
}

}  // namespace

std::unique_ptr<BucketReduction> Backend::reduce_buckets(
    std::vector<ReducedBucket> buckets, Results results,
    const ProcessGroupPtr& group, milliseconds timeout,
    const at::Tensor& arena) {
  const auto memory = memory_of(buckets);
  BucketExchange::Arena room;
  if (arena.defined()) room = {arena.mutable_data_ptr(), arena.nbytes()};
  std::unique_ptr<BucketExchange> exchange;
  run_in_turn(timeout, [&](milliseconds left) {
    exchange =
        BucketExchange::make(*group_, memory, results, timeout, room, left);
  });
  if (!exchange) return nullptr;
  return std::make_unique<SharedBuckets>(
      group_, std::move(buckets), arena, std::move(exchange),
      Call("reduce_buckets", group, timeout));
}

}  // namespace lockstep::internal::shm
