#include "lockstep/launch/rendezvous/store_message.h"

namespace lockstep::internal {
namespace {

constexpr size_t kLengthBytes = 4;

// Numbers have the most significant byte first, as usual on networks.
void put(std::string& bytes, uint64_t number, size_t width) {
  for (size_t place = width; place-- > 0;) {
    bytes += static_cast<char>(number >> (8 * place));
  }
}

void put_text(std::string& bytes, std::string_view text, size_t width) {
  put(bytes, text.size(), width);
  bytes += text;
}

uint64_t number_of(std::string_view bytes) {
  uint64_t number = 0;
  for (const char byte : bytes) {
    number = number << 8 | static_cast<unsigned char>(byte);
  }
  return number;
}

std::string with_length(const std::string& message) {
  std::string bytes;
  put(bytes, message.size(), kLengthBytes);
  return bytes + message;
}

// Reads the fields of one message. Nothing is read past its end.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : rest_(bytes) {}

  uint64_t number(size_t width) { return number_of(take(width)); }

  std::string text(size_t width, size_t most) {
    const uint64_t length = number(width);
    if (length > most) throw MalformedMessage("a text is too long");
    return std::string(take(length));
  }

  void end() const {
    if (!rest_.empty()) throw MalformedMessage("bytes follow the message");
  }

 private:
  std::string_view take(size_t count) {
    if (count > rest_.size()) throw MalformedMessage("a message is too short");
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  std::string_view rest_;
};

}  // namespace

std::string encode(const Request& request) {
  std::string bytes;
  put(bytes, static_cast<uint8_t>(request.operation), 1);
  put_text(bytes, request.key, 1);
  put_text(bytes, request.value, 2);
  put(bytes, static_cast<uint64_t>(request.number), 8);
  put(bytes, request.keys.size(), 1);
  for (const std::string& key : request.keys) put_text(bytes, key, 1);
  return with_length(bytes);
}

std::string encode(const Reply& reply) {
  std::string bytes;
  put(bytes, static_cast<uint8_t>(reply.kind), 1);
  put_text(bytes, reply.text, 2);
  put(bytes, static_cast<uint64_t>(reply.number), 8);
  return with_length(bytes);
}

Request parse_request(std::string_view bytes) {
  FieldReader reader(bytes);
  Request request;
  const uint64_t operation = reader.number(1);
  if (operation < 1 || operation > 7) {
    throw MalformedMessage("there is no such operation");
  }
  request.operation = static_cast<Request::Operation>(operation);
  request.key = reader.text(1, kMostKeyBytes);
  request.value = reader.text(2, kMostValueBytes);
  request.number = static_cast<int64_t>(reader.number(8));
  const uint64_t keys = reader.number(1);
  if (keys > kMostAwaitedKeys) throw MalformedMessage("too many keys");
  for (uint64_t key = 0; key < keys; ++key) {
    request.keys.push_back(reader.text(1, kMostKeyBytes));
  }
  reader.end();
  return request;
}

Reply parse_reply(std::string_view bytes) {
  FieldReader reader(bytes);
  Reply reply;
  const uint64_t kind = reader.number(1);
  if (kind > 3) throw MalformedMessage("there is no such reply");
  reply.kind = static_cast<Reply::Kind>(kind);
  reply.text = reader.text(2, kMostValueBytes);
  reply.number = static_cast<int64_t>(reader.number(8));
  reader.end();
  return reply;
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
