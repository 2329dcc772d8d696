// The messages of the agents' store: what is understood and what is refused,
// of messages that are right and of random damage to them.
#include "lockstep/launch/nodes/store/store_message.h"

#include <gmock/gmock.h>

#include <random>

namespace lockstep::internal::testing {
namespace {

const Request kRequests[] = {
    {.operation = Request::Operation::hello, .number = kStoreVersion},
    {.operation = Request::Operation::set, .key = "a/b", .value = "{\"x\":1}"},
    {.operation = Request::Operation::get, .key = std::string(255, 'k')},
    {.operation = Request::Operation::add, .key = "n", .number = -7},
    {.operation = Request::Operation::remove, .key = ""},
    {.operation = Request::Operation::set_if_absent,
     .key = "job",
     .value = std::string(kMostValueBytes, '\xff')},
    {.operation = Request::Operation::await_change,
     .number = int64_t{1} << 40,
     .keys = {"one", std::string("t\0o", 3), ""}},
    {.operation = Request::Operation::for_round, .number = 3},
    {.operation = Request::Operation::worker_call,
     .value = std::string("any \0 bytes", 11),
     .number = int64_t{1} << 40},
    {.operation = Request::Operation::worker_gone, .number = 7},
};

const Reply kReplies[] = {
    {},
    {.kind = Reply::Kind::text, .text = std::string("\0\n", 2)},
    {.kind = Reply::Kind::number, .number = -1},
    {.kind = Reply::Kind::refused, .text = std::string(kMostValueBytes, 'x')},
    {.kind = Reply::Kind::worker_reply, .text = "any bytes", .number = 7},
};

// Returns the message without its length.
std::string body(const std::string& message) { return message.substr(4); }

TEST(StoreMessage, ComesBackAsItWasSentHoweverItIsCut) {
  for (const size_t piece : {1, 2, 3, 7, 1000, 1 << 20}) {
    MessageBuffer buffer;
    std::string bytes;
    for (const Request& request : kRequests) bytes += encode(request);
    std::vector<Request> taken;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      buffer.append(bytes.substr(at, piece));
      while (const auto message = buffer.take()) {
        taken.push_back(parse_request(*message));
      }
    }
    EXPECT_THAT(taken, ::testing::ElementsAreArray(kRequests)) << piece;
    EXPECT_FALSE(buffer.holds_part());
  }
  for (const Reply& reply : kReplies) {
    EXPECT_EQ(parse_reply(body(encode(reply))), reply);
  }
}

TEST(StoreMessage, BytesOfTheWireAreThoseOfThePage) {
  const Request add{
      .operation = Request::Operation::add, .key = "n", .number = 258};
  EXPECT_EQ(encode(add),
            std::string("\0\0\0\x0e\x04\x01n\0\0\0\0\0\0\0\0\x01\x02\0", 18));
  EXPECT_EQ(encode(Reply{.kind = Reply::Kind::text, .text = "ok"}),
            std::string("\0\0\0\x0d\x01\0\x02ok\0\0\0\0\0\0\0\0", 17));
}

TEST(StoreMessage, ImpossibleLengthIsRefusedBeforeAnyByteOfTheMessage) {
  for (const char* length :
       {"\0\0\0\0", "\0\4\0\1", "\x7f\xff\xff\xff", "\xff\xff\xff\xff"}) {
    MessageBuffer buffer;
    buffer.append(std::string_view(length, 4));
    EXPECT_THROW(buffer.take(), MalformedMessage);
  }
  MessageBuffer largest;
  largest.append(std::string_view("\0\4\0\0", 4));
  EXPECT_FALSE(largest.take());
  // Messages of strangers must be shorter.
  MessageBuffer stranger;
  stranger.append(std::string_view("\0\0\0\x41", 4));
  EXPECT_THROW(stranger.take(64), MalformedMessage);
}

TEST(StoreMessage, EveryPartAndEveryByteTooManyIsRefused) {
  for (const Request& request : kRequests) {
    const std::string whole = body(encode(request));
    // A worker's call takes all bytes that have come.
    const bool has_end = request.operation != Request::Operation::worker_call;
    const size_t end = has_end ? whole.size() : 9;
    for (size_t length = 0; length < end; length += 1 + end / 100) {
      EXPECT_THROW(parse_request(whole.substr(0, length)), MalformedMessage);
    }
    if (has_end) {
      EXPECT_THROW(parse_request(whole + '\0'), MalformedMessage);
    }
  }
  for (const Reply& reply : kReplies) {
    if (reply.kind == Reply::Kind::worker_reply) continue;  // takes it all
    const std::string whole = body(encode(reply));
    EXPECT_THROW(parse_reply(whole.substr(0, whole.size() - 1)),
                 MalformedMessage);
    EXPECT_THROW(parse_reply(whole + '\0'), MalformedMessage);
  }
}

TEST(StoreMessage, WhatExceedsALimitIsRefused) {
  const auto refused = [](const Request& request) {
    EXPECT_THROW(parse_request(body(encode(request))), MalformedMessage);
  };
  refused({.operation = static_cast<Request::Operation>(0)});
  refused({.operation = static_cast<Request::Operation>(12)});
  refused({.operation = Request::Operation::set,
           .key = "k",
           .value = std::string(kMostValueBytes + 1, 'v')});
  refused({.operation = Request::Operation::await_change,
           .keys = std::vector<std::string>(kMostAwaitedKeys + 1, "k")});
  EXPECT_THROW(
      parse_reply(body(encode(Reply{.kind = static_cast<Reply::Kind>(5)}))),
      MalformedMessage);
}

// Damages `bytes` as a fuzzer does.
void damage(std::string& bytes, std::mt19937& random) {
  for (auto changes = random() % 4 + 1; changes > 0; --changes) {
    const size_t at = bytes.empty() ? 0 : random() % bytes.size();
    switch (random() % 5) {
      case 0:
        if (!bytes.empty()) bytes[at] = static_cast<char>(random());
        break;
      case 1:
        if (!bytes.empty()) bytes[at] ^= static_cast<char>(1 << random() % 8);
        break;
      case 2:
        bytes.erase(at, random() % 9);
        break;
      case 3:
        bytes.insert(at, random() % 9, static_cast<char>(random()));
        break;
      default:
        bytes.insert(at, bytes.substr(0, random() % 20));
    }
  }
}

// Every message is refused, or understood as exactly what it says: writing down
// what was understood gives the same bytes. So nothing is read past the end of
// a message and no limit is exceeded.
TEST(StoreMessage, RandomDamageIsRefusedOrUnderstoodExactly) {
  std::mt19937 random(20);
  std::vector<std::string> messages;
  for (const Request& request : kRequests) {
    if (request.value.size() < 100) messages.push_back(encode(request));
  }
  for (const Reply& reply : kReplies) {
    if (reply.text.size() < 100) messages.push_back(encode(reply));
  }
  int understood = 0;
  for (int turn = 0; turn < 200'000; ++turn) {
    std::string bytes = messages[random() % messages.size()];
    damage(bytes, random);
    MessageBuffer buffer;
    try {
      buffer.append(bytes);
      while (const auto message = buffer.take()) {
        ASSERT_LE(message->size(), kMostMessageBytes);
        try {
          const Request request = parse_request(*message);
          ASSERT_EQ(body(encode(request)), *message);
          ++understood;
        } catch (const MalformedMessage&) {
        }
        const Reply reply = parse_reply(*message);
        ASSERT_EQ(body(encode(reply)), *message);
        ++understood;
      }
    } catch (const MalformedMessage&) {
    }
  }
  EXPECT_GT(understood, 1000) << "the damage leaves no message";
}

}  // namespace
}  // namespace lockstep::internal::testing
