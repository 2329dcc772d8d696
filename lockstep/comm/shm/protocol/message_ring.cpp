#include "lockstep/comm/shm/protocol/message_ring.h"

#include <algorithm>
#include <cstring>

#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::shm {
namespace {

// Returns where the next head lies after a message that ends at `at`. Both ends
// skip the gap by themselves: neither publishes it, so that `read` never passes
// `written`.
uint64_t aligned(uint64_t at) {
  return (at + sizeof(MessageHead) - 1) / sizeof(MessageHead) *
         sizeof(MessageHead);
}

// A large message is published in parts, each this fraction of the ring: the
// reader copies one while the writer copies the next.
constexpr size_t kParts = 4;

}  // namespace

RingWriter::RingWriter(const Segment& segment, const Waiting& waiting, int from,
                       int to)
    : ring_(segment.ring(from, to)),
      waiting_(waiting),
      to_(to),
      data_(segment.ring_data(from, to)),
      bytes_(segment.ring_bytes()),
      at_(ring_.written.load(std::memory_order_relaxed)),
      published_(at_),
      cut_(ring_.cut.load(std::memory_order_relaxed)) {}

size_t RingWriter::room(size_t wanted) {
  if (bytes_ - (at_ - read_) < wanted) {
    // Pairs with RingReader::publish(), so that the reader has read the bytes
    // before they are overwritten. seq_cst for the same reason as in
    // RingReader::look().
    read_ = ring_.read.load(std::memory_order_seq_cst);
  }
  return bytes_ - (at_ - read_);
}

bool RingWriter::begin(const MessageHead& head) {
  const uint64_t at = aligned(at_);
  const size_t wanted = at - at_ + sizeof(head);
  if (room(wanted) < wanted) return false;
  // The ring's size is a multiple of the head's, so the head does not wrap.
  std::memcpy(data_ + at % bytes_, &head, sizeof(head));
  at_ = at + sizeof(head);
  return true;
}

size_t RingWriter::put(const std::byte* data, size_t bytes) {
  size_t done = 0;
  do {
    const size_t part = std::min(bytes - done, bytes_ / kParts);
    const size_t size = std::min(part, room(part));
    if (size > 0) {
      const size_t before_end = std::min(size, bytes_ - at_ % bytes_);
      kernels::copy(data_ + at_ % bytes_, data + done, before_end);
      kernels::copy(data_, data + done + before_end, size - before_end);
    }
    if (at_ + size == published_) break;
    publish(at_ + size);
    done += size;
  } while (done < bytes && done < bytes_);
  return done;
}

bool RingWriter::cut() {
  // There is one word, `cut`, in which the reader finds the end of a message
  // that was cut off. The reader must have passed the last such end before the
  // word is written again.
  if (cut_ != 0 && ring_.read.load(std::memory_order_seq_cst) <= cut_) {
    return false;
  }
  cut_ = at_;
  // seq_cst, as for `written`. The reader sees this store at the latest
  // together with the bytes that come after it, because their publication
  // releases this store too.
  ring_.cut.store(at_, std::memory_order_seq_cst);
  waiting_.wake_for_message(to_);
  return true;
}

void RingWriter::publish(uint64_t at) {
  at_ = at;
  published_ = at;
  ring_.written.store(at, std::memory_order_seq_cst);
  waiting_.wake_for_message(to_);
}

RingReader::RingReader(const Segment& segment, const Waiting& waiting, int from,
                       int to)
    : ring_(segment.ring(from, to)),
      waiting_(waiting),
      from_(from),
      data_(segment.ring_data(from, to)),
      bytes_(segment.ring_bytes()),
      at_(ring_.read.load(std::memory_order_relaxed)),
      published_(at_) {}

std::optional<MessageHead> RingReader::head() {
  const uint64_t at = aligned(at_);
  if (written_ < at + sizeof(MessageHead)) {
    look();
    if (written_ < at + sizeof(MessageHead)) return std::nullopt;
  }
  MessageHead head;
  std::memcpy(&head, data_ + at % bytes_, sizeof(head));
  return head;
}

void RingReader::look() {
  // Pairs with RingWriter::publish(). seq_cst: a thread that has started a
  // message and finds nothing here relies on the writer to wake another thread
  // of this rank that sleeps already.
  written_ = ring_.written.load(std::memory_order_seq_cst);
  // Read `cut` after `written`, so that bytes after a cut are never seen
  // without the cut.
  cut_ = ring_.cut.load(std::memory_order_seq_cst);
  // Everything before a cut was published before the cut.
  written_ = std::max(written_, cut_);
}

void RingReader::begin() { at_ = aligned(at_) + sizeof(MessageHead); }

RingReader::Taken RingReader::take(std::byte* to, size_t bytes) {
  const uint64_t end = at_ + bytes;
  size_t done = 0;
  do {
    const size_t part = std::min(bytes - done, bytes_ / kParts);
    if (written_ - at_ < part) look();
    // If the cut is that of an earlier message, it lies before this message's
    // head.
    const bool cut = cut_ >= at_ && cut_ < end;
    const size_t size = std::min<uint64_t>(part, (cut ? cut_ : written_) - at_);
    if (to && size > 0) {
      const size_t before_end = std::min(size, bytes_ - at_ % bytes_);
      kernels::copy(to + done, data_ + at_ % bytes_, before_end);
      kernels::copy(to + done + before_end, data_, size - before_end);
    }
    if (at_ + size == published_) break;
    publish(at_ + size);
    done += size;
  } while (done < bytes && done < bytes_);
  return {.bytes = done, .cut_off = at_ == cut_ && at_ < end};
}

void RingReader::publish(uint64_t at) {
  at_ = at;
  published_ = at;
  ring_.read.store(at, std::memory_order_seq_cst);
  waiting_.wake_for_message(from_);
}

}  // namespace lockstep::internal::shm
