#include "lockstep/trace/span.h"

#include <algorithm>
#include <shared_mutex>
#include <vector>

#include "lockstep/base/no_destructor.h"

namespace lockstep::internal {
namespace {

struct Observers {
  // Locked as shared while observers are called, so that the end of a
  // subscription waits for the calls under way.
  std::shared_mutex mutex;
  std::vector<SpanObserver*> list;
  std::atomic<uint64_t> last_id{0};
};

Observers& observers() {
  // Never destroyed: spans of a backend's threads may end after main().
  static NoDestructor<Observers> instance;
  return *instance;
}

}  // namespace

SpanSubscription::SpanSubscription(std::shared_ptr<SpanObserver> observer)
    : observer_(std::move(observer)) {
  auto& all = observers();
  std::lock_guard lock(all.mutex);
  all.list.push_back(observer_.get());
  Span::observer_count_.fetch_add(1, std::memory_order_relaxed);
}

SpanSubscription::~SpanSubscription() {
  auto& all = observers();
  std::lock_guard lock(all.mutex);
  all.list.erase(std::find(all.list.begin(), all.list.end(), observer_.get()));
  Span::observer_count_.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t Span::begin(std::string_view category, std::string_view name,
                     std::initializer_list<SpanAttribute> attributes,
                     bool detached) {
  auto& all = observers();
  const SpanBegin event{
      .id = all.last_id.fetch_add(1, std::memory_order_relaxed) + 1,
      .category = category,
      .name = name,
      .time = std::chrono::steady_clock::now(),
      .attributes = attributes,
      .detached = detached};
  std::shared_lock lock(all.mutex);
  for (auto* observer : all.list) observer->on_begin(event);
  return event.id;
}

void Span::end(bool failed) noexcept {
  const uint64_t id = std::exchange(id_, 0);
  if (id == 0) return;
  auto& all = observers();
  const SpanEnd event{
      .id = id, .time = std::chrono::steady_clock::now(), .failed = failed};
  std::shared_lock lock(all.mutex);
  for (auto* observer : all.list) observer->on_end(event);
}

Span::~Span() { end(); }

}  // namespace lockstep::internal
