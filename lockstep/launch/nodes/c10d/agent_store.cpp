// The module of `lockstep run` for several nodes: the only source of launch
// that includes LibTorch. store_module.cpp loads it when it is needed.
#include "lockstep/launch/nodes/agent_store.h"

#include <cstdlib>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace lockstep::internal {
namespace {

// Returns the first line of the message: c10 appends a stack trace.
std::string brief(const std::exception& error) {
  std::string what = error.what();
  if (const auto* traced = dynamic_cast<const c10::Error*>(&error)) {
    what = traced->what_without_backtrace();
  }
  return what.substr(0, what.find('\n'));
}

template <typename Operation>
auto guarded(Operation operation) -> decltype(operation()) {
  try {
    return operation();
  } catch (const c10::DistNetworkError&) {
    // c10d's own text is about sockets, and guesses.
    throw AgentStoreError("the connection is closed");
  } catch (const std::exception& error) {
    throw AgentStoreError(brief(error));
  }
}

// c10d's client prints a stack trace for each lost connection. We get every
// failure as an exception too, and the user gets one line.
void silence_log() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
    FLAGS_caffe2_log_level = 3;  // fatal
  }
}

c10::intrusive_ptr<c10d::Store> open(const AgentStoreAddress& address) {
  silence_log();
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.isServer = address.listen_fd >= 0;
  if (options.isServer) options.masterListenFd = address.listen_fd;
  options.waitWorkers = false;
  options.timeout = address.timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(address.host, options);
  } catch (const std::exception& error) {
    throw AgentStoreError(brief(error));
  }
}

class C10dAgentStore : public AgentStore {
 public:
  explicit C10dAgentStore(const AgentStoreAddress& address)
      : store_(open(address)) {}

  void set(const std::string& key, const std::string& value) override {
    guarded([&] { store_->set(key, value); });
  }

  std::optional<std::string> get(const std::string& key) override {
    // TCPStore's get() waits until the key is set.
    if (!guarded([&] { return store_->check({key}); })) return std::nullopt;
    auto value = guarded([&] { return store_->get_to_str(key); });
    if (value.empty()) return std::nullopt;
    return value;
  }

  bool check(const std::string& key) override { return get(key).has_value(); }

  int64_t add(const std::string& key, int64_t amount) override {
    return guarded([&] { return store_->add(key, amount); });
  }

  void remove(const std::string& key) override {
    // The key is emptied, not deleted: an agent that has just checked a key
    // would wait in get() if it were deleted meanwhile. compareSet() treats an
    // empty value like none.
    guarded([&] { store_->set(key, std::string()); });
  }

  std::string set_if_absent(const std::string& key,
                            const std::string& value) override {
    return guarded(
        [&] { return store_->compareSet(key, std::string(), value); });
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace
}  // namespace lockstep::internal

extern "C" lockstep::internal::AgentStore* lockstep_open_agent_store(
    const lockstep::internal::AgentStoreAddress& address) {
  return std::make_unique<lockstep::internal::C10dAgentStore>(address)
      .release();
}
