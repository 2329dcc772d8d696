#include "lockstep/comm/shm/protocol/handshake_note.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include "lockstep/comm/shm/protocol/errors.h"

namespace lockstep::internal::shm {

void throw_error(const Failure& failure) {
  switch (failure.kind) {
    case Kind::unavailable:
      throw Unavailable(failure.text);
    case Kind::invalid:
      throw std::invalid_argument(failure.text);
    default:
      throw GroupBroken(failure.text);
  }
}

std::string store_value(const Failure& failure) {
  return "failed " + std::to_string(static_cast<uint32_t>(failure.kind)) + " " +
         failure.text;
}

std::optional<Failure> failure_in(const std::string& value) {
  std::istringstream words(value);
  std::string word;
  uint32_t kind = 0;
  if (!(words >> word) || word != "failed") return std::nullopt;
  words >> kind;
  words.ignore();
  Failure failure{.kind = static_cast<Kind>(kind),
                  .text = {std::istreambuf_iterator<char>(words), {}}};
  if (failure.kind != Kind::unavailable && failure.kind != Kind::invalid) {
    failure.kind = Kind::broken;
  }
  return failure;
}

bool is_genuine(const Packet& packet, const Note& note,
                const std::string& secret) {
  return packet.bytes == sizeof note && note.magic == kHandshakeMagic &&
         note.version == kHandshakeVersion &&
         secret.size() == note.secret.size() &&
         std::equal(secret.begin(), secret.end(), note.secret.begin());
}

}  // namespace lockstep::internal::shm
