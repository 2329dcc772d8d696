// Thousands of random collectives back to back, with messages between them,
// between more processes than cores. Every bit is checked. LOCKSTEP_STRESS_SEED
// chooses other calls; LOCKSTEP_STRESS_FACTOR makes the test so many times
// longer.
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/comm/shm/protocol_calls.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;

constexpr milliseconds kTimeout{60'000};
constexpr size_t kMost = size_t{3} << 20;
constexpr size_t kMostOfMessage = size_t{512} << 10;

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::stoull(text);
}

// A random stream that is determined by the numbers it begins with.
class Chance {
 public:
  template <typename... Numbers>
  explicit Chance(Numbers... numbers)
      : state_(mixed(static_cast<uint64_t>(numbers)...)) {}
  uint64_t below(uint64_t limit) { return (state_ = mixed(state_)) % limit; }
  bool one_in(uint64_t times) { return below(times) == 0; }
  // Returns a number from 0 to `most`; each power of two is equally likely.
  size_t log_uniform(size_t most) {
    const double exponent = std::log2(static_cast<double>(most) + 1) *
                            static_cast<double>(below(1 << 20)) / (1 << 20);
    return std::min(most,
                    static_cast<size_t>(std::exp2(exponent)) - 1 + below(2));
  }

 private:
  uint64_t state_;
};

Call call_at(uint64_t seed, uint64_t step, int size) {
  Chance chance(seed, step, 1);
  Call call{.operation = static_cast<Operation>(chance.below(kOperationCount)),
            .dtype = static_cast<DType>(chance.below(kernels::kDTypeCount)),
            .root = static_cast<int>(chance.below(size)),
            .uneven = chance.one_in(2),
            .step = step};
  if (chance.one_in(3)) call.operation = Operation::all_reduce;
  do {
    call.op = static_cast<ReduceOp>(chance.below(kernels::kReduceOpCount));
  } while (!kernels::is_reducible(call.dtype, call.op));
  const bool one_piece = call.operation == Operation::all_reduce ||
                         call.operation == Operation::reduce ||
                         call.operation == Operation::broadcast;
  call.count = chance.log_uniform(one_piece ? kMost : kMost / size) /
               kernels::size_of(call.dtype);
  return call;
}

// Makes ranks come at different times: some a little late, some asleep.
void dawdle(Chance& chance) {
  if (chance.one_in(6)) {
    for (auto times = chance.below(4); times > 0; --times) ::sched_yield();
  } else if (chance.one_in(16)) {
    sleep_for(microseconds(chance.below(1500)));
  } else if (chance.one_in(700)) {
    sleep_for(microseconds(chance.below(120'000)));
  }
}

// Messages of this rank that overlap the collectives of several steps.
class Traffic {
 public:
  Traffic(Group& group, const Values& values, uint64_t seed)
      : group_(group), values_(values), seed_(seed) {}

  // Starts the messages of this step, and waits for those that began three
  // steps ago: by then every peer has started its side of them.
  void at(uint64_t step) {
    for (uint64_t begin = step < 2 ? 0 : step - 2; begin <= step; ++begin) {
      start(begin, step);
    }
    if (step >= 3) finish(step - 3);
  }
  void finish_all(uint64_t steps) {
    for (uint64_t step = steps; step < steps + 3; ++step) {
      for (uint64_t begin = step - 2; begin < steps; ++begin) {
        start(begin, step);
      }
      group_.barrier(kTimeout);
    }
    while (!under_way_.empty()) finish(under_way_.front().plan.step);
  }

 private:
  struct Plan {
    uint64_t step;
    uint64_t index;
    int from;
    int to;
    int32_t tag;
    DType dtype;
    size_t bytes;
  };
  struct UnderWay {
    Plan plan;
    std::unique_ptr<std::byte[]> data;
    std::shared_ptr<Message> message;
  };

  std::vector<Plan> plans(uint64_t step) const {
    Chance chance(seed_, step, 2);
    std::vector<Plan> all(chance.one_in(3) ? chance.below(4) : 0);
    const int size = group_.size();
    for (size_t i = 0; i < all.size(); ++i) {
      const int from = static_cast<int>(chance.below(size));
      const int to =
          static_cast<int>((from + 1 + chance.below(size - 1)) % size);
      const auto dtype = static_cast<DType>(chance.below(kernels::kDTypeCount));
      const size_t element = kernels::size_of(dtype);
      all[i] = {
          .step = step,
          .index = i,
          .from = from,
          .to = to,
          .tag = static_cast<int32_t>(chance.below(3)),
          .dtype = dtype,
          .bytes = chance.log_uniform(kMostOfMessage) / element * element};
    }
    return all;
  }

  // The delay is the same for all messages of one sender, receiver and tag, so
  // they keep their order.
  uint64_t delay(const Plan& plan, uint64_t side) const {
    return Chance(seed_, plan.from, plan.to, plan.tag * 2 + side).below(3);
  }

  const std::byte* content(const Plan& plan) const {
    return values_.window(plan.dtype, plan.step, 1'000'000 + plan.index);
  }

  void start(uint64_t begin, uint64_t step) {
    for (const auto& plan : plans(begin)) {
      const bool sends = plan.from == group_.rank();
      if (!sends && plan.to != group_.rank()) continue;
      if (begin + delay(plan, sends ? 0 : 1) != step) continue;
      UnderWay one{.plan = plan,
                   .data = std::make_unique<std::byte[]>(plan.bytes + 1),
                   .message = {}};
      if (sends) {
        std::memcpy(one.data.get(), content(plan), plan.bytes);
        one.message = group_.start_send(
            plan.to, plan.tag, {.data = one.data.get(), .size = plan.bytes},
            plan.dtype);
      } else {
        one.message = group_.start_receive(
            plan.from, plan.tag, {.data = one.data.get(), .size = plan.bytes},
            plan.dtype);
      }
      under_way_.push_back(std::move(one));
    }
  }

  void finish(uint64_t step) {
    Chance chance(seed_, step, group_.rank(), 3);
    for (auto one = under_way_.begin(); one != under_way_.end();) {
      if (one->plan.step != step) {
        ++one;
        continue;
      }
      if (!chance.one_in(3) || !group_.has_ended(*one->message)) {
        group_.wait(*one->message, kTimeout);
      }
      check(*one);
      one = under_way_.erase(one);
    }
  }

  void check(const UnderWay& one) const {
    Group::throw_if_failed(*one.message);
    const auto& plan = one.plan;
    if (std::memcmp(one.data.get(), content(plan), plan.bytes) == 0) return;
    throw std::runtime_error("message " + std::to_string(plan.index) +
                             " of step " + std::to_string(plan.step) + ", " +
                             std::to_string(plan.bytes) + " bytes from rank " +
                             std::to_string(plan.from) + " to rank " +
                             std::to_string(plan.to) + " has wrong bytes");
  }

  Group& group_;
  const Values& values_;
  uint64_t seed_;
  std::list<UnderWay> under_way_;
};

// Places this rank's data: in ordinary memory, in a region that stays, or in
// one that was just made.
class Rooms {
 public:
  explicit Rooms(Group& group) : group_(group) {}
  ~Rooms() {
    for (void* region : {static_cast<void*>(kept_), passing_}) {
      if (region != nullptr) group_.free_registered(region);
    }
  }
  Rooms(const Rooms&) = delete;
  Rooms& operator=(const Rooms&) = delete;

  std::byte* room(size_t bytes, Chance& chance) {
    if (passing_ != nullptr && chance.one_in(2)) {
      group_.free_registered(passing_);
      passing_ = nullptr;
    }
    const auto kind = chance.below(16);
    if (kind == 0 && passing_ == nullptr) {
      passing_ = group_.allocate_registered(bytes);
      return static_cast<std::byte*>(passing_);
    }
    if (kind < 8) {
      if (kept_bytes_ < bytes) {
        if (kept_ != nullptr) group_.free_registered(kept_);
        kept_bytes_ = bytes;
        kept_ = static_cast<std::byte*>(group_.allocate_registered(bytes));
      }
      return kept_ + chance.below(kept_bytes_ - bytes + 1) / 64 * 64;
    }
    if (plain_.size() < bytes) plain_.resize(bytes);
    return plain_.data();
  }

 private:
  Group& group_;
  std::vector<std::byte> plain_;
  std::byte* kept_ = nullptr;
  size_t kept_bytes_ = 0;
  void* passing_ = nullptr;
};

void storm(Group& group, const Values& values, uint64_t seed, uint64_t steps) {
  Caller caller(group, values, kTimeout);
  Traffic traffic(group, values, seed);
  Rooms rooms(group);
  for (uint64_t step = 0; step < steps; ++step) {
    const auto call = call_at(seed, step, group.size());
    // In half of the steps all ranks use the same kind of memory, because a
    // reduction in place needs that.
    const bool alike = Chance(seed, step, 4).one_in(2);
    Chance chance(seed, step, alike ? 0 : group.rank() + 1, 5);
    auto* room = rooms.room(Caller::room(call, group.size()), chance);
    const size_t shift = chance.one_in(3) ? chance.below(9) : 0;
    Chance own(seed, step, group.rank(), 6);
    dawdle(own);
    traffic.at(step);
    dawdle(own);
    caller.run(call, room, shift, own.one_in(2));
  }
  traffic.finish_all(steps);
}

const uint64_t kSeed = from_environment("LOCKSTEP_STRESS_SEED", 20'261'121);
const uint64_t kFactor = from_environment("LOCKSTEP_STRESS_FACTOR", 1);

class ShmProtocolStress : public ::testing::TestWithParam<int> {
 protected:
  ShmProtocolStress() : values_(kSeed, kMost + kMostOfMessage) {
    RecordProperty("seed", std::to_string(kSeed));
  }
  std::string how(uint64_t steps) const {
    return "LOCKSTEP_STRESS_SEED=" + std::to_string(kSeed) + ", " +
           std::to_string(steps) + " steps";
  }
  std::unique_ptr<ForkedWorld> start(int size, uint64_t seed, uint64_t steps) {
    return std::make_unique<ForkedWorld>(
        size, default_tuning(size), [this, seed, steps](Group& group, Signs&) {
          storm(group, values_, seed, steps);
        });
  }

  Values values_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmProtocolStress,
                         ::testing::Values(2, 3, 4, 8));

TEST_P(ShmProtocolStress, EveryBitOfRandomCallsIsRight) {
  const uint64_t steps = kFactor * 15'000 / (GetParam() * GetParam());
  auto world = start(GetParam(), kSeed, steps);
  EXPECT_EQ(faults(world->finish(seconds(100 * kFactor))), "") << how(steps);
}

using ShmProtocolStressOfJobs = ShmProtocolStress;
INSTANTIATE_TEST_SUITE_P(Ranks, ShmProtocolStressOfJobs, ::testing::Values(3));

TEST_P(ShmProtocolStressOfJobs, TwoAtOnceDoNotDisturbEachOther) {
  const uint64_t steps = kFactor * 300;
  auto one = start(GetParam(), kSeed + 1, steps);
  auto two = start(GetParam(), kSeed + 2, steps);
  EXPECT_EQ(faults(one->finish(seconds(100 * kFactor))), "") << how(steps);
  EXPECT_EQ(faults(two->finish(seconds(100 * kFactor))), "") << how(steps);
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
