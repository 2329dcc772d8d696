// The module of `lockstep run` for several nodes that meet without LibTorch. It
// links OpenSSL, which a launch on one node does not need.
#include <openssl/evp.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <utility>

#include "lockstep/base/endpoint.h"
#include "lockstep/launch/nodes/agent_store.h"
#include "lockstep/launch/nodes/job_secret.h"
#include "lockstep/launch/nodes/store/store_client.h"
#include "lockstep/launch/nodes/store/store_server.h"

namespace lockstep::internal {
namespace {

std::pair<FileDescriptor, FileDescriptor> socket_pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_errno("a socket pair for the agents' store");
  }
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

// The connection of the agent that hosts the store, with the store.
class HostedStore : public StoreClient {
 public:
  HostedStore(std::unique_ptr<StoreServer> server, FileDescriptor socket,
              const Deadline& deadline)
      : StoreClient(std::move(socket), std::nullopt, deadline),
        server_(std::move(server)) {}

  std::set<std::string> agents() override { return server_->agents(); }
  std::unique_ptr<StoreLine> open_line(const Deadline& deadline) override {
    auto [own, others] = socket_pair();
    server_->serve_too(std::move(others));
    return make_line(std::move(own), std::nullopt, deadline);
  }

 private:
  std::unique_ptr<StoreServer> server_;
};

std::unique_ptr<AgentStore> host(const AgentStoreAddress& address,
                                 const Deadline& deadline) {
  FileDescriptor listener(address.listen_fd);
  auto [own, others] = socket_pair();
  auto server = std::make_unique<StoreServer>(
      std::move(listener), std::move(others), address.secret);
  return std::make_unique<HostedStore>(std::move(server), std::move(own),
                                       deadline);
}

std::unique_ptr<AgentStore> connect(const AgentStoreAddress& address,
                                    const Deadline& deadline) {
  const auto where = resolve({address.host, address.port}).front();
  FileDescriptor socket = connect_to(where, deadline.remaining());
  if (!socket) throw AgentStoreError("no process listens there");
  return std::make_unique<StoreClient>(std::move(socket), address.secret,
                                       deadline, address.rejoining);
}

}  // namespace
}  // namespace lockstep::internal

extern "C" lockstep::internal::AgentStore* lockstep_open_agent_store(
    const lockstep::internal::AgentStoreAddress& address) {
  using namespace lockstep::internal;
  const Deadline deadline = Deadline::after(address.timeout);
  return (address.listen_fd >= 0 ? host(address, deadline)
                                 : connect(address, deadline))
      .release();
}

extern "C" void lockstep_derive_metrics_token(const std::string& secret,
                                              std::string& token) {
  const std::string text = "lockstep metrics " + secret;
  std::array<unsigned char, 32> hash;
  if (EVP_Digest(text.data(), text.size(), hash.data(), nullptr, EVP_sha256(),
                 nullptr) != 1) {
    throw std::runtime_error("OpenSSL refuses SHA-256");
  }
  constexpr const char* kDigits = "0123456789abcdef";
  for (const unsigned char byte : hash) {
    token += kDigits[byte >> 4];
    token += kDigits[byte & 15];
  }
}
