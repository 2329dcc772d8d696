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
#include "lockstep/comm/shm/protocol/handshake.h"

namespace lockstep::internal {
namespace {

// A rank that has not joined yet is looked for in the store this often.
constexpr std::chrono::milliseconds kBetweenQuestions{100};

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

// Whether a process has bound `name`. Also true if that cannot be asked: this
// process may have no descriptor left.
bool has_owner(const std::string& name) {
  const auto socket = datagram_socket();
  if (!socket) return true;
  return with_address(name,
                      [&](const sockaddr* address, socklen_t size) {
                        return ::connect(socket.get(), address, size);
                      }) == 0 ||
         errno != ECONNREFUSED;
}

// Returns how the owner of a name has said that it left; nothing if its process
// ended without that, or has ended since.
std::optional<LifeSigns::End> end_said_at(const std::string& name) {
  if (has_owner(name + kLeft)) return LifeSigns::End::left;
  if (has_owner(name + kFailed)) return LifeSigns::End::failed;
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

std::optional<std::string> LifeSigns::said_by(int rank) {
  if (store_failed_) return std::nullopt;
  try {
    if (!store_->check({key(rank)})) return std::nullopt;
    return store_->get_to_str(key(rank));
  } catch (const c10::Error&) {
    // The store is gone. It is not asked again, because LibTorch prints a
    // warning each time.
    store_failed_ = true;
    return std::nullopt;
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
  std::vector<std::string> keys;
  for (const int rank : everyone()) keys.push_back(key(rank));
  try {
    if (!store_->check(keys)) return;  // some ranks are Python's
    has_all_ = true;
    const auto all = store_->multiGet(keys);
    for (const int rank : everyone()) {
      take_in(peers_[rank], {all[rank].begin(), all[rank].end()});
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
  const auto said = said_by(rank);
  if (said == "left") return End::left;
  return said == "failed" ? End::failed : End::died;
}

void LifeSigns::learn(Peer& peer, int rank, Clock::time_point now) {
  if (peer.end || peer.unknowable) return;
  if (peer.socket.empty()) {
    if (now - peer.asked < kBetweenQuestions) return;
    peer.asked = now;
    if (const auto said = said_by(rank)) take_in(peer, *said);
    if (peer.socket.empty()) return;
  }
  if (has_owner(peer.socket)) return;
  if (!peer.missed) {
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

std::vector<LifeSigns::Gone> LifeSigns::gone() { return gone(everyone()); }

std::vector<LifeSigns::Gone> LifeSigns::gone_for_good(
    const std::vector<int>& ranks) {
  constexpr std::chrono::milliseconds kPause{5};
  while (true) {
    auto all = gone(ranks);
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
      if (!store_failed_) {
        store_->set(key(rank_), end == End::left ? "left" : "failed");
      }
    } catch (const c10::Error&) {
      store_failed_ = true;
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
