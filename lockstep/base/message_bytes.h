#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

// The bytes of which the messages between processes of a job are made: those
// of the agents' store (launch/nodes/store/store_message.h) and those of the
// workers' store (worker_call.h). A message is its length in 4 bytes, then that
// many bytes. Numbers have the most significant byte first, as usual on
// networks.
namespace lockstep::internal {

// A message is never longer than this, and nothing is allocated for one that
// says that it is.
inline constexpr size_t kMostMessageBytes = 256 << 10;

// Thrown for bytes that are not a message. The connection on which they came
// must be closed.
class MalformedMessage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Append a number in `width` bytes, and a text after its length in `width`
// bytes.
void put_number(std::string& bytes, uint64_t number, size_t width);
void put_text(std::string& bytes, std::string_view text, size_t width);

// Returns `message` with its length before it.
std::string with_length(std::string_view message);

// Reads the fields of one message. Nothing is read past its end: every member
// throws MalformedMessage instead.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : rest_(bytes) {}

  uint64_t number(size_t width);
  // Reads a text of at most `most` bytes.
  std::string text(size_t width, size_t most);
  // Reads all that is left.
  std::string rest();
  // Throws if something is left.
  void end() const;

 private:
  std::string_view take(size_t count);

  std::string_view rest_;
};

// Cuts the bytes of one connection into messages. Holds at most one message and
// what was appended at once.
class MessageBuffer {
 public:
  void append(std::string_view bytes) { bytes_ += bytes; }
  // Returns the next message, without its length, once it is complete. Throws
  // MalformedMessage as soon as a length is known to be 0 or above `most`.
  std::optional<std::string> take(size_t most = kMostMessageBytes);
  // Returns whether a part of a message has arrived.
  bool holds_part() const { return !bytes_.empty(); }

 private:
  std::string bytes_;
};

}  // namespace lockstep::internal
