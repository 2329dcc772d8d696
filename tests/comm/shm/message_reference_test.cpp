// Random messages that are waited for, polled, given up and sent again at both
// ends, between collectives. They are compared with a plain reference: one
// process computes the end of each receive from the results that the senders
// got.
//
// This file is a part of the stress program, and of the program under
// ThreadSanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/protocol/core.h"
#include "tests/comm/shm/protocol_calls.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

using Handle = std::shared_ptr<Message>;
using Buffer = std::vector<uint8_t>;
using Random = std::mt19937_64;

constexpr milliseconds kTimeout{50'000};
constexpr int kTags = 3;
// Messages with this tag are received from any source.
constexpr int kAnyTag = kTags;
constexpr size_t kMostInCollective = 3000;
constexpr uint8_t kRefilled = 0xa5;
#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kSteps = 60;
#else
constexpr uint64_t kSteps = 300;
#endif

// The messages of one sender, receiver and tag in one step. All have one size,
// because the message that a receive gets depends on earlier ones that were
// given up.
struct Channel {
  int from;
  int to;
  int tag;
  size_t bytes;
  size_t messages;
  uint64_t seed;
};

Buffer content(const Channel& channel, size_t index) {
  Buffer data(channel.bytes);
  for (size_t i = 0; i < data.size(); i += 64) {
    const uint64_t value = mixed(channel.seed, index, i);
    for (size_t k = i; k < std::min(i + 64, data.size()); ++k) {
      data[k] = static_cast<uint8_t>(value >> (k % 8 * 8));
    }
  }
  return data;
}

// Returns the same on all ranks. `ring` is the size of a ring in bytes.
std::vector<Channel> channels_of(uint64_t seed, uint64_t step, int size,
                                 size_t ring) {
  Random random(mixed(seed, step));
  const std::vector<size_t> edges{
      0,         1,        15,           16,          17,
      64,        ring / 4, ring / 4 + 1, ring - 17,   ring - 16,
      ring - 15, ring,     ring + 1,     3 * ring + 5};
  const size_t any_bytes = edges[random() % edges.size()];
  std::vector<Channel> all;
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      for (int tag = 0; tag <= kAnyTag; ++tag) {
        if (from == to || random() % 3 != 0) continue;
        size_t bytes = edges[random() % edges.size()];
        if (random() % 3 == 0) bytes = random() % 2000;
        if (tag == kAnyTag) bytes = any_bytes;
        all.push_back({.from = from,
                       .to = to,
                       .tag = tag,
                       .bytes = bytes,
                       .messages = random() % 4 + (bytes < 100 ? 3 : 0),
                       .seed = random()});
      }
    }
  }
  return all;
}

enum class Outcome : uint8_t { none, arrived, given_up };

// The outcomes of each message by channel; only one rank writes each of them.
struct Outcomes {
  std::vector<std::vector<Outcome>> told_to_sender;
  std::vector<std::vector<Outcome>> told_to_receiver;
};

// Memory that was given back to its caller: nothing may be written to it any
// more.
class Refilled {
 public:
  void add(Buffer data) {
    std::ranges::fill(data, kRefilled);
    all_.push_back(std::move(data));
  }
  void check() const {
    for (const auto& data : all_) {
      if (data != Buffer(data.size(), kRefilled)) {
        throw std::runtime_error("memory of a message that was given up, " +
                                 std::to_string(data.size()) +
                                 " bytes, was written to");
      }
    }
  }

 private:
  std::vector<Buffer> all_;
};

// One step of one rank.
class Step {
 public:
  Step(Group& group, const std::vector<Channel>& channels, Outcomes& outcomes,
       uint64_t seed)
      : group_(group),
        channels_(channels),
        outcomes_(outcomes),
        random_(mixed(seed, group.rank(), 17)) {}

  void begin() {
    std::vector<size_t> order;
    for (size_t i = 0; i < channels_.size(); ++i) {
      for (size_t k = 0; k < channels_[i].messages; ++k) order.push_back(i);
    }
    std::ranges::shuffle(order, random_);
    std::vector<size_t> next(channels_.size());
    for (const size_t channel : order) {
      const size_t index = next[channel]++;
      if (channels_[channel].from == group_.rank()) send(channel, index);
      if (channels_[channel].to == group_.rank()) receive(channel);
    }
  }

  // Runs until this rank's part of all messages has ended.
  void finish() {
    const auto deadline = Deadline::after(kTimeout);
    while (!sends_.empty() || !receives_.empty()) {
      if (deadline.expired()) throw std::runtime_error("messages do not end");
      if (!sends_.empty()) move_send();
      if (!receives_.empty()) move_receive();
    }
    assign();
  }

  void check() const { refilled_.check(); }

 private:
  struct Sending {
    size_t channel;
    size_t index;
    Buffer data;
    Handle message;
  };
  struct Receiving {
    size_t channel;
    Buffer data;
    Handle message;
    size_t number;  // by order of starting
  };
  struct Received {
    size_t number;
    Outcome outcome;
    Buffer data;
  };

  void send(size_t channel, size_t index) {
    Sending one{.channel = channel,
                .index = index,
                .data = content(channels_[channel], index),
                .message = {}};
    one.message = group_.start_send(
        channels_[channel].to, channels_[channel].tag,
        {.data = one.data.data(), .size = one.data.size()}, DType::uint8);
    // A large message, or any message while the ring is full, is given up in
    // the middle.
    if (random_() % 4 == 0) group_.give_up(*one.message, " was cancelled");
    sends_.push_back(std::move(one));
  }

  void receive(size_t channel) {
    const auto& [from, to, tag, bytes, messages, seed] = channels_[channel];
    Receiving one{.channel = channel,
                  .data = Buffer(bytes),
                  .message = {},
                  .number = ++started_};
    one.message = group_.start_receive(
        tag == kAnyTag ? Group::kAnySource : from, tag,
        {.data = one.data.data(), .size = one.data.size()}, DType::uint8);
    if (random_() % 8 == 0) group_.give_up(*one.message, " was cancelled");
    receives_.push_back(std::move(one));
  }

  // Polls, waits for a moment, or gives up; returns whether the message has
  // ended. A wait that runs into its timeout gives up, too.
  bool has_ended(const Handle& message, uint64_t one_in) {
    const auto chance = random_() % (2 * one_in);
    if (chance == 0) {
      group_.give_up(*message, " was cancelled");
    } else if (chance == 1) {
      try {
        group_.wait(*message, milliseconds(1 + random_() % 2));
      } catch (const MessageGivenUp&) {
      }
    } else if (chance % 4 == 2) {
      std::this_thread::yield();
    }
    return group_.has_ended(*message);
  }

  // Returns the words of a failed message, or nothing.
  static std::string failure_of(const Message& message) {
    try {
      Group::throw_if_failed(message);
    } catch (const MessageGivenUp& error) {
      return error.what();
    }
    return "";
  }

  void move_send() {
    const size_t at = random_() % sends_.size();
    if (!has_ended(sends_[at].message, 8)) return;
    Sending one = std::move(sends_[at]);
    sends_.erase(sends_.begin() + static_cast<ptrdiff_t>(at));
    const bool well = failure_of(*one.message).empty();
    outcomes_.told_to_sender[one.channel][one.index] =
        well ? Outcome::arrived : Outcome::given_up;
    refilled_.add(std::move(one.data));
  }

  void move_receive() {
    const size_t at = random_() % receives_.size();
    if (!has_ended(receives_[at].message, 15)) return;
    Receiving one = std::move(receives_[at]);
    receives_.erase(receives_.begin() + static_cast<ptrdiff_t>(at));
    const auto why = failure_of(*one.message);
    const auto& channel = channels_[one.channel];
    if (why.empty()) {
      const int source = Group::source(*one.message);
      received_[{source, channel.tag}].push_back(
          {one.number, Outcome::arrived, std::move(one.data)});
      return;
    }
    refilled_.add(std::move(one.data));
    constexpr std::string_view kBySender = " gave up sending ";
    if (const auto end = why.find(kBySender); end != std::string::npos) {
      const int source =
          std::stoi(why.substr(std::string("rank ").size(), end));
      received_[{source, channel.tag}].push_back(
          {one.number, Outcome::given_up, {}});
    } else {
      // This rank gave up the receive, so another one replaces it.
      receive(one.channel);
    }
  }

  // Assigns the receives that this rank did not give up, in the order of
  // starting, to each sender's messages in their order.
  void assign() {
    for (size_t i = 0; i < channels_.size(); ++i) {
      const auto& channel = channels_[i];
      if (channel.to != group_.rank()) continue;
      auto& all = received_[{channel.from, channel.tag}];
      std::ranges::sort(all, {}, &Received::number);
      if (all.size() != channel.messages) {
        throw std::runtime_error(std::to_string(all.size()) +
                                 " messages came of " +
                                 std::to_string(channel.messages));
      }
      for (size_t k = 0; k < all.size(); ++k) {
        outcomes_.told_to_receiver[i][k] = all[k].outcome;
        if (all[k].outcome == Outcome::arrived &&
            all[k].data != content(channel, k)) {
          throw std::runtime_error(
              "message " + std::to_string(k) + " of " +
              std::to_string(channel.bytes) + " bytes from rank " +
              std::to_string(channel.from) + " to rank " +
              std::to_string(channel.to) + " with tag " +
              std::to_string(channel.tag) + " has wrong bytes");
        }
      }
    }
  }

  Group& group_;
  const std::vector<Channel>& channels_;
  Outcomes& outcomes_;
  Random random_;
  size_t started_ = 0;
  std::vector<Sending> sends_;
  std::vector<Receiving> receives_;
  std::map<std::pair<int, int>, std::vector<Received>> received_;
  Refilled refilled_;
};

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::stoull(text) : otherwise;
}

class MessagesAgainstAReference : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MessagesAgainstAReference,
                         ::testing::Values(2, 3, 5));

TEST_P(MessagesAgainstAReference,
       EachReceiveGetsItsMessageOrTheSendersFailure) {
  const int size = GetParam();
  const uint64_t seed = from_environment("LOCKSTEP_STRESS_SEED", 20'261'122);
  const uint64_t steps =
      from_environment("LOCKSTEP_STRESS_FACTOR", 1) * kSteps / size;
  ThreadWorld world(size, small_tuning());
  const Values values(seed, kMostInCollective * sizeof(double));
  const size_t ring = world.group(0).core().segment.ring_bytes();
  size_t given_up = 0;
  size_t arrived = 0;
  for (uint64_t step = 0; step < steps; ++step) {
    SCOPED_TRACE("LOCKSTEP_STRESS_SEED=" + std::to_string(seed) + ", step " +
                 std::to_string(step));
    const auto channels = channels_of(seed, step, size, ring);
    Outcomes outcomes;
    for (const auto& channel : channels) {
      for (auto* side :
           {&outcomes.told_to_sender, &outcomes.told_to_receiver}) {
        side->emplace_back(channel.messages, Outcome::none);
      }
    }
    const auto ends = world.run([&](Group& group) {
      Random random(mixed(seed, step, group.rank(), 5));
      std::jthread server;
      if (random() % 2 == 0) {
        server = std::jthread([&](std::stop_token stop) {
          group.serve_messages(std::move(stop));
        });
      }
      std::vector<std::byte> room(2 * (size + 1) * kMostInCollective * 8);
      Caller caller(group, values, kTimeout);
      Step part(group, channels, outcomes, mixed(seed, step, 3));
      part.begin();
      const uint64_t kind = mixed(seed, step, 4);
      caller.run({.operation = static_cast<Operation>(kind % kOperationCount),
                  .count = kind % kMostInCollective,
                  .step = step},
                 room.data());
      part.finish();
      // After this barrier no data can arrive any more.
      group.barrier(kTimeout);
      part.check();
      group.barrier(kTimeout);
    });
    ASSERT_EQ(faults(ends), "");
    for (size_t i = 0; i < channels.size(); ++i) {
      ASSERT_EQ(outcomes.told_to_sender[i], outcomes.told_to_receiver[i])
          << "from " << channels[i].from << " to " << channels[i].to << ", tag "
          << channels[i].tag << ", " << channels[i].bytes << " bytes";
      for (const Outcome outcome : outcomes.told_to_sender[i]) {
        (outcome == Outcome::arrived ? arrived : given_up) += 1;
      }
    }
  }
  // Checks that both outcomes occurred.
  EXPECT_GT(arrived, 0U);
  EXPECT_GT(given_up, 0U);
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
