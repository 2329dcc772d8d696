#include "lockstep/launch/watch/agent_socket.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <span>
#include <system_error>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/base/packet_socket.h"

namespace lockstep::internal {
namespace {

constexpr size_t kRunIdBytes = 40;
// A process that connects and asks nothing is dropped when so many others have
// come.
constexpr size_t kMostAskers = 512;
// An answer goes in packets of this size, which any socket's buffer holds.
constexpr size_t kPacketBytes = 32 << 10;
constexpr std::chrono::milliseconds kIgnoredTime{1000};

}  // namespace

std::string AgentSocket::name_part(const std::string& run_id) {
  std::string part;
  for (const char c : run_id) {
    const bool plain =
        std::isalnum(static_cast<unsigned char>(c)) != 0 ||
        std::string_view("-_.").find(c) != std::string_view::npos;
    if (plain && part.size() < kRunIdBytes) part += c;
  }
  return part;
}

const std::string& AgentSocket::mark() {
  static const std::string digits = random_digits(8);
  return digits;
}

AgentSocket::AgentSocket(const std::string& run_id, Respond respond)
    : name_(std::string(kPrefix) + std::to_string(geteuid()) + "/" +
            std::to_string(getpid()) + "/" + mark() + "/" + name_part(run_id)),
      respond_(std::move(respond)),
      listener_(listen_at(name_)) {}

void AgentSocket::add_poll_entries(std::vector<pollfd>& entries) const {
  if (!ignored_until_ || ignored_until_->expired()) {
    entries.push_back({listener_.get(), POLLIN, 0});
  }
  for (const auto& asker : askers_) {
    const short awaited = asker.rest.empty() ? POLLIN : POLLOUT;
    entries.push_back({asker.socket.get(), awaited, 0});
  }
}

std::optional<Deadline> AgentSocket::due() const {
  if (!ignored_until_ || ignored_until_->expired()) return std::nullopt;
  return ignored_until_;
}

void AgentSocket::handle_poll_entries(std::span<const pollfd> entries) {
  std::erase_if(askers_, [&](Asker& asker) {
    return has_come(entries, asker.socket.get()) && serve(asker);
  });
  if (has_come(entries, listener_.get())) accept_new();
}

bool AgentSocket::serve(Asker& asker) const {
  try {
    if (!asker.rest.empty()) return send_rest(asker);
    std::array<std::byte, kQuestionBytes> bytes;
    const Packet packet = receive_packet(asker.socket, bytes);
    if (packet.state == Packet::State::none) return false;
    if (packet.state == Packet::State::received &&
        packet.bytes <= bytes.size()) {
      const std::string question(reinterpret_cast<const char*>(bytes.data()),
                                 packet.bytes);
      Answer answer = respond_(question, peer_of(asker.socket).pid);
      asker.rest = std::move(answer.json);
      return send_rest(asker, answer.descriptor);
    }
  } catch (const std::system_error&) {
    // The asker has gone.
  }
  return true;
}

bool AgentSocket::send_rest(Asker& asker, int descriptor) {
  while (!asker.rest.empty()) {
    const auto packet = std::string_view(asker.rest).substr(0, kPacketBytes);
    const Sent sent =
        send_packet(asker.socket, std::as_bytes(std::span(packet)), descriptor);
    if (sent == Sent::hung_up) return true;
    // The first packet meets an empty buffer. If it is refused, the descriptor
    // is: too many are on their way.
    if (sent == Sent::full) return descriptor >= 0;
    descriptor = -1;
    asker.rest.erase(0, packet.size());
  }
  return true;
}

void AgentSocket::accept_new() {
  try {
    while (FileDescriptor socket = accept_from(listener_)) {
      if (!is_own_or_roots(socket)) continue;
      Asker asker{std::move(socket)};
      if (serve(asker)) continue;
      if (askers_.size() == kMostAskers) askers_.erase(askers_.begin());
      askers_.push_back(std::move(asker));
    }
    ignored_until_.reset();
  } catch (const std::system_error&) {
    // No descriptor is left. New connections wait in the
    // listener's queue.
    ignored_until_ = Deadline::after(kIgnoredTime);
  }
}

}  // namespace lockstep::internal
