#include "lockstep/worker/worker_call.h"

namespace lockstep::internal {
namespace {

constexpr uint64_t kLastOperation = 10;
constexpr uint64_t kLastKind = 5;

}  // namespace

std::string bytes_of(const WorkerCall& call) {
  std::string bytes;
  put_number(bytes, static_cast<uint8_t>(call.operation), 1);
  put_text(bytes, call.key, 2);
  put_text(bytes, call.value, 4);
  put_text(bytes, call.expected, 4);
  put_number(bytes, static_cast<uint64_t>(call.number), 8);
  put_number(bytes, call.keys.size(), 2);
  for (const std::string& key : call.keys) put_text(bytes, key, 2);
  return bytes;
}

std::string bytes_of(const WorkerReply& reply) {
  std::string bytes;
  put_number(bytes, static_cast<uint8_t>(reply.kind), 1);
  put_text(bytes, reply.text, 4);
  put_number(bytes, static_cast<uint64_t>(reply.number), 8);
  return bytes;
}

WorkerCall parse_worker_call(std::string_view message) {
  FieldReader reader(message);
  WorkerCall call;
  const uint64_t operation = reader.number(1);
  if (operation < 1 || operation > kLastOperation) {
    throw MalformedMessage("there is no such operation");
  }
  call.operation = static_cast<WorkerCall::Operation>(operation);
  call.key = reader.text(2, kMostWorkerKeyBytes);
  call.value = reader.text(4, kMostWorkerValueBytes);
  call.expected = reader.text(4, kMostWorkerValueBytes);
  call.number = static_cast<int64_t>(reader.number(8));
  const uint64_t keys = reader.number(2);
  for (uint64_t key = 0; key < keys; ++key) {
    call.keys.push_back(reader.text(2, kMostWorkerKeyBytes));
  }
  reader.end();
  return call;
}

WorkerReply parse_worker_reply(std::string_view message) {
  FieldReader reader(message);
  WorkerReply reply;
  const uint64_t kind = reader.number(1);
  if (kind > kLastKind) throw MalformedMessage("there is no such reply");
  reply.kind = static_cast<WorkerReply::Kind>(kind);
  reply.text = reader.text(4, kMostWorkerValueBytes);
  reply.number = static_cast<int64_t>(reader.number(8));
  reader.end();
  return reply;
}

}  // namespace lockstep::internal
