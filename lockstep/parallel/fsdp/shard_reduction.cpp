#include "lockstep/parallel/fsdp/shard_reduction.h"

#include <ATen/ATen.h>
#include <c10/core/impl/COW.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <compare>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/parallel/ddp/gradient_arena.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {
namespace {

// Whether the memory of `gradient` belongs to it alone, so that a result may be
// written there: the tensor may be an alias of one that autograd has dropped.
bool has_memory_alone(const at::Tensor& gradient) {
  if (gradient.use_count() != 1 || gradient.is_conj() || gradient.is_neg() ||
      !gradient.is_contiguous() || gradient.storage_offset() != 0 ||
      c10::impl::cow::is_cow_data_ptr(gradient.storage().data_ptr())) {
    return false;
  }
  size_t users = 1;
  // Autograd remembers what a view is a view of, even if it records no graph.
  const auto* view = torch::autograd::impl::get_view_autograd_meta(gradient);
  if (view != nullptr && view->has_fw_view()) {
    const at::Tensor& base = view->get_forward_view().base_;
    if (base.use_count() != 1) return false;
    if (base.is_alias_of(gradient)) ++users;
  }
  return gradient.storage().use_count() == users;
}

// Reduces in memory that the ranks of one host share. Large gradients stay
// where backward computed them (GradientArena); others are copied to one of two
// places, used in turn. Each rank reads its slice from all ranks' places,
// whenever it comes by (advance()); no thread is needed and no rank waits for
// another until a place is needed again, which is two units later.
class SharedShardReduction final : public ShardReduction {
 public:
  SharedShardReduction(const std::vector<FlatParameters*>& flats,
                       const ProcessGroupPtr& group,
                       ProcessGroupPtr replicate_group, bool gathers)
      : ShardReduction(std::move(replicate_group)),
        size_(group->size()),
        compares_order_(!gathers),
        arena_(GradientArena::make(arena_sizes(flats), group)) {
    for (const auto* flat : flats) {
      numbers_.emplace(flat, named_->size());
      named_->push_back({flat->unit_name(), {}});
    }
    std::vector<int64_t> bytes;
    for (const auto* flat : flats) bytes.push_back(bytes_of(*flat));
    std::ranges::sort(bytes, std::greater());
    // The second place has room for the second largest unit, so that one large
    // unit, as an embedding makes it, does not cost its size twice.
    for (size_t i = 0; i < kPlaces && i < bytes.size(); ++i) {
      places_[i].memory = empty_shared({bytes[i]}, at::kByte, group);
    }
    for (auto* flat : flats) {
      for (auto& place : places_) {
        if (!place.has_room(*flat)) continue;
        auto& kind = place.kinds[kind_of(*flat)];
        if (kind.reduction) continue;
        kind.flat = at::empty({0}, flat->reduce_options());
        const auto item = static_cast<int64_t>(kind.flat.element_size());
        kind.flat.set_(place.memory.storage(),
                       place.memory.storage_offset() / item, {flat->padded()});
        const int64_t begin = flat->rank() * flat->slice();
        std::vector<Range> movable;
        for (const auto* parameter : large_of(*flat)) {
          movable.push_back({parameter->offset,
                             parameter->offset + parameter->compute.numel()});
        }
        kind.reduction = make_bucket_reduction(
            {{.flat = kind.flat,
              .owned = {{begin, begin + flat->slice()}},
              .movable = movable}},
            Results::owned, group, arena_ ? arena_->memory() : at::Tensor());
        compares_order_ &= kind.reduction->word_iterations(
            {.name =
                 [named = named_](int64_t code) {
                   return "gradients, " + name_of(code, *named);
                 },
             .difference = "the ranks reduce different gradients",
             .described = [named = named_](
                              int64_t code) { return name_of(code, *named); },
             .remedy = "all ranks must do so in the same order"});
      }
    }
  }
  ~SharedShardReduction() override {
    if (arena_) arena_->disarm();
  }

  void begin_backward() override {
    if (arena_) arena_->arm();
  }

  void start(FlatParameters& flat, int64_t number) override {
    auto& place = places_[places_[next_].has_room(flat) ? next_ : 0];
    next_ = (next_ + 1) % kPlaces;
    finish(place);
    auto& kind = place.kinds.at(kind_of(flat));
    place.current = &kind;
    place.owner = &flat;
    kind.reduction->begin(code_of(flat, number), size_);
    std::vector<uint64_t> offsets;
    if (arena_ && kind.reduction->moves()) offsets = leave(flat, place);
    flat.take_gradients(kind.flat, kind.reduction->contribution_factor(),
                        place.left);
    kind.reduction->publish(0, offsets);
    advance();
  }

  bool compares_order() const override { return compares_order_; }

  void advance() override {
    for (auto& place : places_) {
      if (place.current != nullptr) place.current->reduction->advance();
    }
  }

  void abandon() noexcept override {
    if (arena_) arena_->disarm();
    // Peers may wait in a reduction that this rank has not begun.
    for (auto& place : places_) {
      place.current = nullptr;
      for (auto& [key, kind] : place.kinds) kind.reduction->abandon_all();
      place.left.clear();
    }
    ShardReduction::abandon();
  }

 private:
  static constexpr size_t kPlaces = 2;
  static constexpr int64_t kChecksums = 1 << 16;
  // Units whose gradients may move have the same large parameters.
  struct Kind {
    int64_t padded;
    at::ScalarType dtype;
    std::vector<std::pair<int64_t, int64_t>> large;  // offset, size
    auto operator<=>(const Kind&) const = default;
  };
  // One reduction for all units of one kind in one place.
  struct Reduced {
    at::Tensor flat{};
    std::unique_ptr<BucketReduction> reduction{};
  };
  struct Place {
    at::Tensor memory{};
    std::map<Kind, Reduced> kinds{};
    Reduced* current = nullptr;  // the reduction that is under way
    FlatParameters* owner = nullptr;
    FlatParameters::LeftGradients left{};

    bool has_room(const FlatParameters& flat) const {
      return memory.defined() && memory.numel() >= bytes_of(flat);
    }
  };

  struct Named {
    std::string unit;
    std::string trained;  // FlatParameters::trained() in the last reduction
  };
  using AllNamed = std::vector<Named>;

  // The values that ranks compare in shared memory: the number of the
  // reduction, that of `flat`, and a checksum of FlatParameters::trained().
  int64_t code_of(const FlatParameters& flat, int64_t number) {
    const auto count = static_cast<int64_t>(named_->size());
    if (!compares_order_) return number * count * kChecksums;
    const auto of = numbers_.at(&flat);
    auto& trained = (*named_)[of].trained;
    trained = flat.trained();
    return (number * count + static_cast<int64_t>(of)) * kChecksums +
           checksum(trained);
  }
  static std::string name_of(int64_t code, const AllNamed& all) {
    const auto count = static_cast<int64_t>(all.size());
    const auto number = code / kChecksums;
    const auto& own = all[static_cast<size_t>(number % count)];
    const auto trained = code % kChecksums;
    std::string text = "those of " + own.unit;
    if (trained != 0) {
      text += ", whose parameters have " +
              (trained == checksum(own.trained)
                   ? "requires_grad " + own.trained + ","
                   : std::string("another requires_grad,"));
    }
    return c10::str(text, " in reduction ", number / count);
  }
  static int64_t checksum(const std::string& trained) {
    if (trained.empty()) return 0;
    return 1 + static_cast<int64_t>(std::hash<std::string>()(trained) %
                                    (kChecksums - 1));
  }
  static int64_t bytes_of(const FlatParameters& flat) {
    return flat.padded() *
           static_cast<int64_t>(c10::elementSize(flat.reduce_dtype()));
  }
  static Kind kind_of(const FlatParameters& flat) {
    Kind kind{flat.padded(), flat.reduce_dtype(), {}};
    for (const auto* parameter : large_of(flat)) {
      kind.large.emplace_back(parameter->offset, parameter->compute.numel());
    }
    return kind;
  }
  // Returns the parameters whose gradients need not be copied.
  static std::vector<const FlatParameters::Parameter*> large_of(
      const FlatParameters& flat) {
    std::vector<const FlatParameters::Parameter*> large;
    for (const auto& parameter : flat.parameters()) {
      if (parameter.compute.scalar_type() == flat.reduce_dtype() &&
          parameter.compute.numel() * c10::elementSize(flat.reduce_dtype()) >=
              placed_bytes()) {
        large.push_back(&parameter);
      }
    }
    return large;
  }
  // Returns the sizes of blocks for the unit that backward computes, and those
  // that are being reduced.
  static std::vector<size_t> arena_sizes(
      const std::vector<FlatParameters*>& flats) {
    std::map<size_t, std::pair<size_t, size_t>> counts;  // most of a unit, all
    for (const auto* flat : flats) {
      std::map<size_t, size_t> own;
      for (const auto* parameter : large_of(*flat)) {
        ++own[parameter->compute.nbytes()];
      }
      for (const auto& [bytes, count] : own) {
        auto& [most, all] = counts[bytes];
        most = std::max(most, count);
        all += count;
      }
    }
    std::vector<size_t> sizes;
    for (const auto& [bytes, count] : counts) {
      const auto& [most, all] = count;
      sizes.insert(sizes.end(), std::min(all, (kPlaces + 1) * most), bytes);
    }
    return sizes;
  }

  // Returns for each movable range where its gradient lies, and keeps the
  // gradients that stay there.
  std::vector<uint64_t> leave(FlatParameters& flat, Place& place) const {
    std::vector<uint64_t> offsets;
    for (const auto* parameter : large_of(flat)) {
      offsets.push_back(kInBucket);
      auto& gradient = parameter->compute.mutable_grad();
      if (!gradient.defined() || parameter->accumulated.defined() ||
          gradient.layout() != at::kStrided || !has_memory_alone(gradient)) {
        continue;
      }
      const auto offset =
          arena_->offset_of(gradient.const_data_ptr(), gradient.nbytes());
      if (!offset) continue;
      offsets.back() = *offset;
      place.left[parameter] = std::exchange(gradient, at::Tensor());
    }
    return offsets;
  }

  void finish(Place& place) {
    if (place.current == nullptr) return;
    auto& kind = *std::exchange(place.current, nullptr);
    kind.reduction->finish();
    deliver(*place.owner, place.owner->own_slice_of(
                              kind.flat, std::exchange(place.left, {})));
  }
  void finish_started() override {
    // In the order in which they were started, which is the same on all ranks.
    for (size_t i = 0; i < kPlaces; ++i) {
      finish(places_[(next_ + i) % kPlaces]);
    }
    if (arena_) arena_->disarm();
  }

  const int size_;
  // If not, one rank alone would throw while the others compare.
  bool compares_order_;
  std::map<const FlatParameters*, size_t> numbers_{};  // in named_
  const std::shared_ptr<AllNamed> named_ = std::make_shared<AllNamed>();
  const std::shared_ptr<GradientArena> arena_;  // null if gradients are copied
  std::array<Place, kPlaces> places_{};
  size_t next_ = 0;
};

// Reduces by reduce_scatter_tensor(), one after the other, in buffers of the
// gathers.
class CollectiveShardReduction final : public ShardReduction {
 public:
  CollectiveShardReduction(ProcessGroupPtr group,
                           ProcessGroupPtr replicate_group, BufferPool& pool)
      : ShardReduction(std::move(replicate_group)),
        group_(std::move(group)),
        pool_(pool) {}

  void start(FlatParameters& flat, int64_t /*number*/) override {
    finish_started();
    if (group_->size() == 1) {
      auto reduced = at::empty({flat.padded()}, flat.reduce_options());
      flat.take_gradients(reduced, 1);
      return deliver(flat, reduced);
    }
    owner_ = &flat;
    staging_ = pool_.take(flat.padded(), flat.reduce_options());
    flat.take_gradients(staging_, 1);
    reduced_ = at::empty({flat.slice()}, flat.reduce_options());
    work_ = reduce_scatter_tensor(
        reduced_, staging_,
        {.op = ReduceOp::AVG, .group = group_, .async_op = true});
  }

  void abandon() noexcept override {
    try {
      if (work_) std::exchange(work_, nullptr)->wait();
    } catch (const std::exception&) {  // given up anyway
    }
    work_.reset();
    ShardReduction::abandon();
  }

 private:
  void finish_started() override {
    if (!work_) return;
    std::exchange(work_, nullptr)->wait();
    pool_.give_back(std::exchange(staging_, at::Tensor()));
    deliver(*owner_, std::exchange(reduced_, at::Tensor()));
  }

  const ProcessGroupPtr group_;
  BufferPool& pool_;
  FlatParameters* owner_ = nullptr;
  at::Tensor staging_, reduced_;
  WorkPtr work_;
};

}  // namespace

std::unique_ptr<ShardReduction> ShardReduction::make(
    const std::vector<FlatParameters*>& flats, const ProcessGroupPtr& group,
    const ProcessGroupPtr& replicate_group, BufferPool& pool, bool gathers) {
  const bool shares =
      group->size() > 1 && host_sharing(group) != nullptr &&
      !group->checks_calls() &&
      std::ranges::all_of(flats, [](const FlatParameters* flat) {
        return flat->reduce_options().device().is_cpu();
      });
  if (shares) {
    return std::make_unique<SharedShardReduction>(flats, group, replicate_group,
                                                  gathers);
  }
  return std::make_unique<CollectiveShardReduction>(group, replicate_group,
                                                    pool);
}

void ShardReduction::deliver(FlatParameters& flat, const at::Tensor& reduced) {
  if (!replicate_group_ || replicate_group_->size() == 1) {
    if (compares_order()) return flat.add_to_shards(reduced);
    deliveries_.push_back({&flat, reduced, nullptr});
    return;
  }
  deliveries_.push_back({&flat, reduced,
                         all_reduce(reduced, {.op = ReduceOp::AVG,
                                              .group = replicate_group_,
                                              .async_op = true})});
}

void ShardReduction::finish() {
  const Span span("fsdp", "wait");
  finish_started();
  for (auto& [flat, reduced, work] : std::exchange(deliveries_, {})) {
    if (work) work->wait();
    flat->add_to_shards(reduced);
  }
}

void ShardReduction::abandon() noexcept {
  for (auto& delivery : std::exchange(deliveries_, {})) {
    try {
      if (delivery.work) delivery.work->wait();
    } catch (const std::exception&) {  // given up anyway
    }
  }
}

}  // namespace lockstep::internal
