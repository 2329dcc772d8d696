// A target of libFuzzer: the bytes of a connection to the agents' store, cut in
// two, are taken as requests, which a table of keys carries out, and as
// replies. What is understood must be exactly what was said.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/launch/rendezvous/key_table.h"
#include "lockstep/launch/rendezvous/store_message.h"

namespace lockstep::internal {
namespace {

constexpr size_t kLengthBytes = 4;

void require(bool held) {
  if (!held) std::abort();
}

void take_all(MessageBuffer& buffer, KeyTable& table) {
  while (const auto message = buffer.take()) {
    require(!message->empty() && message->size() <= kMostMessageBytes);
    try {
      const Request request = parse_request(*message);
      require(encode(request).substr(kLengthBytes) == *message);
      const Reply reply = table.apply(request);
      require(parse_reply(encode(reply).substr(kLengthBytes)) == reply);
      require(table.last_change_of(request.key) <= table.last_change());
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
  try {
    buffer.append(bytes.substr(0, cut));
    take_all(buffer, table);
    buffer.append(bytes.substr(cut));
    take_all(buffer, table);
  } catch (const MalformedMessage&) {
  }
  return 0;
}
