#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>
#include <variant>

// The seam by which traces and metrics see what Lockstep does: every stretch of
// work that takes time is a span, with a begin and an end, and whoever
// subscribes is told of both. With no subscriber a span costs one relaxed load.
namespace lockstep {

// A name and an integer or a text, both alive during the call only.
struct SpanAttribute {
  std::string_view key;
  std::variant<int64_t, std::string_view> value;
};

struct SpanBegin {
  uint64_t id;  // unique in this process; the end bears the same
  // Who speaks: "comm" (collectives), "ddp" (the reducer), ...
  std::string_view category;
  std::string_view name;  // "all_reduce"
  std::chrono::steady_clock::time_point time;
  std::initializer_list<SpanAttribute> attributes;
};

struct SpanEnd {
  uint64_t id;
  std::chrono::steady_clock::time_point time;
  bool failed;  // what end() was told
};

// Called in the thread where a span begins or ends, which may be one of a
// backend's; from several at once. Must not throw, block, or begin spans. Of a
// span that was under way when it subscribed, an observer sees the end only.
class SpanObserver {
 public:
  virtual ~SpanObserver() = default;
  virtual void on_begin(const SpanBegin& begin) noexcept = 0;
  virtual void on_end(const SpanEnd& end) noexcept = 0;
};

// Observes from construction to destruction. Once the destructor has returned,
// the observer is not called any more.
class [[nodiscard]] SpanSubscription {
 public:
  explicit SpanSubscription(std::shared_ptr<SpanObserver> observer);
  SpanSubscription(const SpanSubscription&) = delete;
  SpanSubscription& operator=(const SpanSubscription&) = delete;
  ~SpanSubscription();

 private:
  std::shared_ptr<SpanObserver> observer_;
};

// One stretch, from construction to end() or destruction, whichever is first.
// Moves with the work it describes and may end in another thread; end() is for
// one thread at a time.
class Span {
 public:
  Span() : id_(0) {}  // none
  Span(std::string_view category, std::string_view name,
       std::initializer_list<SpanAttribute> attributes = {})
      : id_(observed() ? begin(category, name, attributes) : 0) {}
  Span(Span&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
  Span& operator=(Span&&) = delete;
  ~Span();

  void end(bool failed = false) noexcept;
  // False where nobody listened when it began, or it has ended.
  bool active() const { return id_ != 0; }

  static bool observed() {
    return observer_count_.load(std::memory_order_relaxed) > 0;
  }

 private:
  friend class SpanSubscription;
  static uint64_t begin(std::string_view category, std::string_view name,
                        std::initializer_list<SpanAttribute> attributes);

  static inline std::atomic<int> observer_count_{0};
  uint64_t id_;
};

}  // namespace lockstep
