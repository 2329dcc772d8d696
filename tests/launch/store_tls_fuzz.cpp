// A target of libFuzzer: what a member says to the agents' store inside TLS. A
// connection that knows the secret says hello and then the input. The store
// must answer or close it, and go on.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/launch/nodes/store/store_server.h"

namespace lockstep::internal {
namespace {

const std::string kSecret = "the secret of this job";
const std::string kName = "lockstep-store-fuzz/" + std::to_string(getpid());

void require(bool held) {
  if (!held) std::abort();
}

// Never ends, as its thread serves the connection of the next input.
const StoreServer& server() {
  static const StoreServer& store = [] {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    return std::ref(
        *std::make_unique<StoreServer>(listen_at(kName, SocketKind::stream),
                                       FileDescriptor(ends[0]), kSecret)
             .release());
  }();
  return store;
}

void say(const std::string& input) {
  static const TlsSettings settings(TlsSettings::Side::client, kSecret);
  using Progress = StoreChannel::Progress;
  StoreChannel member(connect_to(kName, SocketKind::stream), &settings);
  std::string output = encode(Request{.number = kStoreVersion}) + input;
  const Deadline deadline = Deadline::after(std::chrono::seconds(20));
  bool has_said = false;
  for (Progress progress = Progress::done; progress != Progress::closed;) {
    require(!deadline.expired());
    progress = member.handshake();
    if (progress == Progress::done && !has_said) {
      progress = member.write(output);
      has_said = progress == Progress::done;
      if (has_said) ::shutdown(member.fd(), SHUT_WR);
    }
    std::string replies;
    if (progress == Progress::done) progress = member.read(replies, 4096);
    if (progress == Progress::done) continue;
    pollfd entry{member.fd(), POLLIN, 0};
    if (progress == Progress::wants_output) entry.events = POLLOUT;
    ::poll(&entry, 1, 100);
  }
}

}  // namespace
}  // namespace lockstep::internal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lockstep::internal::server();
  lockstep::internal::say({reinterpret_cast<const char*>(data), size});
  return 0;
}
