#include "lockstep/comm/shm/protocol/standstill.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace lockstep::internal::shm {
namespace {

constexpr auto kOrder = std::memory_order_seq_cst;

thread_local bool on_queue = false;
thread_local BlockedCall* blocked = nullptr;

uint64_t bit(int rank) { return uint64_t{1} << rank; }

// Each word is stored with release and read with acquire: a reader that sees
// words of a later wait also sees that the number of the wait has changed.
void write_words(BlockedState& state, const std::string& text) {
  std::array<uint64_t, BlockedState::kWords> words{};
  std::memcpy(words.data(), text.data(),
              std::min(text.size(), sizeof(words) - 1));
  for (size_t i = 0; i < words.size(); ++i) {
    state.words[i].store(words[i], std::memory_order_release);
  }
}

std::string read_words(const BlockedState& state) {
  std::array<uint64_t, BlockedState::kWords> words{};
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = state.words[i].load(std::memory_order_acquire);
  }
  const auto* text = reinterpret_cast<const char*>(words.data());
  return {text, ::strnlen(text, sizeof(words))};
}

}  // namespace

Standstill::Standstill(const Segment& segment, Waiting& waiting, int rank,
                       int size)
    : segment_(segment),
      waiting_(waiting),
      rank_(rank),
      size_(size),
      seen_(size) {}

const void* Standstill::this_thread() {
  static thread_local char here;
  return &here;
}

void Standstill::another_comes(const void* first, const void* here) {
  if (on_queue) return;
  if (first == nullptr && thread_.compare_exchange_strong(first, here)) return;
  if (several_.exchange(true)) return;
  const std::lock_guard lock(mutex_);
  fall_silent();
}

void Standstill::caller_waits() {
  thread_comes();
  const std::lock_guard lock(mutex_);
  caller_waits_ = true;
}

void Standstill::caller_goes_on() {
  const std::lock_guard lock(mutex_);
  caller_waits_ = false;
  if (told_on_queue_) fall_silent();
}

Standstill::OnQueue::OnQueue(bool beside) {
  on_queue = true;
  if (beside) helper_.emplace();
}
Standstill::OnQueue::~OnQueue() { on_queue = false; }

bool Standstill::may_tell() const {
  if (several_) return false;
  return on_queue ? caller_waits_ : queued_ == 0;
}

void Standstill::tell(const BlockedCall& call, uint64_t ranks) {
  auto& own = state(rank_);
  if (told_ != &call) {
    fall_silent();
    told_ = &call;
    told_on_queue_ = on_queue;
    std::ranges::fill(seen_, Seen());
    write_words(own, call.words_());
    own.waits_for.store(ranks, kOrder);
    own.wait.fetch_add(1, kOrder);  // odd
  }
  own.waits_for.store(ranks, kOrder);
  own.looks.fetch_add(1, kOrder);
}

void Standstill::fall_silent() {
  if (told_ == nullptr) return;
  told_ = nullptr;
  told_on_queue_ = false;
  state(rank_).wait.fetch_add(1, kOrder);  // even
}

bool Standstill::stands_still(int peer) {
  const auto& other = state(peer);
  auto& seen = seen_[peer];
  const auto wait = other.wait.load(kOrder);
  if (wait % 2 == 0 || (other.waits_for.load(kOrder) & bit(rank_)) == 0) {
    seen = {};
    return false;
  }
  const auto now = std::chrono::steady_clock::now();
  const auto looks = other.looks.load(kOrder);
  if (seen.wait != wait) {
    seen = {.wait = wait, .looks = looks, .since = now};
    return false;
  }
  return looks - seen.looks >= kLooks && now - seen.since >= kPatience;
}

// Returns the words of each rank that tells a wait at this moment, by rank; the
// others are empty.
std::vector<std::string> Standstill::words_of_all() const {
  std::vector<std::string> all;
  for (int rank = 0; rank < size_; ++rank) all.push_back(words_of(rank));
  return all;
}

std::string Standstill::words_of(int rank) const {
  const auto& one = state(rank);
  const auto wait = one.wait.load(kOrder);
  if (wait % 2 == 0) return {};
  auto words = read_words(one);
  return one.wait.load(kOrder) == wait ? words : std::string();
}

void Standstill::fail(const std::vector<std::string>& words_of_all) {
  std::map<std::string, std::string> ranks_of;
  for (int rank = 0; rank < size_; ++rank) {
    if (words_of_all[rank].empty()) continue;
    auto& names = ranks_of[words_of_all[rank]];
    names += (names.empty() ? "" : " and ") + waiting_.name(rank);
  }
  std::string all;
  for (const auto& [words, names] : ranks_of) {
    all += (all.empty() ? "" : "; ") + names + " in " + words;
  }
  if (ranks_of.size() == 1) all += ", each in a different one";
  waiting_.fail("the ranks wait for each other (" + all +
                    "), so none of them can go on; all must make the same "
                    "calls in one order",
                RankState::kTold);
}

BlockedCall::BlockedCall(Standstill& standstill, Ranks ranks, Words words)
    : standstill_(standstill),
      ranks_(std::move(ranks)),
      words_(std::move(words)),
      before_(std::exchange(blocked, this)) {
  standstill.thread_comes();
}

BlockedCall::~BlockedCall() {
  blocked = before_;
  const std::lock_guard lock(standstill_.mutex_);
  if (standstill_.told_ == this) standstill_.fall_silent();
}

BlockedCall* BlockedCall::of_this_thread() { return blocked; }

void BlockedCall::look() {
  const std::lock_guard lock(standstill_.mutex_);
  const auto ranks = ranks_(kOrder);
  if (ranks == 0 || !standstill_.may_tell()) {
    if (standstill_.told_ == this) standstill_.fall_silent();
    return;
  }
  standstill_.tell(*this, ranks);
  // Read the words first: a peer that finds the standstill at the same time and
  // fails before this rank tells nothing any more.
  const auto words = standstill_.words_of_all();
  for (int peer = 0; peer < standstill_.size_; ++peer) {
    if ((ranks & bit(peer)) == 0 || peer == standstill_.rank_) continue;
    if (standstill_.stands_still(peer)) standstill_.fail(words);
  }
}

}  // namespace lockstep::internal::shm
