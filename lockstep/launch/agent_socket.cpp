#include "lockstep/launch/agent_socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <span>
#include <system_error>
#include <utility>

#include "lockstep/base/packet_socket.h"

namespace lockstep::internal {
namespace {

constexpr size_t kRunIdBytes = 40;
// A process that connects and asks nothing is dropped when so many others have
// come.
constexpr size_t kMostAskers = 512;
constexpr std::chrono::milliseconds kDeafTime{1000};

pid_t process_of_peer(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
  return peer.pid;
}

bool has_come(const std::vector<pollfd>& entries, int fd) {
  return std::ranges::any_of(entries, [&](const pollfd& entry) {
    return entry.fd == fd && entry.revents != 0;
  });
}

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
  static const std::string digits = [] {
    uint32_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) {
      throw_errno("getrandom for the name of a socket");
    }
    char text[9];
    std::snprintf(text, sizeof text, "%08x", random);
    return std::string(text);
  }();
  return digits;
}

AgentSocket::AgentSocket(const std::string& run_id)
    : name_(std::string(kPrefix) + std::to_string(geteuid()) + "/" +
            std::to_string(getpid()) + "/" + mark() + "/" + name_part(run_id)),
      listener_(listen_at(name_)) {}

void AgentSocket::add_poll_entries(std::vector<pollfd>& entries) const {
  if (!deaf_until_ || deaf_until_->expired()) {
    entries.push_back({listener_.get(), POLLIN, 0});
  }
  for (const auto& asker : askers_) {
    entries.push_back({asker.get(), POLLIN, 0});
  }
}

std::optional<std::chrono::milliseconds> AgentSocket::most_wait() const {
  if (!deaf_until_ || deaf_until_->expired()) return std::nullopt;
  return deaf_until_->remaining();
}

void AgentSocket::handle_poll_entries(const std::vector<pollfd>& entries,
                                      const Respond& respond) {
  std::erase_if(askers_, [&](const FileDescriptor& asker) {
    return has_come(entries, asker.get()) && serve(asker, respond);
  });
  if (has_come(entries, listener_.get())) accept_new(respond);
}

bool AgentSocket::serve(const FileDescriptor& asker, const Respond& respond) {
  try {
    std::array<std::byte, kQuestionBytes> bytes;
    const Packet packet = receive_packet(asker, bytes);
    if (packet.state == Packet::State::none) return false;
    if (packet.state == Packet::State::received &&
        packet.bytes <= bytes.size()) {
      const std::string question(reinterpret_cast<const char*>(bytes.data()),
                                 packet.bytes);
      const Answer answer = respond(question, process_of_peer(asker));
      send_packet(asker, std::as_bytes(std::span(answer.json)),
                  answer.descriptor);
    }
  } catch (const std::system_error&) {
    // The asker has gone.
  }
  return true;
}

void AgentSocket::accept_new(const Respond& respond) {
  try {
    while (FileDescriptor asker = accept_from(listener_)) {
      const uid_t user = user_of_peer(asker);
      if ((user != geteuid() && user != 0) || serve(asker, respond)) continue;
      if (askers_.size() == kMostAskers) askers_.erase(askers_.begin());
      askers_.push_back(std::move(asker));
    }
    deaf_until_.reset();
  } catch (const std::system_error&) {
    // No descriptor is left. New connections wait in the
    // listener's queue.
    deaf_until_ = Deadline::after(kDeafTime);
  }
}

}  // namespace lockstep::internal
