// Messages between processes: their bytes, sockets for packets and descriptors,
// and sleeping on a word of shared memory.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <thread>

#include "lockstep/base/environment.h"
#include "lockstep/base/futex.h"
#include "lockstep/base/message_bytes.h"
#include "lockstep/base/packet_socket.h"

namespace lockstep::internal {
namespace {

TEST(MessageBytes, FieldsAreReadAsTheyWereWritten) {
  std::string bytes;
  put_number(bytes, 0x0102, 2);
  EXPECT_EQ(bytes, std::string("\x01\x02", 2));
  put_text(bytes, "text", 1);
  put_number(bytes, uint64_t{1} << 63, 8);
  bytes += "rest";
  FieldReader reader(bytes);
  EXPECT_EQ(reader.number(2), 0x0102u);
  EXPECT_THROW(reader.end(), MalformedMessage);
  EXPECT_EQ(reader.text(1, 4), "text");
  EXPECT_EQ(reader.number(8), uint64_t{1} << 63);
  EXPECT_EQ(reader.rest(), "rest");
  reader.end();
  EXPECT_THROW(reader.number(1), MalformedMessage);
  EXPECT_THROW(FieldReader(std::string("\4text")).text(1, 3), MalformedMessage);
  EXPECT_THROW(FieldReader(std::string("\5text")).text(1, 9), MalformedMessage);
}

TEST(MessageBytes, MessagesAreCutWhereTheyEnd) {
  const std::string bytes = with_length("one") + with_length("two");
  MessageBuffer buffer;
  std::vector<std::string> taken;
  for (const char byte : bytes) {
    buffer.append({&byte, 1});
    while (const auto message = buffer.take()) taken.push_back(*message);
  }
  EXPECT_THAT(taken, ::testing::ElementsAre("one", "two"));
  EXPECT_FALSE(buffer.holds_part());
  buffer.append(with_length("three"));
  EXPECT_THROW(buffer.take(4), MalformedMessage);
  MessageBuffer empty;
  empty.append(with_length(""));
  EXPECT_THROW(empty.take(), MalformedMessage);
}

// Two connected sockets for packets.
struct Line {
  std::string name = "lockstep-test-" + random_digits(16);
  FileDescriptor listener = listen_at(name);
  FileDescriptor here = connect_to(name);
  FileDescriptor there = accept_from(listener);
};

TEST(PacketSocket, PacketsKeepTheirEndsAndCarryADescriptor) {
  Line line;
  std::array<std::byte, 8> bytes{};
  EXPECT_EQ(receive_packet(line.there, bytes).state, Packet::State::none);
  const FileDescriptor null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::array sent{std::byte{1}, std::byte{2}};
  ASSERT_EQ(send_packet(line.here, sent, null.get()), Sent::all);
  ASSERT_EQ(send_packet(line.here, std::span(sent).first(1)), Sent::all);
  const Packet first = receive_packet(line.there, bytes);
  EXPECT_EQ(first.bytes, 2u);
  EXPECT_EQ(bytes[1], std::byte{2});
  ASSERT_TRUE(first.descriptor);
  EXPECT_NE(::fcntl(first.descriptor.get(), F_GETFD) & FD_CLOEXEC, 0);
  const Packet second = receive_packet(line.there, bytes);
  EXPECT_EQ(second.bytes, 1u);
  EXPECT_FALSE(second.descriptor);
  line.here.reset();
  EXPECT_EQ(receive_packet(line.there, bytes).state, Packet::State::hung_up);
  EXPECT_EQ(send_packet(line.there, sent), Sent::hung_up);
}

TEST(PacketSocket, KnowsWhoIsThere) {
  Line line;
  EXPECT_EQ(peer_of(line.here).pid, ::getpid());
  EXPECT_EQ(user_of_peer(line.there), ::geteuid());
  EXPECT_TRUE(is_own_or_roots(line.there));
  EXPECT_FALSE(accept_from(line.listener));
  line.listener.reset();
  EXPECT_FALSE(connect_to(line.name));
  EXPECT_EQ(errno, ECONNREFUSED);
}

TEST(Futex, WakesThreadsThatSleepForOneOfTheBits) {
  constexpr std::chrono::seconds kLong{60};
  std::atomic<uint32_t> word{0};
  std::thread sleeper([&] {
    while (word.load() == 0) futex_wait(word, 0, kLong, 2);
  });
  word = 1;
  futex_wake_all(word, 6);
  sleeper.join();
  futex_wait(word, 0, kLong, 2);  // returns: the word is another
}

}  // namespace
}  // namespace lockstep::internal
