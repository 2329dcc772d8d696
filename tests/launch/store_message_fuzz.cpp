// A target of libFuzzer: the bytes of a connection to the agents' store, cut in
// two, are taken as requests, which a table of keys carries out, and as
// replies; and as what workers say, which a table of theirs carries out. What
// is understood must be exactly what was said.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/launch/nodes/store/key_table.h"
#include "lockstep/launch/nodes/store/store_message.h"
#include "lockstep/launch/nodes/store/worker_table.h"

namespace lockstep::internal {
namespace {

constexpr size_t kLengthBytes = 4;

void require(bool held) {
  if (!held) std::abort();
}

void take_call(const std::string& message, int64_t worker, WorkerTable& table) {
  const WorkerCall call = parse_worker_call(message);
  require(bytes_of(call) == message);
  const WorkerTable::Asker asker{static_cast<uint64_t>(worker) % 2,
                                 static_cast<uint64_t>(worker) % 5};
  if (worker % 7 == 0) table.forget(asker);
  if (worker % 11 == 0) table.forget_relay(asker.relay);
  for (const auto& [to, reply] : table.ask(asker, call)) {
    require(to.worker < 5);
    require(parse_worker_reply(bytes_of(reply)) == reply);
  }
}

void take_all(MessageBuffer& buffer, KeyTable& table, WorkerTable& workers) {
  while (const auto message = buffer.take()) {
    require(!message->empty() && message->size() <= kMostMessageBytes);
    try {
      const Request request = parse_request(*message);
      require(encode(request).substr(kLengthBytes) == *message);
      const Reply reply = table.apply(request);
      require(parse_reply(encode(reply).substr(kLengthBytes)) == reply);
      require(table.last_change_of(request.key) <= table.last_change());
      if (request.operation == Request::Operation::worker_call) {
        take_call(request.value, request.number, workers);
      }
    } catch (const MalformedMessage&) {
    }
    try {
      take_call(*message, static_cast<int64_t>(message->size()), workers);
    } catch (const MalformedMessage&) {
    }
    try {
      const WorkerReply reply = parse_worker_reply(*message);
      require(bytes_of(reply) == *message);
    } catch (const MalformedMessage&) {
    }
    try {
      const Reply reply = parse_reply(*message);
      require(encode(reply).substr(kLengthBytes) == *message);
    } catch (const MalformedMessage&) {
    }
  }
}

}  // namespace
}  // namespace lockstep::internal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep::internal;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const size_t cut = size == 0 ? 0 : data[size - 1] % (size + 1);
  MessageBuffer buffer;
  KeyTable table(10'000);
  WorkerTable workers(20'000);
  try {
    buffer.append(bytes.substr(0, cut));
    take_all(buffer, table, workers);
    buffer.append(bytes.substr(cut));
    take_all(buffer, table, workers);
  } catch (const MalformedMessage&) {
  }
  return 0;
}
