#include "lockstep/launch/nodes/store/store_message.h"

namespace lockstep::internal {
namespace {

constexpr uint64_t kLastOperation = 11;
constexpr uint64_t kLastKind = 4;

// A call or a reply of a worker: what it is, the number of the worker's
// connection, and then its own bytes to the end.
std::string with_envelope(uint8_t what, int64_t worker,
                          const std::string& message) {
  std::string bytes;
  bytes.reserve(message.size() + 9);
  put_number(bytes, what, 1);
  put_number(bytes, static_cast<uint64_t>(worker), 8);
  return with_length(bytes + message);
}

}  // namespace

std::string encode(const Request& request) {
  if (request.operation == Request::Operation::worker_call) {
    return with_envelope(static_cast<uint8_t>(request.operation),
                         request.number, request.value);
  }
  std::string bytes;
  put_number(bytes, static_cast<uint8_t>(request.operation), 1);
  put_text(bytes, request.key, 1);
  put_text(bytes, request.value, 2);
  put_number(bytes, static_cast<uint64_t>(request.number), 8);
  put_number(bytes, request.keys.size(), 1);
  for (const std::string& key : request.keys) put_text(bytes, key, 1);
  return with_length(bytes);
}

std::string encode(const Reply& reply) {
  if (reply.kind == Reply::Kind::worker_reply) {
    return with_envelope(static_cast<uint8_t>(reply.kind), reply.number,
                         reply.text);
  }
  std::string bytes;
  put_number(bytes, static_cast<uint8_t>(reply.kind), 1);
  put_text(bytes, reply.text, 2);
  put_number(bytes, static_cast<uint64_t>(reply.number), 8);
  return with_length(bytes);
}

Request parse_request(std::string_view bytes) {
  FieldReader reader(bytes);
  Request request;
  const uint64_t operation = reader.number(1);
  if (operation < 1 || operation > kLastOperation) {
    throw MalformedMessage("there is no such operation");
  }
  request.operation = static_cast<Request::Operation>(operation);
  if (request.operation == Request::Operation::worker_call) {
    request.number = static_cast<int64_t>(reader.number(8));
    request.value = reader.rest();
    return request;
  }
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
  if (kind > kLastKind) throw MalformedMessage("there is no such reply");
  reply.kind = static_cast<Reply::Kind>(kind);
  if (reply.kind == Reply::Kind::worker_reply) {
    reply.number = static_cast<int64_t>(reader.number(8));
    reply.text = reader.rest();
    return reply;
  }
  reply.text = reader.text(2, kMostValueBytes);
  reply.number = static_cast<int64_t>(reader.number(8));
  reader.end();
  return reply;
}

}  // namespace lockstep::internal
