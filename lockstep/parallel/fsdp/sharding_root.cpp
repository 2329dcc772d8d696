#include "lockstep/parallel/fsdp/sharding_root.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/collective_work.h"
#include "lockstep/comm/init.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep::internal {
namespace {

constexpr size_t kBitsOfWord = 63;  // all but the sign

// Tensors that a program's inference mode must not make inference tensors,
// because training uses them, too.
struct OutsideInference {
  const c10::InferenceMode normal{false};
  const at::NoGradGuard no_grad{};
};

// All roots that live. The units of a model have a root each until one contains
// the others, and share their groups of neighbours.
struct LivingRoots {
  std::mutex mutex{};
  std::vector<const ShardingRoot*> all{};
};

LivingRoots& living_roots() {
  static NoDestructor<LivingRoots> roots;
  return *roots;
}

}  // namespace

ShardingRoot::ShardingRoot(ProcessGroupPtr group,
                           ProcessGroupPtr replicate_group)
    : pool_(group),
      group_(std::move(group)),
      replicate_group_(std::move(replicate_group)) {
  auto& living = living_roots();
  const std::lock_guard lock(living.mutex);
  living.all.push_back(this);
  if (job_heals()) on_reconfigured_.emplace([this] { begin_again(); });
}

ShardingRoot::~ShardingRoot() {
  auto& living = living_roots();
  const std::lock_guard lock(living.mutex);
  std::erase(living.all, this);
}

void ShardingRoot::begin_again() {
  const UserFunction function("HealedTraining");
  const OutsideInference training;
  if (reduction_) reduction_->abandon();
  reduction_.reset();
  pool_.clear();
  prepared_.clear();
  reductions_ = 0;
  barrier_.reset();
  used_board_.reset();
  used_turn_ = 0;
  order_in_group_.clear();
  order_in_replicas_.clear();
  // A new process does not know it, and would gather in another order.
  order_.clear();
  begun_.clear();
  ended_.clear();
  depth_ = 0;
  found_write_ = found_stray_ = keeps_gradients_ = false;
  phase_ = Phase::quiet;
  for (const auto& unit : units()) {
    unit->held = unit->in_backward = unit->entered = false;
    unit->running = 0;
    for (const auto& flat : unit->flats()) flat->begin_again();
  }
}

std::vector<std::shared_ptr<ShardedUnit>> ShardingRoot::units() const {
  std::vector<std::shared_ptr<ShardedUnit>> alive;
  for (const auto& unit : units_) {
    if (auto locked = unit.lock()) alive.push_back(std::move(locked));
  }
  return alive;
}

std::shared_ptr<UnitCall> ShardingRoot::begin_forward(ShardedUnit& unit) {
  if (phase_ == Phase::micro_batches) {
    unit.held = false;
    gather(unit);
    ++depth_;
    return nullptr;
  }
  if (depth_ == 0 && phase_ != Phase::backward) {
    begin_reading();
    phase_ = Phase::forward;
    ++forwards_;
    with_grad_ = at::GradMode::is_enabled();
    if (with_grad_) TrainingCounters::instance().count_step();
    begun_.clear();
    ended_.clear();
  }
  unit.held = false;
  gather(unit);
  ++unit.running;
  if (phase_ != Phase::backward) {
    const size_t place = begun_.size();
    begun_.push_back(&unit);
    if (place + 1 < order_.size() && order_[place] == &unit) {
      prefetch(*order_[place + 1]);
    }
  }
  ++depth_;
  return at::GradMode::is_enabled() ? unit.make_call(forwards_) : nullptr;
}

void ShardingRoot::check_forward(bool has_graph) {
  if (depth_ != 1 || phase_ != Phase::forward) return;
  try {
    require_full_unwritten();
  } catch (...) {
    // If the others wrote nothing, they go on.
    if (has_graph) {
      give_up();
    } else {
      end_reading();
    }
    throw;
  }
}

void ShardingRoot::end_forward(ShardedUnit& unit, UnitCall* call,
                               bool has_graph) {
  --depth_;
  if (phase_ == Phase::micro_batches) return;
  --unit.running;
  if (phase_ == Phase::backward) return;  // a part was computed again
  if (call != nullptr) {
    call->position = ended_.size();
    ended_.push_back(unit.weak_from_this());
  }
  reshard_for_backward(unit);
  if (depth_ > 0) return;
  order_ = begun_;
  phase_ = Phase::expects_backward;
  if (!has_graph) end_reading();
}

void ShardingRoot::forward_threw(ShardedUnit& unit) noexcept {
  if (phase_ != Phase::micro_batches) --unit.running;
  if (--depth_ == 0 && phase_ == Phase::forward) {
    phase_ = Phase::expects_backward;
  }
}

// Collective.
void ShardingRoot::begin_reading() {
  const auto alive = units();
  // The last unit contains the others.
  if (at::GradMode::is_enabled()) alive.back()->require_same_parameters();
  const OutsideInference training;
  if (alive.size() != units_.size()) {
    std::erase_if(units_, [](const auto& unit) { return unit.expired(); });
    order_.clear();
  }
  for (const auto& unit : alive) {
    for (const auto& flat : unit->flats()) {
      flat->require_own_memory();
      flat->follow_requires_grad();
      flat->open_gradients();
    }
  }
  require_unclipped(alive);
  if (phase_ != Phase::quiet) {
    require_unwritten(
        "after a forward that had no backward yet, while other ranks may still "
        "have been computing; run forward under torch::NoGradGuard if there "
        "will be no backward");
  }
  require_full_unwritten();
  const bool writes_count =
      std::exchange(found_write_, false) || phase_ == Phase::quiet;
  for (const auto& unit : alive) {
    if (!unit->held || writes_count) release(*unit);
    for (const auto& flat : unit->flats()) {
      if (writes_count) flat->refresh();
      flat->note_versions();
    }
  }
  prepare(alive);
  barrier();
  // Units that stay unsharded have the new values.
  for (const auto& unit : alive) {
    if (unit->held && writes_count) gather(*unit);
  }
}

void ShardingRoot::require_unclipped(
    const std::vector<std::shared_ptr<ShardedUnit>>& units) {
  const FlatParameters::Parameter* clipped = nullptr;
  for (const auto& unit : units) {
    for (const auto& flat : unit->flats()) {
      if (const auto* one = flat->take_clipped()) clipped = one;
    }
  }
  if (clipped == nullptr) return;
  throw std::logic_error(c10::str(
      "FullyShard: the gradient of the shard of parameter ", clipped->name,
      " was read through data() and then written through data(). "
      "torch::nn::utils::clip_grad_norm_ does that, which clips by the norm of "
      "this rank's part of the gradients, so that each rank takes another "
      "step; call lockstep::clip_grad_norm_ instead. Code that reads for "
      "another purpose, such as a norm for a log, must read p.grad() without "
      "data()"));
}

// Collective.
void ShardingRoot::end_reading(bool compares) {
  const OutsideInference training;
  if (compares) compare_orders(/*reduced=*/false);
  for (const auto& unit : units()) {
    if (!unit->held) release(*unit);
    if (keeps_gradients_) continue;
    for (const auto& flat : unit->flats()) flat->bar_gradients();
  }
  barrier();
  phase_ = Phase::quiet;
}

void ShardingRoot::prepare(
    const std::vector<std::shared_ptr<ShardedUnit>>& units) {
  std::vector<FlatParameters*> trained;
  bool common = false;
  for (const auto& unit : units) {
    for (const auto& flat : unit->flats()) {
      common |= flat->in_common();
      if (flat->trains()) trained.push_back(flat.get());
    }
  }
  if (!std::ranges::all_of(trained, [&](FlatParameters* flat) {
        return std::ranges::find(prepared_, flat) != prepared_.end();
      })) {
    // Memory and numbers of the reduction follow from what is trained.
    require_same_trained(units);
    reduction_.reset();
    reduction_ = ShardReduction::make(trained, group_, replicate_group_, pool_,
                                      /*gathers=*/!in_common());
    used_board_.reset();
    if (in_common() && group_->size() > 1 && reduction_->compares_order()) {
      const auto words = static_cast<int64_t>(used_bits().size());
      run_step(Call("zeros_in_common", group_, group_->timeout()), [&] {
        used_board_ = host_sharing(group_)
                          ->zeros_in_common(2 * group_->size() * words,
                                            at::kLong, group_->timeout())
                          .view({-1, words});
      });
    }
    prepared_ = std::move(trained);
  }
  if (!in_common()) {
    for (const auto& unit : units) make_neighbours(unit->ranks_after_forward());
  }
  if (common && group_->size() > 1 && !barrier_) {
    auto* sharing = host_sharing(group_);
    run_step(Call("split_barrier", group_, group_->timeout()),
             [&] { barrier_ = sharing->split_barrier(group_->timeout()); });
  }
}

// Collective.
void ShardingRoot::require_same_trained(
    const std::vector<std::shared_ptr<ShardedUnit>>& units) {
  if (group_->size() == 1) return;
  UnitOrder order;
  auto bits = used_bits();  // all messages have one size
  for (const auto& unit : units) {
    size_t part = 0;
    for (const auto& flat : unit->flats()) {
      if (flat->trains()) {
        order.note(UnitOrder::Act::reduce, number_of(*unit), part,
                   flat->trained());
      }
      ++part;
    }
  }
  const auto found = order.difference(
      group_, [this](size_t number) { return name_of(number); }, bits);
  if (!found) return;
  throw c10::DistBackendError("FullyShard: " + *found);
}

void ShardingRoot::make_neighbours(int ranks) {
  const int size = group_->size();
  if (ranks == 1 || size == 1 || ranks == size || neighbours_.contains(ranks)) {
    return;
  }
  {
    auto& living = living_roots();
    const std::lock_guard lock(living.mutex);
    for (const auto* root : living.all) {
      if (root->group_ == group_) take_neighbours(*root);
    }
  }
  if (neighbours_.contains(ranks)) return;
  std::vector<std::vector<int>> sets(size / ranks);
  for (int rank = 0; rank < size; ++rank) sets[rank / ranks].push_back(rank);
  auto own = split_group(sets, {.parent = group_});
  neighbours_.emplace(ranks, std::move(own));
}

void ShardingRoot::barrier() {
  if (!barrier_) return;
  Span span("fsdp", "barrier");
  const auto begun = Deadline::after(group_->timeout());
  barrier_->arrive();
  try {
    barrier_->wait(group_->timeout());
  } catch (const c10::DistError& error) {
    Call("barrier of FullyShard", group_, group_->timeout()).fail(begun, error);
  }
}

size_t ShardingRoot::number_of(const ShardedUnit& unit) const {
  const auto found = std::ranges::find_if(
      units_, [&](const auto& one) { return one.lock().get() == &unit; });
  return static_cast<size_t>(found - units_.begin());
}

void ShardingRoot::reduce(ShardedUnit& unit, FlatParameters& flat) {
  const Span span("fsdp", "reduce");
  const size_t number = number_of(unit);
  const auto& flats = unit.flats();
  const auto part = static_cast<size_t>(
      std::ranges::find_if(
          flats, [&](const auto& one) { return one.get() == &flat; }) -
      flats.begin());
  if (!reduction_->compares_order()) {
    order_in_group_.note(UnitOrder::Act::reduce, number, part, flat.trained());
  }
  if (replicate_group_) {
    order_in_replicas_.note(UnitOrder::Act::reduce, number, part,
                            flat.trained());
  }
  reduction_->start(flat, ++reductions_);
}

bool ShardingRoot::in_common() const {
  const auto alive = units();
  return std::ranges::all_of(alive, [](const auto& unit) {
    return std::ranges::all_of(
        unit->flats(), [](const auto& flat) { return flat->in_common(); });
  });
}

std::string ShardingRoot::name_of(size_t number) const {
  const auto unit = number < units_.size() ? units_[number].lock() : nullptr;
  return unit ? unit->name() : "a unit that is gone";
}

// Collective.
void ShardingRoot::compare_orders(bool reduced) {
  const auto name_of = [this](size_t number) { return this->name_of(number); };
  std::optional<std::string> found;
  used_ = used_bits();
  if (group_->size() > 1 &&
      !(in_common() && (!reduction_ || reduction_->compares_order()))) {
    found = order_in_group_.difference(group_, name_of, used_);
  }
  if (reduced && replicate_group_ && replicate_group_->size() > 1) {
    if (found) order_in_replicas_.note(UnitOrder::Act::gave_up, 0);
    const auto other =
        order_in_replicas_.difference(replicate_group_, name_of, used_);
    if (!found) found = other;
  }
  if (!found) return;
  order_.clear();  // it may be another on each rank
  throw c10::DistBackendError("FullyShard: " + *found);
}

void ShardingRoot::gather(ShardedUnit& unit) {
  const Span span("fsdp", "gather");
  const OutsideInference training;
  prefetch(unit);
  for (const auto& flat : unit.flats()) flat->gather(pool_);
}

void ShardingRoot::prefetch(ShardedUnit& unit) {
  const OutsideInference training;
  for (const auto& flat : unit.flats()) {
    if (flat->start_gather(pool_)) {
      order_in_group_.note(UnitOrder::Act::gather, number_of(unit));
    }
  }
}

void ShardingRoot::release(ShardedUnit& unit) {
  for (const auto& flat : unit.flats()) flat->release(pool_);
}

void ShardingRoot::reshard_for_backward(ShardedUnit& unit) {
  const int ranks = unit.ranks_after_forward();
  if (ranks == 1) return;
  // There is none for all ranks, nor for a number that was set while this
  // forward ran.
  const auto neighbours = neighbours_.find(ranks);
  if (!with_grad_ || neighbours == neighbours_.end()) return release(unit);
  for (const auto& flat : unit.flats()) {
    flat->keep_part(neighbours->second, pool_);
  }
}

void ShardingRoot::before_backward(UnitCall& call) {
  if (phase_ == Phase::forward) return gather(*call.unit);
  if (phase_ != Phase::backward) begin_backward();
  auto& unit = *call.unit;
  unit.in_backward = unit.entered = true;
  gather(unit);
  if (call.forward == forwards_ && call.position > 0 &&
      call.position < ended_.size()) {
    if (const auto next = ended_[call.position - 1].lock()) prefetch(*next);
  }
  if (reduction_) reduction_->advance();
}

void ShardingRoot::after_backward(UnitCall& call) {
  auto& unit = *call.unit;
  if (phase_ == Phase::forward && !unit.held && unit.running == 0) {
    reshard_for_backward(unit);
  }
  if (phase_ != Phase::backward) return;
  call.passed = true;
  // If the forward called the unit several times, its gradients are complete
  // when backward has left all of these calls.
  const bool open =
      std::ranges::any_of(unit.live_calls(), [&](const auto& other) {
        return !other->passed && other->forward == call.forward;
      });
  if (!open) leave(unit);
  if (unit.held) return;
  if (open) {
    reshard_for_backward(unit);
  } else {
    release(unit);
  }
}

// The pass may be that of a loss that the module kept in a member: autograd may
// come to parameters before it comes to the result of a unit.
void ShardingRoot::gradient_came() {
  if (phase_ == Phase::backward || phase_ == Phase::micro_batches ||
      std::exchange(found_stray_, true)) {
    return;
  }
  const auto drop = [root = shared_from_this(), before = backwards_] {
    root->found_stray_ = false;
    return root->backwards_ == before ? root->drop_stray() : std::string();
  };
  at_end_of_backward(
      [drop] {
        const auto parameter = drop();
        if (parameter.empty()) return;
        throw std::logic_error(c10::str(
            "FullyShard: parameter ", parameter,
            " got a gradient in a backward that went through no result of a "
            "unit's forward, so it was not reduced and is dropped; call "
            "model->forward(x) or model(x), not model.module()->forward(x), "
            "and compute the loss from what forward returns"));
      },
      [drop] { drop(); });
}

std::string ShardingRoot::drop_stray() {
  std::string parameter;
  for (const auto& unit : units()) {
    const auto* name = unit->with_gradient();
    if (name != nullptr && parameter.empty()) {
      parameter = *name + " of " + unit->name();
    }
    for (const auto& flat : unit->flats()) flat->drop_gradients();
  }
  keeps_gradients_ = false;
  return parameter;
}

void ShardingRoot::begin_backward() {
  ++backwards_;
  require_unwritten(
      "between a forward and its backward; step after backward, and compute "
      "every loss anew after a step");
  std::vector<at::Tensor> trained;
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) {
      flat->open_gradients();
      for (const auto& parameter : flat->parameters()) {
        if (parameter.compute.requires_grad()) {
          trained.push_back(parameter.compute);
        }
      }
    }
    for (const auto& call : unit->live_calls()) call->passed = false;
    unit->entered = false;
  }
  accumulates_ = accumulates_into(trained);
  syncs_ = requires_gradient_sync;
  at_end_of_backward([root = shared_from_this()] { root->end_backward(); },
                     [root = shared_from_this()] { root->give_up(); });
  phase_ = Phase::backward;
  if (accumulates_ && syncs_ && reduction_) reduction_->begin_backward();
}

// Reduces the unit's gradients, or keeps them for the next backward that
// reduces.
void ShardingRoot::leave(ShardedUnit& unit) {
  unit.in_backward = false;
  if (!accumulates_) return;
  for (const auto& flat : unit.flats()) {
    if (!flat->trains()) continue;
    if (syncs_) {
      reduce(unit, *flat);
    } else {
      flat->keep_gradients();
    }
  }
}

void ShardingRoot::end_backward() {
  require_full_unwritten();
  if (accumulates_ && !keeps_gradients_) require_entered();
  auto alive = units();
  std::ranges::reverse(alive);
  for (const auto& unit : alive) {
    if (unit->in_backward ||
        (accumulates_ && unit->with_gradient() != nullptr)) {
      leave(*unit);
    }
  }
  const bool reduces = accumulates_ && syncs_;
  if (accumulates_) {
    compare_orders(syncs_);
    if (reduction_) reduction_->finish();
    keeps_gradients_ = !syncs_;
    if (reduces) write_used();
  }
  end_reading(/*compares=*/!accumulates_);
  if (reduces) settle_gradients();
}

// Such a unit has its parameters only if ranks share them.
void ShardingRoot::require_entered() {
  for (const auto& unit : units()) {
    const auto* stray = unit->with_gradient();
    if (stray == nullptr || unit->entered || unit->held ||
        unit->ranks_after_forward() == 1) {
      continue;
    }
    throw std::logic_error(c10::str(
        "FullyShard: parameter ", *stray, " of ", unit->name(),
        " got a gradient in a backward that came to the unit past the results "
        "of the unit's forward; return from there what a loss needs, such as "
        "an auxiliary loss, or call backward() once for the sum of all "
        "losses"));
  }
}

std::vector<int64_t> ShardingRoot::used_bits() const {
  std::vector<int64_t> bits;
  size_t number = 0;
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) {
      for (const auto& parameter : flat->parameters()) {
        const size_t bit = number++ % kBitsOfWord;
        if (bit == 0) bits.push_back(0);
        if (parameter.used) bits.back() |= int64_t{1} << bit;
      }
    }
  }
  return bits;
}

void ShardingRoot::write_used() {
  if (!used_board_.defined()) return;
  used_turn_ = 1 - used_turn_;
  std::ranges::copy(used_, used_row(group_->rank()));
}

void ShardingRoot::read_used() {
  if (!used_board_.defined()) return;
  for (int rank = 0; rank < group_->size(); ++rank) {
    const auto* words = used_row(rank);
    for (size_t i = 0; i < used_.size(); ++i) used_[i] |= words[i];
  }
}

int64_t* ShardingRoot::used_row(int rank) const {
  const int64_t row = used_turn_ * group_->size() + rank;
  return used_board_.mutable_data_ptr<int64_t>() + row * used_board_.size(1);
}

void ShardingRoot::settle_gradients() {
  read_used();
  size_t number = 0;
  const auto is_used = [&] {
    const size_t at = number++;
    return (used_[at / kBitsOfWord] >> at % kBitsOfWord & 1) != 0;
  };
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) flat->settle_gradients(is_used);
  }
}

void ShardingRoot::begin_micro_batches() {
  if (depth_ > 0 || phase_ == Phase::forward || phase_ == Phase::backward ||
      phase_ == Phase::micro_batches) {
    throw std::logic_error(
        "FullyShard: a pipeline began a step while another forward or backward "
        "of the same unit was running");
  }
  begin_reading();
  phase_ = Phase::micro_batches;
  // The outermost unit is the last one, and its forward begins first.
  for (const auto& unit : units()) {
    if (is_last(*unit)) prefetch(*unit);
  }
  for (const auto& unit : units()) prefetch(*unit);
}

void ShardingRoot::keep_gradients() {
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) {
      if (flat->trains()) flat->keep_gradients();
    }
  }
}

void ShardingRoot::end_micro_batches(bool reduces) {
  require_unwritten("while a pipeline ran a step");
  require_full_unwritten();
  if (reduces) {
    keeps_gradients_ = !requires_gradient_sync;
    auto alive = units();
    std::ranges::reverse(alive);
    for (const auto& unit : alive) {
      for (const auto& flat : unit->flats()) {
        // Also those that this rank has not used: another may have.
        if (flat->trains() && !keeps_gradients_) reduce(*unit, *flat);
      }
    }
    compare_orders(!keeps_gradients_);
    if (reduction_) reduction_->finish();
    if (!keeps_gradients_) write_used();
  }
  end_reading(/*compares=*/!reduces);
  if (reduces && !keeps_gradients_) settle_gradients();
}

void ShardingRoot::give_up() noexcept {
  // Ranks may have begun different reductions, so all make new ones when the
  // next forward begins.
  if (reduction_) reduction_->abandon();
  prepared_.clear();
  reductions_ = 0;
  order_in_group_.clear();
  order_in_replicas_.clear();
  for (const auto& unit : units()) {
    unit->in_backward = false;
    for (const auto& flat : unit->flats()) flat->drop_gradients();
  }
  keeps_gradients_ = false;
  phase_ = Phase::expects_backward;
}

void ShardingRoot::require_unwritten(const char* when) {
  const FlatParameters::Parameter* written = nullptr;
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) {
      if (written == nullptr) written = flat->written();
    }
  }
  if (written == nullptr) return;
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) flat->note_versions();
  }
  found_write_ = true;
  throw std::logic_error(c10::str(
      "FullyShard: parameter ", written->name, " was changed ", when,
      ". The next forward of all ranks has the values as they are now"));
}

void ShardingRoot::require_full_unwritten() {
  const FlatParameters::Parameter* written = nullptr;
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) {
      if (written == nullptr) written = flat->full_written();
    }
  }
  if (written == nullptr) return;
  for (const auto& unit : units()) {
    for (const auto& flat : unit->flats()) flat->note_versions();
  }
  found_write_ = true;
  throw std::invalid_argument(c10::str(
      "FullyShard: the full parameter ", written->name,
      " was written, in forward or elsewhere. Full parameters are for reading: "
      "ranks that share them overwrite what others write, and other ranks lose "
      "what they write. Give a module its first values before it is sharded, "
      "write the shards, which are parameters(), after backward, and leave out "
      "what writes weights in forward, such as max_norm of Embedding"));
}

void ShardingRoot::start_unshard(ShardedUnit& unit) {
  if (depth_ == 0 && phase_ != Phase::backward) {
    begin_reading();
    phase_ = Phase::expects_backward;
  }
  unit.held = true;
  prefetch(unit);
}

void ShardingRoot::wait_unshard(ShardedUnit& unit) { gather(unit); }

void ShardingRoot::reshard(ShardedUnit& unit) {
  unit.held = false;
  release(unit);
  if (phase_ == Phase::expects_backward) end_reading();
  require_full_unwritten();
}

}  // namespace lockstep::internal
