#include "lockstep/comm/shm/protocol/peer_links.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/base/packet_socket.h"

namespace lockstep::internal::shm {
namespace {

constexpr uint64_t kMark = 0x6e616f6c2e6d6873;  // "shm.loan"

// Both ends run the same program on one host, so there is no byte order and no
// version.
struct Record {
  uint64_t mark;
  uint64_t id;
  uint64_t bytes;
};

bool send(const FileDescriptor& socket, const Record& record, int descriptor) {
  return send_packet(socket, std::as_bytes(std::span(&record, 1)),
                     descriptor) != Sent::full;
}

}  // namespace

PeerLinks::PeerLinks(std::vector<FileDescriptor> sockets)
    : sockets_(std::move(sockets)) {}

std::vector<int> PeerLinks::hung_up() const {
  std::vector<pollfd> polled;
  polled.reserve(sockets_.size());
  // poll() skips this rank's own descriptor, -1. POLLIN is not asked for: data
  // that was not read yet must not look like an end.
  for (const auto& socket : sockets_) {
    polled.push_back({.fd = socket.get(), .events = POLLRDHUP, .revents = 0});
  }
  while (::poll(polled.data(), polled.size(), 0) < 0) {
    if (errno != EINTR) throw_errno("could not poll the peers' sockets");
  }
  std::vector<int> ranks;
  for (size_t rank = 0; rank < polled.size(); ++rank) {
    if (polled[rank].revents != 0) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void PeerLinks::hang_up() const {
  if (made_in_.is_foreign()) return;
  for (const auto& socket : sockets_) {
    if (socket) ::shutdown(socket.get(), SHUT_RDWR);
  }
}

bool PeerLinks::lend(int to, uint64_t id, const SharedMemory& memory) const {
  if (made_in_.is_foreign()) return true;
  return send(sockets_.at(to),
              {.mark = kMark, .id = id, .bytes = memory.size()},
              memory.descriptor());
}

bool PeerLinks::take_back(int to, uint64_t id) const {
  if (made_in_.is_foreign()) return true;
  return send(sockets_.at(to), {.mark = kMark, .id = id, .bytes = 0}, -1);
}

std::optional<PeerLinks::Loan> PeerLinks::receive(int from) const {
  if (made_in_.is_foreign()) return std::nullopt;
  Record record{};
  auto packet = receive_packet(sockets_.at(from),
                               std::as_writable_bytes(std::span(&record, 1)));
  if (packet.state != Packet::State::received) return std::nullopt;
  const bool has_descriptor = packet.descriptor || packet.descriptor_lost;
  if (packet.bytes != sizeof record || record.mark != kMark ||
      has_descriptor != (record.bytes != 0) ||
      (packet.descriptor && packet.descriptor_lost)) {
    throw std::runtime_error("a peer sent " + std::to_string(packet.bytes) +
                             " bytes that are not a loan of memory");
  }
  return Loan{.id = record.id,
              .bytes = record.bytes,
              .memory = std::move(packet.descriptor)};
}

}  // namespace lockstep::internal::shm
