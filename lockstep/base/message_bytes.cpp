#include "lockstep/base/message_bytes.h"

#include <utility>

namespace lockstep::internal {
namespace {

constexpr size_t kLengthBytes = 4;

uint64_t number_of(std::string_view bytes) {
  uint64_t number = 0;
  for (const char byte : bytes) {
    number = number << 8 | static_cast<unsigned char>(byte);
  }
  return number;
}

}  // namespace

void put_number(std::string& bytes, uint64_t number, size_t width) {
  for (size_t place = width; place-- > 0;) {
    bytes += static_cast<char>(number >> (8 * place));
  }
}

void put_text(std::string& bytes, std::string_view text, size_t width) {
  put_number(bytes, text.size(), width);
  bytes += text;
}

std::string with_length(std::string_view message) {
  std::string bytes;
  bytes.reserve(kLengthBytes + message.size());
  put_number(bytes, message.size(), kLengthBytes);
  bytes += message;
  return bytes;
}

uint64_t FieldReader::number(size_t width) { return number_of(take(width)); }

std::string FieldReader::text(size_t width, size_t most) {
  const uint64_t length = number(width);
  if (length > most) throw MalformedMessage("a text is too long");
  return std::string(take(length));
}

std::string FieldReader::rest() {
  return std::string(std::exchange(rest_, {}));
}

void FieldReader::end() const {
  if (!rest_.empty()) throw MalformedMessage("bytes follow the message");
}

std::string_view FieldReader::take(size_t count) {
  if (count > rest_.size()) throw MalformedMessage("a message is too short");
  const std::string_view taken = rest_.substr(0, count);
  rest_.remove_prefix(count);
  return taken;
}

std::optional<std::string> MessageBuffer::take(size_t most) {
  if (bytes_.size() < kLengthBytes) return std::nullopt;
  const uint64_t length =
      number_of(std::string_view(bytes_).substr(0, kLengthBytes));
  if (length == 0 || length > most) {
    throw MalformedMessage("a message has an impossible length");
  }
  if (bytes_.size() - kLengthBytes < length) return std::nullopt;
  std::string message = bytes_.substr(kLengthBytes, length);
  bytes_.erase(0, kLengthBytes + length);
  return message;
}

}  // namespace lockstep::internal
