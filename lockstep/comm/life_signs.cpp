#include "lockstep/comm/life_signs.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <numeric>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/base/number_list.h"
#include "lockstep/base/signals.h"
#include "lockstep/comm/shm/protocol/handshake.h"

namespace lockstep::internal {
namespace {

// A rank that has not joined yet is looked for in the store this often.
constexpr std::chrono::milliseconds kBetweenQuestions{100};
// How long the answer of the store is awaited. Clients of LibTorch's stores
// wait for ever, and rank 0, which hosts the store, may be stopped.
constexpr std::chrono::milliseconds kAnswer{1'000};

// Suffixes of the name of a rank that has left.
constexpr const char* kLeft = "-left";
constexpr const char* kFailed = "-failed";

FileDescriptor datagram_socket() {
  return FileDescriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
}

// Calls bind() or connect() with the abstract name.
template <typename Call>
int with_address(const std::string& name, Call call) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto length = std::min(name.size(), sizeof(address.sun_path) - 1);
  name.copy(address.sun_path + 1, length);  // after a zero byte
  return call(
      reinterpret_cast<const sockaddr*>(&address),
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length));
}

// Whether a process has bound `name`; nothing if that cannot be asked, because
// this process has no descriptor left.
std::optional<bool> has_owner(const std::string& name) {
  const auto socket = datagram_socket();
  if (!socket) return std::nullopt;
  return with_address(name,
                      [&](const sockaddr* address, socklen_t size) {
                        return ::connect(socket.get(), address, size);
                      }) == 0 ||
         errno != ECONNREFUSED;
}

// Returns how the owner of a name has said that it left; nothing if its process
// ended without that, or has ended since, or if that cannot be asked.
std::optional<LifeSigns::End> end_said_at(const std::string& name) {
  if (has_owner(name + kLeft) == true) return LifeSigns::End::left;
  if (has_owner(name + kFailed) == true) return LifeSigns::End::failed;
  return std::nullopt;
}

FileDescriptor named_socket(const std::string& name) {
  auto socket = datagram_socket();
  if (!socket ||
      with_address(name, [&](const sockaddr* address, socklen_t length) {
        return ::bind(socket.get(), address, length);
      }) != 0) {
    throw_errno("making a socket that shows that this rank lives");
  }
  return socket;
}

std::string_view words_of(LifeSigns::End end) {
  switch (end) {
    case LifeSigns::End::left:
      return EndingWords::left;
    case LifeSigns::End::failed:
      return EndingWords::left_in_error;
    default:
      return EndingWords::died;
  }
}

std::string identity_of_host() {
  try {
    return shm::host_identity();
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace

LifeSigns::LifeSigns(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                     bool rank_zero_has_store, std::chrono::milliseconds grace)
    : store_(std::move(store)),
      rank_(rank),
      rank_zero_has_store_(rank_zero_has_store),
      grace_(grace),
      identity_(identity_of_host()),
      peers_(size) {
  if (identity_.empty() || size == 1) return;
  name_ = "lockstep-alive-" + random_digits(32);
  socket_ = named_socket(name_);
  store_->set(key(rank_), "here " + identity_ + " " + name_);
}

std::string LifeSigns::key(int rank) const {
  return "alive/" + std::to_string(rank);
}

std::vector<int> LifeSigns::everyone() const {
  std::vector<int> ranks(peers_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

bool LifeSigns::is_answered(std::chrono::milliseconds patience) const {
  return !call_.valid() ||
         call_.wait_for(patience) == std::future_status::ready;
}

bool LifeSigns::call_store(std::function<void(c10d::Store&)> call) {
  if (store_failed_) return false;
  try {
    std::packaged_task<void()> task(
        [store = store_, call = std::move(call)] { call(*store); });
    call_ = task.get_future();
    quiet_thread(std::move(task)).detach();
    if (!is_answered(kAnswer)) return false;
    call_.get();
    return true;
  } catch (const c10::Error&) {
    // The store is gone. It is not asked again, because LibTorch prints a
    // warning each time.
    store_failed_ = true;
  } catch (const std::system_error&) {
    // The system gives no thread now, or a FileStore has no descriptor.
  }
  return false;
}

std::map<int, std::string> LifeSigns::said_by(const std::vector<int>& ranks) {
  // A client makes one call at a time, so another one would only wait, too.
  if (ranks.empty() || !is_answered({})) return {};
  take_late_answer();
  std::map<int, std::string> keys;
  for (const int rank : ranks) keys[rank] = key(rank);
  answer_ = std::make_shared<std::map<int, std::string>>();
  const auto ask = [said = answer_, keys](c10d::Store& store) {
    for (const auto& [rank, key] : keys) {
      if (store.check({key})) (*said)[rank] = store.get_to_str(key);
    }
  };
  if (!call_store(ask)) return {};
  return *std::exchange(answer_, nullptr);
}

// Takes in the answer to a question that came after its second.
void LifeSigns::take_late_answer() {
  if (!answer_ || !is_answered({})) return;
  for (const auto& [rank, said] : *std::exchange(answer_, nullptr)) {
    take_in(peers_[rank], said);
  }
}

void LifeSigns::take_in(Peer& peer, const std::string& said) {
  std::istringstream words(said);
  std::string word;
  std::string identity;
  std::string socket;
  words >> word >> identity >> socket;
  if (word == "left" || word == "failed") {
    peer.end = word == "left" ? End::left : End::failed;
  } else if (word == "here" && identity == identity_) {
    peer.socket = socket;
  } else {
    peer.unknowable = true;
  }
}

void LifeSigns::learn_all() {
  std::lock_guard lock(mutex_);
  has_all_ = peers_.size() == 1;
  if (identity_.empty() || has_all_) return;
  auto ranks = everyone();
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(key(rank));
  try {
    has_all_ = store_->check(keys);
    if (!has_all_) {  // some ranks are Python's
      std::erase_if(ranks,
                    [&](int rank) { return !store_->check({keys[rank]}); });
      keys.clear();
      for (const int rank : ranks) keys.push_back(key(rank));
    }
    const auto all = store_->multiGet(keys);
    for (size_t i = 0; i < ranks.size(); ++i) {
      take_in(peers_[ranks[i]], {all[i].begin(), all[i].end()});
    }
  } catch (const c10::Error&) {
    store_failed_ = true;
  }
}

bool LifeSigns::has_all() {
  std::lock_guard lock(mutex_);
  return has_all_;
}

// Returns how a peer ended whose socket has no owner any more.
std::optional<LifeSigns::End> LifeSigns::end_of(const Peer& peer, int rank) {
  if (const auto said = end_said_at(peer.socket)) return said;
  if (rank == 0 && rank_zero_has_store_) {
    store_failed_ = true;
    return End::died;
  }
  // The peer died, or it left and its process has ended since.
  const auto said = said_by({rank})[rank];
  if (said == "left") return End::left;
  return said == "failed" ? End::failed : End::died;
}

// Asks the store where to look for those of `ranks` that are not known yet.
void LifeSigns::learn_names(const std::vector<int>& ranks,
                            Clock::time_point now) {
  take_late_answer();
  std::vector<int> unknown;
  for (const int rank : ranks) {
    auto& peer = peers_.at(rank);
    if (rank == rank_ || peer.end || peer.unknowable || !peer.socket.empty() ||
        now - peer.asked < kBetweenQuestions) {
      continue;
    }
    peer.asked = now;
    unknown.push_back(rank);
  }
  for (const auto& [rank, said] : said_by(unknown)) take_in(peers_[rank], said);
}

void LifeSigns::learn(Peer& peer, int rank, Clock::time_point now) {
  if (peer.end || peer.unknowable || peer.socket.empty()) return;
  if (!peer.missed) {
    if (has_owner(peer.socket) != false) return;
    peer.missed = now;
    // Within grace_ the process may end, and the store with rank 0. Then only
    // what is seen now tells that the peer had left.
    peer.end = end_said_at(peer.socket);
  }
  if (!peer.end && now - *peer.missed >= grace_) {
    peer.end = end_of(peer, rank);
  }
}

std::vector<LifeSigns::Gone> LifeSigns::gone(const std::vector<int>& ranks) {
  std::vector<Gone> all;
  if (made_in_.is_foreign()) return all;
  std::lock_guard lock(mutex_);
  if (identity_.empty()) return all;
  const auto now = Clock::now();
  learn_names(ranks, now);
  for (const int rank : ranks) {
    if (rank == rank_) continue;
    auto& peer = peers_.at(rank);
    learn(peer, rank, now);
    if (!peer.end || (peer.missed && now - *peer.missed < grace_)) continue;
    all.push_back(
        {.rank = rank,
         .end = *peer.end,
         .words = rank == 0 && rank_zero_has_store_ && *peer.end == End::died
                      ? "died or left, and the store with it"
                      : std::string(words_of(*peer.end))});
  }
  return all;
}

bool LifeSigns::misses_any(const std::vector<int>& ranks) {
  if (made_in_.is_foreign()) return false;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && std::ranges::any_of(ranks, [&](int rank) {
           const auto& peer = peers_.at(rank);
           return rank != rank_ &&
                  (peer.end ||
                   (!peer.socket.empty() && has_owner(peer.socket) == false));
         });
}

std::vector<LifeSigns::Gone> LifeSigns::gone() { return gone(everyone()); }

std::vector<LifeSigns::Gone> LifeSigns::gone_for_good(
    const std::vector<int>& ranks) {
  constexpr std::chrono::milliseconds kPause{5};
  while (true) {
    auto all = gone(ranks);
    if (made_in_.is_foreign()) return all;
    {
      std::lock_guard lock(mutex_);
      if (std::ranges::none_of(ranks, [&](int rank) {
            return peers_.at(rank).missed &&
                   std::ranges::find(all, rank, &Gone::rank) == all.end();
          })) {
        return all;
      }
    }
    std::this_thread::sleep_for(kPause);
  }
}

std::vector<LifeSigns::Gone> LifeSigns::gone_for_good() {
  return gone_for_good(everyone());
}

void LifeSigns::leave(End end) {
  if (made_in_.is_foreign()) return;
  std::lock_guard lock(mutex_);
  if (!socket_) return;
  if (end != End::died) {
    try {
      ended_socket_ =
          named_socket(name_ + (end == End::left ? kLeft : kFailed));
      // Peers may look after this process has ended, so the store says it, too.
      if (is_answered(kAnswer)) {
        call_store(
            [key = key(rank_), word = end == End::left ? "left" : "failed"](
                c10d::Store& store) { store.set(key, word); });
      }
    } catch (const std::system_error&) {
      // The peers see a death then.
    }
  }
  socket_.reset();
}

std::string words_of(const std::vector<LifeSigns::Gone>& gone) {
  std::vector<RanksOfText> all;
  for (const auto& one : gone) add_text(all, one.rank, one.words);
  return name_texts(all, " ");
}

}  // namespace lockstep::internal
