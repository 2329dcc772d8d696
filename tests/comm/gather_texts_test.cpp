#include "lockstep/comm/gather_texts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/last_words.h"
#include "lockstep/comm/life_signs.h"
#include "lockstep/comm/watched_store.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using StorePtr = c10::intrusive_ptr<c10d::Store>;

const std::vector<int> kGlobalRanks{4, 6, 9};

std::vector<std::string> gathered(c10d::Store& store, int rank,
                                  const std::string& text,
                                  const Deadline& deadline,
                                  const std::function<void()>& look = {}) {
  return gather_texts(
      {.store = store, .rank = rank, .global_ranks = kGlobalRanks}, "text/",
      text, deadline, look);
}

// Returns the error of a rank 1 that is alone.
std::string error_of_one(c10d::Store& store, milliseconds timeout) {
  try {
    gathered(store, 1, "one", Deadline::after(timeout));
  } catch (const RanksAbsent& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

TEST(GatherTexts, GivesTheTextsOfAllInTheirOrderEmptyOnesToo) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const std::vector<std::string> texts{"zero", "", std::string("\0\n", 2)};
  std::vector<std::future<std::vector<std::string>>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      return gathered(*store, rank, texts[rank], Deadline::after(minutes(1)));
    }));
  }
  for (auto& rank : ranks) EXPECT_EQ(rank.get(), texts);
}

// LibTorch's own Store::wait() prints a warning when its time is over.
TEST(GatherTexts, NamesTheAbsentAndNothingElseIsPrinted) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(error_of_one(*store, milliseconds(300)),
            "rank 4, 9 did not come in time");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

class CountingStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    if (keys.size() > 1) ++questions_about_several;
    return HashStore::check(keys);
  }
  int questions_about_several = 0;
};

// Each of many ranks that waited for a late one asked for the keys of all,
// again and again.
TEST(GatherTexts, AfterTheFirstQuestionAsksForOneMissingRankOnly) {
  CountingStore store;
  EXPECT_EQ(error_of_one(store, milliseconds(50)),
            "rank 4, 9 did not come in time");
  EXPECT_EQ(store.questions_about_several, 1);
}

// A store to which the other texts come right after the first question.
class StoreFilledLate : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    const bool all = HashStore::check(keys);
    if (keys.size() > 1) {
      set("text/0", "=zero");
      set("text/2", "=two");
    }
    return all;
  }
  using Store::set;
};

TEST(GatherTexts, TheLastRankMayComeAtTheVeryEndOfTheTime) {
  auto store = c10::make_intrusive<StoreFilledLate>();
  EXPECT_THAT(gathered(*store, 1, "one", Deadline::after(milliseconds(0))),
              ElementsAre("zero", "one", "two"));
}

TEST(GatherTexts, EndsWithWhatLookThrowsEvenIfAllHaveCome) {
  StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("text/0", "=zero");
  store->set("text/2", "=two");
  EXPECT_THAT(
      [&] {
        gathered(*store, 1, "one", Deadline::after(minutes(1)),
                 [] { throw std::runtime_error("another gave up"); });
      },
      ThrowsMessage<std::runtime_error>("another gave up"));
}

TEST(GatherTexts, ARankThatGivesUpMeanwhileEndsTheWait) {
  StorePtr store = c10::make_intrusive<c10d::HashStore>();
  auto watched = [&](int rank) {
    return c10::make_intrusive<WatchedStore>(
        store,
        std::make_shared<LifeSigns>(store, rank, 3,
                                    /*rank_zero_has_store=*/false),
        std::vector<int>{0, 1, 2});
  };
  auto mine = watched(1);
  watched(0)->give_up("rank 0 gave up: no memory");
  const auto deadline = Deadline::after(minutes(5));
  EXPECT_THAT([&] { gathered(*mine, 1, "one", deadline); },
              ThrowsMessage<PeerGone>(HasSubstr("rank 0 gave up: no memory")));
  EXPECT_FALSE(deadline.expired());
}

TEST(PollStore, AsksOnceMoreWhenTheTimeIsOver) {
  int asked = 0;
  const auto never = Deadline::after(milliseconds(0));
  EXPECT_TRUE(poll_store(never, [&] { return ++asked == 1; }));
  EXPECT_FALSE(poll_store(never, [&] { return ++asked == 1; }));
  EXPECT_EQ(asked, 2);
}

TEST(LastWords, OfTheFirstRankCount) {
  c10d::HashStore store;
  const LastWords words(store, "words");
  EXPECT_EQ(words.heard(), std::nullopt);
  EXPECT_EQ(words.say("rank 0 failed"), "rank 0 failed");
  EXPECT_EQ(words.say("rank 1 failed"), "rank 0 failed");
  EXPECT_EQ(words.heard(), "rank 0 failed");
}

TEST(LastWords, AreAwaitedUntilAllKnowThemButNotForEver) {
  c10d::HashStore store;
  const LastWords words(store, "words");
  auto reader = std::async(std::launch::async, [&] {
    while (!words.heard()) std::this_thread::yield();
  });
  words.say("rank 0 failed");
  words.await_heard(2);
  EXPECT_EQ(store.add("words/told", 0), 2);
  reader.get();
  words.await_heard(3);
  EXPECT_EQ(store.add("words/told", 0), 2);
}

}  // namespace
}  // namespace lockstep::internal
