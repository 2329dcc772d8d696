#include "benchmarks/plain_peers/protocol_reducer.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "lockstep/comm/shm/protocol/core.h"

namespace lockstep::internal::bench {
namespace {

using nlohmann::json;
using shm::DType;

// `lockstep bench` may be busy with other sides for any time.
constexpr std::chrono::milliseconds kUntilAsked = std::chrono::hours(24);
// LibTorch aligns what it allocates to this.
constexpr size_t kAlignment = 64;

}  // namespace

ProtocolReducer::ProtocolReducer(Board& board, int rank, int size,
                                 std::chrono::milliseconds timeout)
    : rank_(rank),
      size_(size),
      timeout_(timeout),
      group_(std::make_unique<shm::Group>(
          shm::meet(board.exchange(), {.rank = rank,
                                       .size = size,
                                       .timeout = timeout,
                                       .tuning = shm::choose_tuning(size)}))) {}

json ProtocolReducer::facts() const {
  const auto& tuning = group_->core().tuning;
  return {{"tuning",
           {{"one_shot_bytes", tuning.one_shot_bytes},
            {"chunk_bytes", tuning.chunk_bytes},
            {"streaming_bytes", tuning.streaming_bytes}}}};
}

std::string ProtocolReducer::refusal(size_t, DType dtype,
                                     shm::ReduceOp op) const {
  if (kernels::is_reducible(dtype, op)) return {};
  return std::string("the kernels have no ") + kernels::name_of(op) + " of " +
         kernels::name_of(dtype);
}

void* ProtocolReducer::allocate(size_t bytes) {
  return ::operator new(bytes, std::align_val_t(kAlignment));
}

void ProtocolReducer::release(void* data) {
  ::operator delete(data, std::align_val_t(kAlignment));
}

void ProtocolReducer::all_reduce(void* data, size_t count, DType dtype,
                                 shm::ReduceOp op) {
  group_->all_reduce(data, count, dtype, op, timeout_);
}

int64_t ProtocolReducer::greatest(int64_t number) {
  group_->all_reduce(&number, 1, DType::int64, shm::ReduceOp::max, timeout_);
  return number;
}

std::string ProtocolReducer::from_first(const std::string& text) {
  uint64_t bytes = text.size();
  group_->broadcast({&bytes, sizeof(bytes)}, 0, DType::int64, kUntilAsked);
  std::string all = text;
  all.resize(bytes);
  group_->broadcast({all.data(), bytes}, 0, DType::int8, timeout_);
  return all;
}

std::vector<std::string> ProtocolReducer::to_first(const std::string& text) {
  std::vector<uint64_t> lengths(size_);
  std::vector<shm::Bytes> places;
  for (auto& length : lengths) places.push_back({&length, sizeof(length)});
  const uint64_t own = text.size();
  group_->all_gather(places, {&own, sizeof(own)}, DType::int64, timeout_);
  std::vector<std::string> all(rank_ == 0 ? size_ : 0);
  places.clear();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    all[rank].resize(lengths[rank]);
    places.push_back({all[rank].data(), all[rank].size()});
  }
  group_->gather(places, {text.data(), text.size()}, 0, DType::int8, timeout_);
  return all;
}

}  // namespace lockstep::internal::bench
