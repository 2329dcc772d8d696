#include "lockstep/trace/span.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

// Keeps what it is told. The views are valid only during the call, so it copies
// them.
class Recorder : public SpanObserver {
 public:
  struct Begun {
    uint64_t id;
    std::string category;
    std::string name;
    std::chrono::steady_clock::time_point time;
    std::map<std::string, std::string> texts{};
    std::map<std::string, int64_t> numbers{};
    bool detached = false;
    std::thread::id thread{};
  };
  struct Ended {
    uint64_t id;
    std::chrono::steady_clock::time_point time;
    bool failed;
    std::thread::id thread{};
  };

  void on_begin(const SpanBegin& begin) noexcept override {
    Begun begun{.id = begin.id,
                .category = std::string(begin.category),
                .name = std::string(begin.name),
                .time = begin.time,
                .detached = begin.detached,
                .thread = std::this_thread::get_id()};
    for (const auto& attribute : begin.attributes) {
      std::string key(attribute.key);
      if (const auto* number = std::get_if<int64_t>(&attribute.value)) {
        begun.numbers[key] = *number;
      } else {
        begun.texts[key] = std::get<std::string_view>(attribute.value);
      }
    }
    std::lock_guard lock(mutex_);
    begun_.push_back(std::move(begun));
  }
  void on_end(const SpanEnd& end) noexcept override {
    std::lock_guard lock(mutex_);
    ended_.push_back(
        {end.id, end.time, end.failed, std::this_thread::get_id()});
  }

  std::vector<Begun> begun() const {
    std::lock_guard lock(mutex_);
    return begun_;
  }
  std::vector<Ended> ended() const {
    std::lock_guard lock(mutex_);
    return ended_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Begun> begun_;
  std::vector<Ended> ended_;
};

TEST(Span, AnObserverSeesBeginAndEndWithTheSameIdAndTheAttributes) {
  auto recorder = std::make_shared<Recorder>();
  SpanSubscription subscription(recorder);
  const auto before = std::chrono::steady_clock::now();
  {
    Span span("comm", "all_reduce",
              {{"bytes", int64_t{4096}}, {"group", std::string_view("pg")}});
    EXPECT_TRUE(span.active());
    ASSERT_THAT(recorder->begun(), SizeIs(1));
    EXPECT_THAT(recorder->ended(), IsEmpty());
  }
  const auto after = std::chrono::steady_clock::now();
  ASSERT_THAT(recorder->begun(), SizeIs(1));
  ASSERT_THAT(recorder->ended(), SizeIs(1));
  const auto begun = recorder->begun()[0];
  const auto ended = recorder->ended()[0];
  EXPECT_NE(begun.id, 0u);
  EXPECT_EQ(begun.id, ended.id);
  EXPECT_EQ(begun.category, "comm");
  EXPECT_EQ(begun.name, "all_reduce");
  EXPECT_THAT(begun.numbers, ElementsAre(Pair("bytes", 4096)));
  EXPECT_THAT(begun.texts, ElementsAre(Pair("group", "pg")));
  EXPECT_FALSE(ended.failed);
  EXPECT_LE(before, begun.time);
  EXPECT_LE(begun.time, ended.time);
  EXPECT_LE(ended.time, after);
}

TEST(Span, ObserversAreToldOfDetachedOnes) {
  EXPECT_FALSE(Span::detached("comm", "all_reduce").active());
  auto recorder = std::make_shared<Recorder>();
  SpanSubscription subscription(recorder);
  {
    const Span attached("comm", "all_reduce");
    const auto detached =
        Span::detached("comm", "broadcast", {{"bytes", int64_t{8}}});
    EXPECT_TRUE(detached.active());
  }
  const auto begun = recorder->begun();
  ASSERT_THAT(begun, SizeIs(2));
  EXPECT_FALSE(begun[0].detached);
  EXPECT_TRUE(begun[1].detached);
  EXPECT_THAT(begun[1].numbers, ElementsAre(Pair("bytes", 8)));
  EXPECT_THAT(recorder->ended(), SizeIs(2));
}

TEST(Span, EndsOnceAndTellsFailure) {
  auto recorder = std::make_shared<Recorder>();
  SpanSubscription subscription(recorder);
  {
    Span span("ddp", "bucket");
    span.end(/*failed=*/true);
    EXPECT_FALSE(span.active());
    span.end();
  }
  ASSERT_THAT(recorder->ended(), SizeIs(1));
  EXPECT_TRUE(recorder->ended()[0].failed);
}

TEST(Span, WithoutASubscriptionNothingIsSeen) {
  auto recorder = std::make_shared<Recorder>();
  EXPECT_FALSE(Span::observed());
  {
    Span span("comm", "barrier");
    EXPECT_FALSE(span.active());
  }
  { SpanSubscription subscription(recorder); }
  EXPECT_FALSE(Span::observed());
  { Span span("comm", "barrier"); }
  EXPECT_THAT(recorder->begun(), IsEmpty());
  EXPECT_THAT(recorder->ended(), IsEmpty());
}

TEST(Span, ThatBeganUnobservedStaysSo) {
  auto recorder = std::make_shared<Recorder>();
  Span span("comm", "barrier");
  SpanSubscription subscription(recorder);
  span.end();
  EXPECT_THAT(recorder->ended(), IsEmpty());
}

TEST(Span, ALateObserverSeesTheEndOnly) {
  auto first = std::make_shared<Recorder>();
  auto second = std::make_shared<Recorder>();
  SpanSubscription subscription(first);
  Span span("comm", "barrier");
  SpanSubscription late(second);
  span.end();
  EXPECT_THAT(second->begun(), IsEmpty());
  ASSERT_THAT(second->ended(), SizeIs(1));
  EXPECT_EQ(second->ended()[0].id, first->begun().at(0).id);
}

TEST(Span, OpenOnesMayEndAfterTheSubscription) {
  auto gone = std::make_shared<Recorder>();
  auto stays = std::make_shared<Recorder>();
  std::optional<SpanSubscription> subscription(std::in_place, gone);
  Span alone("comm", "barrier");
  SpanSubscription other(stays);
  Span both("comm", "broadcast");
  subscription.reset();
  alone.end();
  both.end();
  EXPECT_THAT(gone->begun(), SizeIs(2));
  EXPECT_THAT(gone->ended(), IsEmpty());
  EXPECT_THAT(stays->begun(), SizeIs(1));
  EXPECT_THAT(stays->ended(), SizeIs(2));
  EXPECT_EQ(gone.use_count(), 1);  // the subscription has released the observer
}

TEST(Span, MovesWithoutEnding) {
  auto recorder = std::make_shared<Recorder>();
  SpanSubscription subscription(recorder);
  std::optional<Span> kept;
  {
    Span span("comm", "all_gather");
    kept.emplace(std::move(span));
  }
  EXPECT_THAT(recorder->ended(), IsEmpty());
  EXPECT_TRUE(kept->active());
  kept.reset();
  EXPECT_THAT(recorder->ended(), SizeIs(1));
}

TEST(Span, MayEndInAnotherThreadWhichIsWhereTheObserverIsCalled) {
  auto recorder = std::make_shared<Recorder>();
  SpanSubscription subscription(recorder);
  Span span("comm", "reduce");
  std::thread other([moved = std::move(span)]() mutable { moved.end(); });
  const auto id = other.get_id();
  other.join();
  ASSERT_THAT(recorder->ended(), SizeIs(1));
  EXPECT_EQ(recorder->begun()[0].thread, std::this_thread::get_id());
  EXPECT_EQ(recorder->ended()[0].thread, id);
}

TEST(Span, IdsAreUniqueAcrossThreadsAndSubscriptionsComeAndGoMeanwhile) {
  constexpr int kThreads = 4;
  constexpr int kSpans = 2000;
  auto recorder = std::make_shared<Recorder>();
  {
    SpanSubscription subscription(recorder);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([] {
        for (int j = 0; j < kSpans; ++j) Span span("comm", "send");
      });
    }
    for (int i = 0; i < 100; ++i) {
      SpanSubscription brief(std::make_shared<Recorder>());
    }
    for (auto& thread : threads) thread.join();
  }
  std::map<uint64_t, int> times;
  for (const auto& begun : recorder->begun()) ++times[begun.id];
  for (const auto& ended : recorder->ended()) ++times[ended.id];
  EXPECT_THAT(times, SizeIs(kThreads * kSpans));
  for (const auto& [id, seen] : times) EXPECT_EQ(seen, 2) << id;
}

}  // namespace
}  // namespace lockstep::internal
