#include "lockstep/comm/gloo/create.h"

#include <gloo/context.h>
#include <gloo/transport/pair.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/base/signals.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/worker/own_address.h"
#include "lockstep/worker/rank_environment.h"

namespace gloo::transport::tcp {

// A part of Gloo's class, whose own header needs one that Debian's package has
// not (gloo/common/memory.h). The function is that which Gloo itself calls for
// all pairs when a wait has timed out.
class Pair : public ::gloo::transport::Pair {
 public:
  ~Pair() override;
  std::exception_ptr signalExceptionExternal(const std::string& message);
};

}  // namespace gloo::transport::tcp

namespace lockstep::internal::gloo {
namespace {

// How far the ranks of a group are with connecting, in the group's store. Keys:
// "lockstep/connects/R" is set before rank R begins, "lockstep/connected/R"
// as soon as it has connected to all others. Python's ranks write neither.
class Connecting {
 public:
  static constexpr std::chrono::milliseconds kLookEvery{20};

  Connecting(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  void begins() const { set(key("connects", rank_)); }
  void has_ended() const { set(key("connected", rank_)); }
  // Throws if the store knows that this will not come about.
  void look() const { store_->check({key("connected", rank_)}); }

  // Blocks until every rank that has begun has ended.
  void await_all(const Deadline& deadline) const {
    std::vector<std::string> all;  // one question, if all is well
    for (int rank = 0; rank < size_; ++rank) {
      all.push_back(key("connected", rank));
    }
    if (store_->check(all)) return;
    for (int rank = 0; rank < size_; ++rank) {
      if (!store_->check({key("connects", rank)})) continue;
      poll_store(deadline,
                 [&] { return store_->check({key("connected", rank)}); });
    }
  }

 private:
  static std::string key(const char* what, int rank) {
    return c10::str("lockstep/", what, "/", rank);
  }
  void set(const std::string& key) const {
    store_->set(key, std::vector<uint8_t>{1});
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
};

// Ends a work that Gloo has not ended.
class EndedWork : public c10d::Work {
 public:
  static void end(c10d::Work& work, const std::exception_ptr& reason) {
    (work.*&EndedWork::finish)(reason);
  }
};

// A rank that leaves because of an error must not keep its peers waiting, so
// abort() closes its connections: operations in which peers wait for this rank
// then fail at once. So do this rank's own operations that wait for a peer
// (closeConnections() would not wake them), so that the destructor, which waits
// for queued operations, returns at once.
//
// Gloo's constructor returns once this rank sees all its connections made. If
// this rank closed them then, a peer that has not looked at its end yet would
// fail with "Connection closed by peer".
class Gloo final : public c10d::ProcessGroupGloo, public BackendTraits {
 public:
  Gloo(const BackendRequest& request, c10::intrusive_ptr<Options> options)
      : ProcessGroupGloo(request.store, request.rank, request.size,
                         std::move(options)),
        connecting_(request.store, request.rank, request.size) {
    connecting_.has_ended();
    // It was that of connecting.
    getOptions()->timeout = request.timeout;
    for (auto& context : contexts_) context->setTimeout(request.timeout);
  }

  bool failure_needs_abort() const override { return true; }

  void abort() override {
    // Context::size and its like lie elsewhere in LibTorch's Gloo than in the
    // headers.
    for (auto& context : contexts_) {
      for (int peer = 0; peer < getSize(); ++peer) {
        auto* pair = peer == getRank()
                         ? nullptr
                         : dynamic_cast<Pair*>(context->getPair(peer).get());
        if (pair != nullptr) {
          pair->signalExceptionExternal("the group was aborted on this rank");
        }
      }
      context->closeConnections();
    }
    if (!has_works() || ends_works_.exchange(true)) return;
    auto self = c10::intrusive_ptr<Gloo>::unsafe_reclaim_from_nonowning(this);
    try {
      quiet_thread([self = std::move(self)] { self->end_works(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no thread now. The connections are closed, so most
      // works end by themselves.
      ends_works_ = false;
    }
  }

  void await_peers(const Deadline& deadline) const override {
    try {
      connecting_.await_all(deadline);
    } catch (const c10::Error&) {
      // A rank is gone, or the store with the rank that hosted it.
    }
  }

 private:
  using Pair = ::gloo::transport::tcp::Pair;
  static constexpr std::chrono::milliseconds kEndSoon{200};

  bool has_works() {
    const std::lock_guard lock(workMutex_);
    return !workQueue_.empty() ||
           std::ranges::any_of(workInProgress_,
                               [](const auto& work) { return bool(work); });
  }

  // When a connection breaks, Gloo leaves out one kind of wait: that for a send
  // of which the socket did not take all bytes (signalException() of its Pair
  // does not tell the unbound buffers in tx_). Such a work ends only when its
  // time is over. So this ends what has not ended soon, and returns when Gloo's
  // own threads are done, for which the destructor would wait.
  void end_works() {
    const auto reason = std::make_exception_ptr(
        c10::DistBackendError("the group was aborted on this rank"));
    for (const auto soon = Deadline::after(kEndSoon); has_works();
         std::this_thread::sleep_for(Connecting::kLookEvery)) {
      if (!soon.expired()) continue;
      const std::lock_guard lock(workMutex_);
      for (const auto& work : workInProgress_) {
        if (work && !work->isCompleted()) EndedWork::end(*work, reason);
      }
    }
  }

  const Connecting connecting_;
  std::atomic<bool> ends_works_ = false;
};

// Whether the environment says that all ranks are on this host.
bool on_one_host(int size) {
  if (size == 1) return true;
  auto local = get_rank_env("LOCAL_WORLD_SIZE");
  if (local && local == get_rank_env("WORLD_SIZE")) return true;
  return is_loopback(get_rank_env("MASTER_ADDR").value_or(""));
}

std::shared_ptr<::gloo::transport::Device> choose_device(int size) {
  const auto own = own_address(on_one_host(size));
  if (!own.interface.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(own.interface);
  }
  if (!own.address.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForHostname(own.address);
  }
  // Gloo's default, the address of the host's own name, is often loopback.
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

// Gloo's constructor cannot be interrupted: it waits for a rank that has died
// meanwhile until its time is over. So a thread calls it, which is left behind
// if the store says that a rank is gone. Gloo's own threads begin with the
// signal mask of that thread, and take the signal that asks for their stacks.
c10::intrusive_ptr<Gloo> connect(
    const BackendRequest& request,
    const c10::intrusive_ptr<c10d::ProcessGroupGloo::Options>& options) {
  std::packaged_task<c10::intrusive_ptr<Gloo>()> call([request, options] {
    return c10::make_intrusive<Gloo>(request, options);
  });
  auto made = call.get_future();
  const Connecting connecting(request.store, request.rank, request.size);
  connecting.begins();
  std::thread(std::move(call)).detach();
  while (made.wait_for(Connecting::kLookEvery) != std::future_status::ready) {
    connecting.look();
  }
  return made.get();
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  auto options =
      c10d::ProcessGroupGloo::Options::create(request.time_to_meet());
  options->group_name = request.group_name;
  options->global_ranks_in_group.assign(request.global_ranks.begin(),
                                        request.global_ranks.end());
  options->devices.push_back(choose_device(request.size));
  return connect(request, options);
}

}  // namespace lockstep::internal::gloo
