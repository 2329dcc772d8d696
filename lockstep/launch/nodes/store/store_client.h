#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/nodes/agent_store.h"
#include "lockstep/launch/nodes/store/store_channel.h"
#include "lockstep/launch/nodes/store/store_message.h"

namespace lockstep::internal {

// An agent's connection to the StoreServer of a job.
class StoreClient : public AgentStore {
 public:
  // `socket` is connected. Shakes hands until `deadline`. Without a `secret`
  // the connection is plain. With `rejoining` it is given up if the other host
  // acknowledges nothing for 2.5 s, and replaced by another one. Throws
  // AgentStoreRefused if the host of the store does not know the secret,
  // AgentStoreError if it does not answer as a store.
  StoreClient(FileDescriptor socket, const std::optional<std::string>& secret,
              const Deadline& deadline,
              std::optional<Rejoining> rejoining = std::nullopt);

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key) override;
  bool check(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  void remove(const std::string& key) override;
  std::string set_if_absent(const std::string& key,
                            const std::string& value) override;
  void await_change(const std::vector<std::string>& keys,
                    std::chrono::milliseconds allowed, int wake_fd) override;
  std::unique_ptr<StoreLine> open_line(const Deadline& deadline) override;
  bool knows_agents() const override { return true; }

 protected:
  // Returns the line over `socket`, as for the constructor.
  static std::unique_ptr<StoreLine> make_line(
      FileDescriptor socket, const std::optional<std::string>& secret,
      const Deadline& deadline);

 private:
  class Line;

  // Shakes hands and says hello. Returns, with a session, whether the last
  // request was done, so that its reply follows.
  bool begin(const Deadline& deadline);
  // Connects to the host again and again, until begin_on(socket, deadline) ends
  // without AgentStoreError, and returns what that returns. Calls failed()
  // after each try that was not refused. Throws AgentStoreError once over() is
  // true or the store's process has ended.
  template <class Begin>
  auto reach_host(const std::function<bool()>& over,
                  const std::function<void(const std::string& why)>& failed,
                  const Begin& begin_on);
  // Connects again, in the same session. Returns what begin() does. Throws
  // AgentStoreError if that is over.
  bool rejoin();
  void shake_hands(const Deadline& deadline);
  Reply exchange(const Request& request, const Deadline& deadline);
  Reply await_reply(const Deadline& deadline);
  Reply call(const Request& request, const Deadline& deadline = Deadline::after(
                                         std::chrono::milliseconds::max()));
  void send(const Request& request, const Deadline& deadline);
  // Returns nothing if no whole reply has come yet.
  std::optional<Reply> take_reply();
  // Waits until the socket is ready for `events`. Throws AgentStoreError after
  // the deadline.
  void await_socket(short events, const Deadline& deadline);

  const std::optional<std::string> secret_;
  const std::optional<Rejoining> rejoining_;
  std::optional<SocketAddress> host_{};  // of the store; if it may rejoin
  int64_t calls_ = 0;                    // requests that the session counts
  std::unique_ptr<TlsSettings> tls_;
  StoreChannel channel_;
  MessageBuffer input_{};
  // The event that the channel needs before more can be read.
  short wanted_events_ = 0;
  // Whether the reply to await_change() is still to come. It comes before that
  // to the next request.
  bool is_awaiting_ = false;
  int64_t last_change_ = 0;  // that await_change() has returned for
};

}  // namespace lockstep::internal
