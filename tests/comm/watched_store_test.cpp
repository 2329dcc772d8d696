#include "lockstep/comm/watched_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "tests/harness/in_child.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// A world of three ranks; this process plays all of them.
class WatchedStores : public ::testing::Test {
 protected:
  WatchedStores() {
    for (int rank = 0; rank < 3; ++rank) {
      life_signs_.push_back(std::make_shared<LifeSigns>(
          store_, rank, 3, /*rank_zero_has_store=*/false));
    }
  }

  c10::intrusive_ptr<WatchedStore> watched_by(int rank,
                                              std::vector<int> ranks = {0, 1,
                                                                        2}) {
    return c10::make_intrusive<WatchedStore>(store_, life_signs_[rank],
                                             std::move(ranks));
  }
  // Returns what rank 0 reports about ranks that are gone.
  std::string words() { return words_of(life_signs_[0]->gone()); }
  std::string words_when_someone_is_gone() {
    const auto deadline = Deadline::after(seconds(20));
    while (words().empty() && !deadline.expired()) {
      ::usleep(1000);
    }
    return words();
  }

  StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::shared_ptr<LifeSigns>> life_signs_;
};

TEST_F(WatchedStores, OfRanksThatLiveNothingIsSaid) {
  for (int i = 0; i < 3; ++i) EXPECT_EQ(words(), "");
  auto store = watched_by(0);
  EXPECT_FALSE(store->check({"key"}));
  store->set("key", "value");
  EXPECT_TRUE(store->check({"key"}));
  EXPECT_EQ(store->get_to_str("key"), "value");
  EXPECT_THAT([&] { store->wait({"other"}, milliseconds(30)); },
              ThrowsMessage<c10::DistStoreError>(HasSubstr("within 30 ms")));
}

// A process without a free descriptor cannot look for dead peers: it continues.
TEST_F(WatchedStores, OfNobodyAnythingIsSaidWhereNobodyCanLook) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit none = limit;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_EQ(words(), "");
  EXPECT_FALSE(watched_by(0)->check({"key"}));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// A bug: if the last descriptor went while a rank that had seen a death waited
// to be certain, it waited for as long as there was none. It took the dead rank
// for one that had left.
TEST_F(WatchedStores, ADeathThatWasSeenIsToldWithoutADescriptor) {
  life_signs_[0]->learn_all();
  life_signs_[2].reset();
  EXPECT_EQ(words(), "");  // rank 0 has seen it, and waits a little
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit none = limit;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_EQ(words_of(life_signs_[0]->gone_for_good()), "rank 2 died");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_F(WatchedStores, AtAStoreThatAnswersEachWriteTheyAreGoneAtOnce) {
  const auto make = [&](int rank) {
    return std::make_shared<LifeSigns>(store_, rank, 3,
                                       /*rank_zero_has_store=*/false,
                                       milliseconds(0));
  };
  const auto zero = make(0);
  auto one = make(1);
  const auto two = make(2);
  EXPECT_EQ(words_of(zero->gone()), "");
  one.reset();
  EXPECT_EQ(words_of(zero->gone()), "rank 1 died");
  two->leave(LifeSigns::End::failed);
  EXPECT_EQ(words_of(zero->gone()),
            "rank 1 died; rank 2 left because of an error");
}

TEST_F(WatchedStores, EachWayToGoHasItsWords) {
  life_signs_[1]->leave(LifeSigns::End::left);
  EXPECT_EQ(words_when_someone_is_gone(), "rank 1 has left the group");
  life_signs_[2]->leave(LifeSigns::End::failed);
  while (words() == "rank 1 has left the group") ::usleep(1000);
  EXPECT_EQ(words(),
            "rank 1 has left the group; rank 2 left because of an error");
}

// It was said to have died if its process and the store, with rank 0, ended
// soon after it had left.
TEST_F(WatchedStores, ARankThatLeftHasNotDiedIfTheStoreEndsToo) {
  EXPECT_EQ(words(), "");
  life_signs_[1]->leave(LifeSigns::End::left);
  EXPECT_EQ(words(), "");  // rank 0 has seen it, and waits a little
  life_signs_[1].reset();
  store_->deleteKey("alive/1");
  EXPECT_EQ(words_when_someone_is_gone(), "rank 1 has left the group");
}

TEST_F(WatchedStores, AWaitEndsWhenARankOfItsGroupIsGone) {
  life_signs_[2].reset();  // as if its process had ended
  EXPECT_THAT([&] { watched_by(0)->wait({"key"}, minutes(5)); },
              ThrowsMessage<PeerGone>(HasSubstr("rank 2 died")));
  EXPECT_THAT([&] { watched_by(0, {0, 1})->wait({"key"}, milliseconds(300)); },
              ThrowsMessage<c10::DistStoreError>(HasSubstr("300 ms")));
}

TEST_F(WatchedStores, WhatARankWroteBeforeItWentIsRead) {
  auto store = watched_by(0);
  store_->set("key", std::string("value"));
  life_signs_[2].reset();
  EXPECT_EQ(words_when_someone_is_gone(), "rank 2 died");
  EXPECT_EQ(store->get_to_str("key"), "value");
}

class RefusingStore : public c10d::HashStore {
 public:
  using HashStore::set;
  void set(const std::string&, const std::vector<uint8_t>&) override {
    throw StoreRefusal({__func__, __FILE__, __LINE__}, "too long");
  }
};

TEST_F(WatchedStores, AStoreThatRefusesACallIsNotGone) {
  const auto watched = c10::make_intrusive<WatchedStore>(
      c10::make_intrusive<RefusingStore>(), life_signs_[0],
      std::vector<int>{0, 1, 2});
  EXPECT_THAT([&] { watched->set("key", "value"); },
              ThrowsMessage<StoreRefusal>(::testing::AllOf(
                  HasSubstr("too long"), ::testing::Not(HasSubstr("gone")))));
}

TEST_F(WatchedStores, WhoGivesUpIsHeard) {
  watched_by(1)->give_up("rank 1 gave up: no memory");
  watched_by(2)->give_up("rank 2 gave up: rank 1 gave up");
  EXPECT_THAT([&] { watched_by(0)->wait({"key"}, minutes(5)); },
              ThrowsMessage<PeerGone>(HasSubstr("rank 1 gave up: no memory")));
}

// The store of a rank 0 that is stopped: calls last until it goes on.
class StoppedStore : public c10d::HashStore {
 public:
  using HashStore::set;
  bool check(const std::vector<std::string>& keys) override {
    await_going_on();
    return HashStore::check(keys);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    await_going_on();
    HashStore::set(key, value);
  }

  void stop() { is_stopped_ = true; }
  // Returns whether a call has lasted for half a minute.
  bool go_on() {
    is_stopped_ = false;
    return has_lasted_long_;
  }

 private:
  void await_going_on() {
    const auto deadline = Deadline::after(seconds(30));
    while (is_stopped_ && !deadline.expired()) ::usleep(1000);
    if (is_stopped_) has_lasted_long_ = true;
  }

  std::atomic<bool> is_stopped_ = false;
  std::atomic<bool> has_lasted_long_ = false;
};

// An operation that had failed asked the store about a rank of Python, which
// writes no sign, or about one that had died; with rank 0 stopped it did so for
// ever, and never threw.
TEST_F(WatchedStores, AStoreThatDoesNotAnswerKeepsNobodyWaiting) {
  const auto store = c10::make_intrusive<StoppedStore>();
  const auto make = [&](int rank) {
    return std::make_shared<LifeSigns>(
        store, rank, 4, /*rank_zero_has_store=*/false, milliseconds(0));
  };
  const auto one = make(1);
  auto two = make(2);
  one->learn_all();  // rank 3 does not exist
  store->stop();
  EXPECT_FALSE(one->misses_any({1, 2, 3}));
  two.reset();
  EXPECT_TRUE(one->misses_any({1, 2, 3}));
  EXPECT_EQ(words_of(one->gone_for_good({1, 2, 3})), "rank 2 died");
  one->leave(LifeSigns::End::failed);
  EXPECT_FALSE(store->go_on());
}

// The child's copy of the socket does not show that the parent lives, and the
// child's end does not show that the parent died.
TEST_F(WatchedStores, AForkedChildSaysNothingForItsParent) {
  const pid_t child = ::fork();
  if (child == 0) {
    life_signs_[1]->leave(LifeSigns::End::failed);
    ::_exit(life_signs_[1]->gone().empty() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(words(), "");
}

// A bug: a child that was forked after its parent had missed a rank asked about
// that rank for ever.
TEST_F(WatchedStores, AForkedChildDoesNotWaitToBeCertain) {
  life_signs_[2].reset();
  EXPECT_EQ(words(), "");  // rank 0 has seen it, and waits a little
  EXPECT_EQ(testing::in_child([&] {
              ::alarm(20);
              return life_signs_[0]->gone_for_good().empty() ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace lockstep::internal
