#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol/waiting.h"

// The two ends of one MessageRing. A message lies in the ring as a head, at a
// multiple of 16 bytes, and its bytes. A message that is larger than the ring
// goes through it in pieces.
namespace lockstep::internal::shm {

struct MessageHead {
  static constexpr uint16_t kMagic = 0x4c53;

  enum class Content : uint8_t { follows, given_up };

  uint64_t bytes;
  int32_t tag;
  uint8_t dtype;
  Content content;  // given_up: no bytes follow, the sender gave the message up
  uint16_t magic;   // shows whether this is a head at all
};
static_assert(sizeof(MessageHead) == 16);

// The sender's end. Threads: one at a time.
class RingWriter {
 public:
  RingWriter(const Segment& segment, const Waiting& waiting, int from, int to);

  // Places a head, if there is room for it; returns whether there was. The
  // reader sees the head only with the put() that must follow, for an empty
  // message too.
  bool begin(const MessageHead& head);
  // Copies as many of `bytes` as there is room for and publishes them; returns
  // how many.
  size_t put(const std::byte* data, size_t bytes);
  // Ends the message that was begun here, before all its bytes: the reader sees
  // that it is cut off, and the next head may follow. Returns false, and must
  // be called again, while the reader has not passed the message that was cut
  // off before.
  bool cut();

 private:
  // Returns how many bytes are free. Reads the reader's position again if they
  // seem too few.
  size_t room(size_t wanted);
  void publish(uint64_t at);

  MessageRing& ring_;
  const Waiting& waiting_;
  const int to_;
  std::byte* data_;
  size_t bytes_;
  uint64_t at_;         // where the next byte goes
  uint64_t published_;  // what ring_.written is
  uint64_t cut_;        // what ring_.cut is
  uint64_t read_ = 0;   // what ring_.read was at the last look
};

// The receiver's end. Threads: one at a time.
class RingReader {
 public:
  RingReader(const Segment& segment, const Waiting& waiting, int from, int to);

  // Returns the head of the next message, if it has come.
  std::optional<MessageHead> head();
  // Steps past the head that head() returned. A take() must follow, for an
  // empty message too.
  void begin();
  struct Taken {
    size_t bytes;
    bool cut_off;  // the sender has given the message up: no more bytes come
  };
  // Takes what has come of `bytes`, the rest of the message: copies it to `to`,
  // or drops it if `to` is null, and gives its room back to the writer.
  Taken take(std::byte* to, size_t bytes);

 private:
  void look();
  void publish(uint64_t at);

  MessageRing& ring_;
  const Waiting& waiting_;
  const int from_;
  const std::byte* data_;
  size_t bytes_;
  uint64_t at_;
  uint64_t published_;
  uint64_t written_ = 0;  // what ring_.written was at the last look
  uint64_t cut_ = 0;      // what ring_.cut was, read after that
};

}  // namespace lockstep::internal::shm
