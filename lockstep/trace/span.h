#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>
#include <variant>

// Lets traces and metrics see what Lockstep does. Every piece of work that
// takes time is a span, with a begin and an end, and every subscriber is told
// of both. Without a subscriber a span costs one relaxed load.
namespace lockstep::internal {

// A name, and an integer or a text. The texts are valid only during the call.
struct SpanAttribute {
  std::string_view key;
  std::variant<int64_t, std::string_view> value;
};

struct SpanBegin {
  uint64_t id;  // unique in this process; the same in SpanEnd
  // The part of Lockstep: "comm" (collectives), "ddp" (the reducer), ...
  std::string_view category;
  std::string_view name;  // "all_reduce"
  std::chrono::steady_clock::time_point time;
  std::initializer_list<SpanAttribute> attributes;
  // Whether it may end in another thread, or after a span that contains its
  // begin: see Span::detached().
  bool detached = false;
};

struct SpanEnd {
  uint64_t id;
  std::chrono::steady_clock::time_point time;
  bool failed;  // the argument of Span::end()
};

// Its functions are called in the thread where a span begins or ends, which may
// be a thread of a backend, and in several threads at once. They must not
// throw, block, or begin spans. If a span was begun before an observer
// subscribed, the observer sees only its end.
class SpanObserver {
 public:
  virtual ~SpanObserver() = default;
  virtual void on_begin(const SpanBegin& begin) noexcept = 0;
  virtual void on_end(const SpanEnd& end) noexcept = 0;
};

// Calls the observer from construction to destruction. Once the destructor has
// returned, the observer is not called any more.
class [[nodiscard]] SpanSubscription {
 public:
  explicit SpanSubscription(std::shared_ptr<SpanObserver> observer);
  SpanSubscription(const SpanSubscription&) = delete;
  SpanSubscription& operator=(const SpanSubscription&) = delete;
  ~SpanSubscription();

 private:
  std::shared_ptr<SpanObserver> observer_;
};

// One span, from construction to end() or destruction, whichever is first. It
// moves with the work that it describes and may end in another thread. Only one
// thread at a time may call end().
class Span {
 public:
  Span() : id_(0) {}  // no span
  Span(std::string_view category, std::string_view name,
       std::initializer_list<SpanAttribute> attributes = {})
      : id_(observed() ? begin(category, name, attributes, false) : 0) {}
  // Makes the span of work that goes on while the thread that began it does
  // other things, such as an asynchronous collective. All other spans of a
  // thread lie within each other, as observers may rely on.
  static Span detached(std::string_view category, std::string_view name,
                       std::initializer_list<SpanAttribute> attributes = {}) {
    return Span(observed() ? begin(category, name, attributes, true) : 0);
  }
  Span(Span&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
  Span& operator=(Span&&) = delete;
  ~Span();

  void end(bool failed = false) noexcept;
  // Returns false if nobody was subscribed when the span began, or if it has
  // ended.
  bool active() const { return id_ != 0; }

  static bool observed() {
    return observer_count_.load(std::memory_order_relaxed) > 0;
  }

 private:
  friend class SpanSubscription;
  explicit Span(uint64_t id) : id_(id) {}
  static uint64_t begin(std::string_view category, std::string_view name,
                        std::initializer_list<SpanAttribute> attributes,
                        bool detached);

  static inline std::atomic<int> observer_count_{0};
  uint64_t id_;
};

}  // namespace lockstep::internal
