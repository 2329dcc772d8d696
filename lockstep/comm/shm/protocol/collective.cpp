#include "lockstep/comm/shm/protocol/collective.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "lockstep/base/number_list.h"

namespace lockstep::internal::shm {
namespace {

constexpr uint8_t kNoReduceOp = 255;
// Bits of Announcement::flags.
constexpr uint8_t kRegistered = 1;
constexpr uint8_t kReached = 2;  // RegisteredMemory::Place::reached
constexpr uint8_t kPastCaches = 4;

// Copies `text`; cuts it if it is too long.
template <size_t n>
void write_text(std::array<char, n>& to, const char* text) {
  const size_t length = text ? ::strnlen(text, n - 1) : 0;
  if (length != 0) std::memcpy(to.data(), text, length);
  to[length] = 0;
}

}  // namespace

const char* name_of(CollectiveKind operation) {
  switch (operation) {
    case CollectiveKind::barrier:
      return "barrier";
    case CollectiveKind::all_reduce:
      return "all_reduce";
    case CollectiveKind::reduce:
      return "reduce";
    case CollectiveKind::reduce_scatter:
      return "reduce_scatter";
    case CollectiveKind::broadcast:
      return "broadcast";
    case CollectiveKind::all_gather:
      return "all_gather";
    case CollectiveKind::gather:
      return "gather";
    case CollectiveKind::scatter:
      return "scatter";
    case CollectiveKind::all_to_all:
      return "all_to_all";
    case CollectiveKind::reduce_buckets:
      return "reduce_buckets";
    case CollectiveKind::split_barrier:
      return "split_barrier";
    case CollectiveKind::memory_in_common:
      return "memory_in_common";
    case CollectiveKind::none:
      break;
  }
  return "nothing";
}

Collective::Collective(Core& core, const What& what, milliseconds timeout)
    : core_(core),
      what_(what),
      number_(core.sequence + 1),
      user_(current_call()),
      own_(core.segment.announcement(core.rank, number_)),
      patience_(timeout),
      exceptions_(std::uncaught_exceptions()) {
  core.waiting.throw_if_broken();
  core.standstill.thread_comes();
  core.registered.look_if_told();
  own_.operation = static_cast<uint8_t>(what.operation);
  own_.dtype = static_cast<uint8_t>(what.dtype);
  own_.reduce_op =
      what.reduce_op ? static_cast<uint8_t>(*what.reduce_op) : kNoReduceOp;
  own_.root = static_cast<int8_t>(what.root);
  own_.agreed = what.agreed;
  own_.element = user_ ? user_->next_dtype().code : 0;
  own_.parts_left = user_ ? user_->parts_left() : 1;
  own_.entry = user_ ? static_cast<uint32_t>(user_->entry) : 0;
  write_words();
}

void Collective::write_words() {
  const bool named = user_ && user_->operation;
  const Core::WrittenWords wanted{
      .ahead = named ? user_->number - number_ : 0,
      .units = user_ ? user_->next_dtype().units : uint8_t{1},
      .function = named ? user_->function : nullptr,
      .operation = named ? user_->operation : name_of(what_.operation),
      .dtype = user_ ? user_->next_dtype().name : nullptr};
  auto& written = core_.written_words[number_ % kSlots];
  if (written == wanted) return;
  written = wanted;
  auto& words = core_.segment.words(core_.rank, number_);
  words.ahead = wanted.ahead;
  words.units = wanted.units;
  write_text(words.function, wanted.function);
  write_text(words.operation, wanted.operation);
  write_text(words.dtype, wanted.dtype);
}

std::byte* Collective::room(size_t bytes) {
  return bytes <= Announcement::kInlineBytes
             ? own_.data.data()
             : core_.segment.one_shot(core_.rank, number_);
}

Collective::~Collective() {
  if (!all_have_come_ || std::uncaught_exceptions() > exceptions_) return;
  core_.staging_stores.took(staged_calls(), Clock::now() - *all_have_come_);
}

StagedCalls Collective::staged_calls() const {
  return {.kind = what_.operation, .dtype = what_.dtype, .bytes = staged_};
}

void Collective::announce(uint64_t bytes, size_t staged) {
  own_.flags = 0;
  if (core_.rank == 0 && staged != 0) {
    staged_ = staged;
    if (core_.staging_stores.next(staged_calls()) ==
        kernels::Stores::streaming) {
      own_.flags = kPastCaches;
    }
  }
  own_.bytes = bytes;
  finish_announcement();
}

void Collective::announce(RegisteredMemory::Place place) {
  own_.flags = kRegistered | (place.reached ? kReached : 0);
  own_.bytes = place.region;
  std::memcpy(own_.data.data(), &place.offset, sizeof(place.offset));
  finish_announcement();
}

void Collective::finish_announcement() {
  core_.sequence = number_;
  if (user_) ++user_->steps;
  core_.own().core.store(::sched_getcpu(), std::memory_order_relaxed);
  // Releases the words. Pairs with the acquire in last_call_of().
  core_.own().last_sequence.store(number_, std::memory_order_release);
  // Releases all that was written for this sequence number, and says that this
  // rank is done with the call before. Pairs with the acquire in has_come().
  own_.sequence.store(static_cast<uint32_t>(number_),
                      std::memory_order_seq_cst);
  core_.waiting.wake_sleepers();
}

bool Collective::has_come(int peer, std::memory_order order) const {
  return announcement(peer).sequence.load(order) ==
         static_cast<uint32_t>(number_);
}

bool Collective::same(const Announcement& other) const {
  return other.operation == own_.operation && other.dtype == own_.dtype &&
         other.reduce_op == own_.reduce_op && other.root == own_.root &&
         other.agreed == own_.agreed && other.element == own_.element &&
         other.parts_left == own_.parts_left && other.entry == own_.entry;
}

void Collective::wait_for_all() {
  for (int peer = 0; peer < core_.size; ++peer) {
    if (peer == core_.rank) continue;
    if (!core_.waiting.spin(
            [&](std::memory_order order) { return has_come(peer, order); })) {
      wait_slowly();
      break;
    }
  }
  for (int peer = 0; peer < core_.size; ++peer) {
    if (!same(announcement(peer))) disagree();
  }
  if (staged_ != 0) all_have_come_ = Clock::now();
}

void Collective::wait_slowly() {
  auto missing = [&](std::memory_order order) {
    uint64_t ranks = 0;
    for (int peer = 0; peer < core_.size; ++peer) {
      if (peer != core_.rank && !has_come(peer, order)) {
        ranks |= uint64_t{1} << peer;
      }
    }
    return ranks;
  };
  core_.sleep(patience_, missing, [&](uint64_t ranks) {
    return core_.complain(ranks,
                          [&](int) { return "has not come to " + name(); });
  });
}

void Collective::await_slowly(int peer, const std::atomic<uint64_t>& counter,
                              uint64_t value) {
  core_.sleep(
      patience_,
      [&](std::memory_order order) {
        return counter.load(order) >= value ? 0 : uint64_t{1} << peer;
      },
      [&](uint64_t) {
        return core_.waiting.name(peer) + " has not done its part of " + name();
      });
}

const std::byte* Collective::data(int of) const {
  const auto& given = announcement(of);
  return given.bytes <= Announcement::kInlineBytes
             ? given.data.data()
             : core_.segment.one_shot(of, number_);
}

kernels::Stores Collective::stores() const {
  return announcement(0).flags & kPastCaches ? kernels::Stores::streaming
                                             : kernels::Stores::cached;
}

std::optional<RegisteredMemory::Place> Collective::place(int of) const {
  const auto& given = announcement(of);
  if (!(given.flags & kRegistered)) return std::nullopt;
  RegisteredMemory::Place place{.region = static_cast<uint32_t>(given.bytes),
                                .reached = (given.flags & kReached) != 0,
                                .offset = 0};
  std::memcpy(&place.offset, given.data.data(), sizeof(place.offset));
  return place;
}

void Collective::compare_sizes() const {
  const int n = core_.size;
  for (int from = 0; from < n; ++from) {
    for (int to = 0; to < n; ++to) {
      const uint64_t sent = sizes(from)[to];
      const uint64_t expected = sizes(to)[n + from];
      if (sent == expected) continue;
      throw CallMismatch(
          "the ranks disagree about " + name() + ": " +
          core_.waiting.name(from) + " sends " + std::to_string(sent) +
          " bytes to " +
          (from == to ? "itself, but" : core_.waiting.name(to) + ", which") +
          " expects " + std::to_string(expected) + " from it" +
          (from == to ? "self" : ""));
    }
  }
}

std::string Collective::name() const {
  return core_.call_name(core_.rank, number_);
}

std::string Collective::describe(int of) const {
  const auto& given = announcement(of);
  const auto& words = core_.segment.words(of, number_);
  const auto operation = static_cast<CollectiveKind>(given.operation);
  std::string text = core_.call_name(of, number_);
  if (operation == CollectiveKind::barrier ||
      operation == CollectiveKind::reduce_buckets ||
      operation == CollectiveKind::split_barrier) {
    return text;
  }
  text += " (";
  if (given.reduce_op < kernels::kReduceOpCount) {
    text += kernels::name_of(static_cast<ReduceOp>(given.reduce_op));
    text += ", ";
  }
  const auto dtype = text_of(words.dtype);
  if (!dtype.empty()) {
    text += dtype;
  } else if (given.dtype < kernels::kDTypeCount) {
    text += kernels::name_of(static_cast<DType>(given.dtype));
  }
  if (given.agreed != kSizesDiffer) {
    const uint64_t units = std::max<uint64_t>(words.units, 1);
    text += ", " + std::to_string(given.agreed / units) + " elements";
  }
  if (given.root >= 0) text += ", root " + core_.waiting.name(given.root);
  if (given.parts_left != 1) {
    text += ", " + std::to_string(given.parts_left) + " parts left";
  }
  return text + ")";
}

void Collective::disagree() const {
  std::vector<RanksOfText> all;
  for (int of = 0; of < core_.size; ++of) {
    add_text(all, core_.waiting.number(of), describe(of));
  }
  throw CallMismatch("the ranks disagree about this call (" + name_texts(all) +
                     "); all must make the same calls in one order");
}

}  // namespace lockstep::internal::shm
