#include "lockstep/parallel/comm_hooks/comm_bytes.h"

#include <atomic>
#include <string_view>

namespace lockstep {
namespace {

int64_t number(const internal::SpanBegin& begin, std::string_view key) {
  for (const auto& attribute : begin.attributes) {
    if (attribute.key != key) continue;
    const auto* value = std::get_if<int64_t>(&attribute.value);
    return value != nullptr ? *value : 0;
  }
  return 0;
}

// Returns the bytes that go into the call. A span reports the bytes of all
// tensors of its call; those that go in are a fixed part of them.
int64_t bytes_in(const internal::SpanBegin& begin) {
  const auto all = number(begin, "bytes");
  const auto world_size = number(begin, "world_size");
  const auto name = begin.name;
  if (name.starts_with("all_gather")) return all / (world_size + 1);
  if (name.starts_with("reduce_scatter")) {
    return all / (world_size + 1) * world_size;
  }
  if (name.starts_with("all_to_all")) return all / 2;
  if (name.ends_with("recv")) return 0;
  return all;
}

}  // namespace

class CommBytes::Observer final : public internal::SpanObserver {
 public:
  void on_begin(const internal::SpanBegin& begin) noexcept override {
    // A wait is a part of an operation that was counted when it began.
    if (begin.category != "comm" || begin.name == "wait") return;
    bytes.fetch_add(bytes_in(begin), std::memory_order_relaxed);
    operations.fetch_add(1, std::memory_order_relaxed);
  }
  void on_end(const internal::SpanEnd& /*end*/) noexcept override {}

  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> operations{0};
};

CommBytes::CommBytes()
    : observer_(std::make_shared<Observer>()), subscription_(observer_) {}
CommBytes::~CommBytes() = default;

int64_t CommBytes::bytes() const {
  return observer_->bytes.load(std::memory_order_relaxed);
}

int64_t CommBytes::operations() const {
  return observer_->operations.load(std::memory_order_relaxed);
}

void CommBytes::reset() {
  observer_->bytes.store(0, std::memory_order_relaxed);
  observer_->operations.store(0, std::memory_order_relaxed);
}

}  // namespace lockstep
