#include "lockstep/comm/shm/protocol/handshake.h"

#include <poll.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/comm/shm/protocol/handshake_note.h"
#include "lockstep/comm/shm/protocol/layout.h"

namespace lockstep::internal::shm {
namespace {

using std::chrono::milliseconds;

// How long the store is asked for one key while sockets wait, and how long a
// stranger may stay silent. A stranger is a connection that has not said hello.
constexpr milliseconds kStorePortion{20};
constexpr milliseconds kSilence{2000};
constexpr size_t kMaxStrangers = 256;
// After rank 0 has hung up: how long its reason may take to reach the store.
constexpr milliseconds kLastWords{200};

void write_cores(std::array<uint64_t, 16>& cores) {
  // sched_getaffinity() fails if there is less room than the kernel has cores.
  std::array<uint64_t, 256> all{};
  if (::sched_getaffinity(0, sizeof all,
                          reinterpret_cast<cpu_set_t*>(all.data())) != 0) {
    throw_errno("sched_getaffinity");
  }
  std::copy_n(all.begin(), cores.size(), cores.begin());
}

std::string key_of(int rank) { return "shm/" + std::to_string(rank); }

void check_meeting(const Meeting& meeting) {
  if (meeting.size < 1 || meeting.size > kMaxRanks || meeting.rank < 0 ||
      meeting.rank >= meeting.size) {
    throw std::invalid_argument(
        "rank " + std::to_string(meeting.rank) + " of " +
        std::to_string(meeting.size) +
        " cannot share memory: ranks count from 0, and there are 1 to " +
        std::to_string(kMaxRanks));
  }
  if (!meeting.global_ranks.empty() &&
      meeting.global_ranks.size() != static_cast<size_t>(meeting.size)) {
    throw std::invalid_argument(std::to_string(meeting.global_ranks.size()) +
                                " names were given for " +
                                std::to_string(meeting.size) + " ranks");
  }
}

// One rank's part in the meeting. All of its waits are in run().
class Handshake {
 public:
  Handshake(const Exchange& exchange, const Meeting& meeting)
      : exchange_(exchange),
        meeting_(meeting),
        rank_(meeting.rank),
        deadline_(Deadline::after(meeting.timeout)),
        peers_(meeting.size) {}

  Membership run();

 private:
  struct Peer {
    std::string name{};  // of its socket; empty if not known yet
    FileDescriptor socket{};
    uint32_t pid = 0;
    bool met = false;     // it has said hello
    bool mapped = false;  // it has the memory; only rank 0 knows this
    bool gone = false;    // it hung up; rank 0 tells why
  };
  struct Stranger {
    FileDescriptor socket;
    Deadline patience;
  };

  void take_part();
  void prepare();
  void make_segment();
  void take_segment(const Note& note, FileDescriptor descriptor);
  void publish();
  bool read_a_name();
  std::optional<std::string> get(const std::string& key);
  void learn(int rank, const std::string& value);
  bool connect_to_peers();
  void look_at_sockets(milliseconds patience);
  void accept_strangers();
  bool hear_stranger(Stranger& stranger);
  void hear_peer(int rank);
  void greeted(int rank, const Note& note);
  void report();

  Note note(Kind kind) const;
  void send(int rank, const Note& note, int descriptor = -1);
  void tell(const Failure& failure) noexcept;
  void lost(int rank);
  Failure died(int rank) const;
  Failure late() const;
  std::string name(int rank) const;

  const Exchange& exchange_;
  Meeting meeting_;
  const int rank_;
  Deadline deadline_;
  std::string identity_{};
  std::string own_value_{};
  std::string secret_{};
  FileDescriptor listener_{};
  std::vector<Peer> peers_;
  std::vector<Stranger> strangers_{};
  std::shared_ptr<SharedMemory> memory_{};
  int next_name_ = 0;
  bool published_ = false;
  bool reported_ = false;
  bool done_ = false;
};

Membership Handshake::run() {
  std::optional<Failure> failure;
  try {
    take_part();
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::invalid_argument& error) {
    failure = Failure{Kind::invalid, name(rank_) + ": " + error.what()};
  } catch (const std::exception& error) {
    failure = Failure{Kind::unavailable, name(rank_) + ": " + error.what()};
  }
  if (failure) {
    tell(*failure);
    throw_error(*failure);
  }
  memory_->close_descriptor();  // all peers have it
  std::vector<FileDescriptor> sockets;
  for (auto& peer : peers_) sockets.push_back(std::move(peer.socket));
  return {.meeting = meeting_,
          .segment = memory_,
          .links = std::make_shared<PeerLinks>(std::move(sockets))};
}

void Handshake::take_part() {
  prepare();
  while (!done_) {
    if (deadline_.expired()) throw late();
    const bool reading = read_a_name();
    const bool retry = connect_to_peers();
    const auto patience =
        reading ? milliseconds(0) : milliseconds(retry ? 2 : 500);
    look_at_sockets(std::min(patience, deadline_.remaining()));
    report();
  }
}

void Handshake::prepare() {
  identity_ = host_identity();
  if (rank_ == 0) make_segment();
  if (meeting_.size == 1) {
    done_ = true;
    return;
  }
  const auto socket_name = "lockstep-" + random_digits(32);
  listener_ = listen_at(socket_name);
  own_value_ = "here " + std::to_string(meeting_.size) + " " + socket_name +
               " " + identity_;
  if (rank_ == 0) {
    secret_ = random_digits(32);
    publish();
  }
}

void Handshake::make_segment() {
  check(meeting_.tuning);
  memory_ = std::make_shared<SharedMemory>(
      SharedMemory::create(Segment::bytes(meeting_.size, meeting_.tuning)));
  write_cores(
      Segment(memory_, meeting_.size, meeting_.tuning).state(rank_).cores);
}

void Handshake::take_segment(const Note& note, FileDescriptor descriptor) {
  meeting_.tuning = {.one_shot_bytes = note.one_shot_bytes,
                     .chunk_bytes = note.chunk_bytes,
                     .streaming_bytes = note.streaming_bytes};
  check(meeting_.tuning);
  if (!descriptor) {
    errno = EMFILE;
    throw_errno("the segment's descriptor could not be received");
  }
  memory_ = std::make_shared<SharedMemory>(SharedMemory::map(
      std::move(descriptor), Segment::bytes(meeting_.size, meeting_.tuning)));
  write_cores(
      Segment(memory_, meeting_.size, meeting_.tuning).state(rank_).cores);
}

void Handshake::publish() {
  try {
    if (rank_ == 0) exchange_.set("shm/secret", secret_);
    exchange_.set(key_of(rank_), own_value_);
  } catch (const std::exception& error) {
    throw Failure{
        Kind::broken,
        name(rank_) + " could not write to the store: " + error.what()};
  }
  published_ = true;
}

std::optional<std::string> Handshake::get(const std::string& key) {
  try {
    return exchange_.get(key, std::clamp(deadline_.remaining(),
                                         kStorePortion / 2, kStorePortion));
  } catch (const std::exception& error) {
    // The store is often in rank 0's process: if that process has ended, this
    // is the reason.
    pollfd first{
        .fd = peers_[0].socket.get(), .events = POLLRDHUP, .revents = 0};
    if (::poll(&first, 1, 100) > 0) throw died(0);
    throw Failure{
        Kind::broken,
        name(rank_) + " could not read from the store: " + error.what()};
  }
}

// Asks for one of the keys that are still missing, for another one each time.
// Returns whether any is missing.
bool Handshake::read_a_name() {
  // Rank 0 must know this rank before this rank reads the other keys: if a rank
  // that has published ends, it is rank 0 that notices and tells all.
  if (!published_) next_name_ = 0;
  for (int tried = 0; tried < meeting_.size; ++tried) {
    const int rank = next_name_;
    next_name_ = (next_name_ + 1) % meeting_.size;
    if (!peers_[rank].name.empty()) continue;
    if (rank != 0 && !published_) return false;
    if (auto value = get(key_of(rank))) learn(rank, *value);
    return true;
  }
  return false;
}

void Handshake::learn(int rank, const std::string& value) {
  if (auto failure = failure_in(value)) throw *failure;
  if (rank == rank_ && value != own_value_) {
    throw Failure{Kind::invalid, "two processes call themselves " + name(rank) +
                                     "; start each rank once"};
  }
  std::istringstream words(value);
  std::string word;
  int size = 0;
  std::string socket_name;
  std::string identity;
  words >> word >> size >> socket_name >> identity;
  if (word != "here" || identity.empty()) {
    throw Failure{Kind::invalid, "the store's key " + key_of(rank) +
                                     " holds \"" + value +
                                     "\", which no rank writes there"};
  }
  if (size != meeting_.size) {
    throw Failure{Kind::invalid, name(rank) + " is one of " +
                                     std::to_string(size) + " ranks, " +
                                     name(rank_) + " one of " +
                                     std::to_string(meeting_.size)};
  }
  if (identity != identity_) {
    throw Failure{Kind::unavailable,
                  name(std::min(rank, rank_)) + " and " +
                      name(std::max(rank, rank_)) +
                      " differ in host, network namespace or user"};
  }
  if (secret_.empty()) {
    // The secret was published before the key that was just read.
    std::optional<std::string> secret;
    while (!(secret = get("shm/secret"))) {
      if (deadline_.expired()) throw late();
    }
    secret_ = *secret;
  }
  peers_[rank].name = socket_name;
}

// Connects to the ranks whose names are known. Returns whether a connection
// must be tried again.
bool Handshake::connect_to_peers() {
  bool retry = false;
  for (int rank = 0; rank < rank_; ++rank) {
    auto& peer = peers_[rank];
    if (peer.name.empty() || peer.socket || peer.gone) continue;
    auto socket = connect_to(peer.name);
    if (!socket) {
      if (errno == EAGAIN) {
        retry = true;
        continue;
      }
      if (errno != ECONNREFUSED) {
        throw_errno("could not connect to " + name(rank));
      }
      lost(rank);
      continue;
    }
    if (const auto user = user_of_peer(socket); user != ::geteuid()) {
      throw Failure{Kind::unavailable, name(rank) + " runs as user " +
                                           std::to_string(user) + ", " +
                                           name(rank_) + " as user " +
                                           std::to_string(::geteuid())};
    }
    peer.socket = std::move(socket);
    send(rank, note(Kind::hello));
    if (rank == 0 && !published_) publish();
  }
  return retry;
}

void Handshake::look_at_sockets(milliseconds patience) {
  std::vector<pollfd> polled{
      {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
  std::vector<int> ranks;
  for (int rank = 0; rank < meeting_.size; ++rank) {
    const auto& peer = peers_[rank];
    // Once a peer has said hello, what it sends is for the group and must stay
    // in the socket, except for what rank 0 and the other ranks still send each
    // other in the handshake.
    if (peer.socket && (!peer.met || rank == 0 || rank_ == 0)) {
      ranks.push_back(rank);
      polled.push_back(
          {.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
    }
  }
  for (const auto& stranger : strangers_) {
    polled.push_back(
        {.fd = stranger.socket.get(), .events = POLLIN, .revents = 0});
  }
  const auto ready =
      ::poll(polled.data(), polled.size(), static_cast<int>(patience.count()));
  if (ready < 0 && errno != EINTR) throw_errno("poll");
  if (ready < 0) return;

  std::vector<Stranger> silent;
  for (size_t i = 0; i < strangers_.size(); ++i) {
    auto& stranger = strangers_[i];
    const bool spoke = polled[1 + ranks.size() + i].revents != 0;
    if (spoke ? !hear_stranger(stranger) : !stranger.patience.expired()) {
      silent.push_back(std::move(stranger));
    }
  }
  strangers_ = std::move(silent);
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (polled[1 + i].revents != 0 && !done_) hear_peer(ranks[i]);
  }
  if (polled[0].revents != 0) accept_strangers();
}

void Handshake::accept_strangers() {
  for (size_t i = 0; i < kMaxStrangers; ++i) {
    auto socket = accept_from(listener_);
    if (!socket) return;
    if (user_of_peer(socket) != ::geteuid()) continue;
    if (strangers_.size() == kMaxStrangers) {
      strangers_.erase(strangers_.begin());
    }
    strangers_.push_back(
        {.socket = std::move(socket), .patience = Deadline::after(kSilence)});
  }
}

// Returns whether it is not a stranger any more: it has become a peer, or is to
// be dropped.
bool Handshake::hear_stranger(Stranger& stranger) {
  Note hello{};
  auto packet = receive_packet(stranger.socket,
                               std::as_writable_bytes(std::span(&hello, 1)));
  if (packet.state == Packet::State::none) return false;
  if (!is_genuine(packet, hello, secret_) || hello.kind != Kind::hello)
    return true;
  if (hello.size != meeting_.size) {
    throw Failure{Kind::invalid,
                  "rank " + std::to_string(hello.rank) + " is one of " +
                      std::to_string(hello.size) + " ranks, " + name(rank_) +
                      " one of " + std::to_string(meeting_.size)};
  }
  if (hello.rank < rank_ || hello.rank >= meeting_.size) return true;
  if (hello.rank == rank_ || peers_[hello.rank].socket) {
    const auto other = hello.rank == rank_ ? static_cast<uint32_t>(::getpid())
                                           : peers_[hello.rank].pid;
    throw Failure{Kind::invalid,
                  "processes " + std::to_string(hello.pid) + " and " +
                      std::to_string(other) + " both call themselves " +
                      name(hello.rank) + "; start each rank once"};
  }
  peers_[hello.rank].socket = std::move(stranger.socket);
  send(hello.rank, note(Kind::hello));
  greeted(hello.rank, hello);
  return true;
}

void Handshake::greeted(int rank, const Note& note) {
  peers_[rank].met = true;
  peers_[rank].pid = note.pid;
  if (rank_ == 0) send(rank, this->note(Kind::memory), memory_->descriptor());
}

void Handshake::hear_peer(int rank) {
  auto& peer = peers_[rank];
  Note heard{};
  auto packet =
      receive_packet(peer.socket, std::as_writable_bytes(std::span(&heard, 1)));
  if (packet.state == Packet::State::none) return;
  if (packet.state == Packet::State::hung_up) return lost(rank);
  if (is_genuine(packet, heard, secret_) && heard.rank == rank) {
    switch (heard.kind) {
      case Kind::hello:
        if (peer.met || heard.size != meeting_.size) break;
        return greeted(rank, heard);
      case Kind::memory:
        if (rank != 0 || !peer.met || memory_) break;
        return take_segment(heard, std::move(packet.descriptor));
      case Kind::mapped:
        if (rank_ != 0) break;
        peer.mapped = true;
        return;
      case Kind::go:
        if (rank != 0 || !reported_) break;
        done_ = true;
        return;
      case Kind::unavailable:
      case Kind::broken:
      case Kind::invalid:
        heard.text.back() = 0;
        throw Failure{heard.kind, heard.text.data()};
    }
  }
  throw Failure{Kind::broken,
                name(rank) + " sent " + name(rank_) +
                    " a packet that is not part of the handshake"};
}

// Tells rank 0 that this rank has all it needs. On rank 0: tells the others
// that all ranks have it.
void Handshake::report() {
  const auto others_all = [&](auto has) {
    for (int rank = 0; rank < meeting_.size; ++rank) {
      if (rank != rank_ && !has(peers_[rank])) return false;
    }
    return true;
  };
  if (reported_ || !memory_) return;
  if (rank_ != 0) {
    if (!others_all([](const Peer& peer) { return peer.met; })) return;
    send(0, note(Kind::mapped));
    reported_ = true;
  } else if (others_all([](const Peer& peer) { return peer.mapped; })) {
    for (int rank = 1; rank < meeting_.size; ++rank) {
      send(rank, note(Kind::go));
    }
    reported_ = done_ = true;
  }
}

Note Handshake::note(Kind kind) const {
  Note note{};
  note.magic = kHandshakeMagic;
  note.version = kHandshakeVersion;
  std::copy_n(secret_.begin(), std::min(secret_.size(), note.secret.size()),
              note.secret.begin());
  note.kind = kind;
  note.rank = rank_;
  note.size = meeting_.size;
  note.pid = static_cast<uint32_t>(::getpid());
  note.one_shot_bytes = meeting_.tuning.one_shot_bytes;
  note.chunk_bytes = meeting_.tuning.chunk_bytes;
  note.streaming_bytes = meeting_.tuning.streaming_bytes;
  return note;
}

void Handshake::send(int rank, const Note& note, int descriptor) {
  switch (send_packet(peers_[rank].socket, std::as_bytes(std::span(&note, 1)),
                      descriptor)) {
    case Sent::all:
    // Not an error here: hear_peer() first reads what the peer said before it
    // hung up, and then notices the end.
    case Sent::hung_up:
      return;
    case Sent::full:
      throw Failure{Kind::broken, name(rank) + " does not read what " +
                                      name(rank_) + " sends"};
  }
}

// Tells the failure over the sockets, and through the store to the ranks that
// no socket leads to.
void Handshake::tell(const Failure& failure) noexcept {
  try {
    if (meeting_.size > 1 && (rank_ == 0 || !published_)) {
      exchange_.set(key_of(rank_), store_value(failure));
    }
  } catch (const std::exception&) {
    // The failure itself is what matters.
  }
  auto last = note(failure.kind);
  failure.text.copy(last.text.data(), last.text.size() - 1);
  for (int rank = 0; rank < meeting_.size; ++rank) {
    if (!peers_[rank].socket || (rank != 0 && rank_ != 0)) continue;
    try {
      send(rank, last);
    } catch (...) {
      // The peer will see the socket close.
    }
  }
}

// The peer hung up. Unless it is rank 0, only rank 0 reports this: it may know
// why the rank ended, and not only that it did. If rank 0 has ended, its reason
// may be in the store.
void Handshake::lost(int rank) {
  if (rank_ != 0 && rank != 0) {
    peers_[rank].gone = true;
    peers_[rank].socket.reset();
    return;
  }
  if (rank == 0) {
    // Rank 0's last words may still be on their way to the store.
    const auto reading = Deadline::after(kLastWords);
    do {
      std::optional<std::string> value;
      try {
        value = exchange_.get(key_of(0), kStorePortion);
      } catch (const std::exception&) {
        throw died(0);
      }
      if (value) learn(0, *value);
      std::this_thread::sleep_for(milliseconds(5));
    } while (!reading.expired());
  }
  throw died(rank);
}

Failure Handshake::died(int rank) const {
  return {Kind::broken, name(rank) + " died or left while the ranks met"};
}

Failure Handshake::late() const {
  std::string text;
  const auto add = [&](int rank, const char* what) {
    text += (text.empty() ? "" : ", ") + name(rank) + what;
  };
  for (int rank = 0; rank < meeting_.size; ++rank) {
    if (rank != rank_ && !peers_[rank].met) add(rank, " has not come");
  }
  for (int rank = 0; text.empty() && rank < meeting_.size; ++rank) {
    const bool waited_for =
        rank_ == 0 ? rank != 0 && !peers_[rank].mapped : rank == 0;
    if (waited_for) add(rank, " has not answered");
  }
  return {Kind::broken,
          text + " to share memory with " + name(rank_) + ", after " +
              std::to_string(deadline_.elapsed().count()) + " ms of " +
              std::to_string(deadline_.allowed().count()) + " ms"};
}

std::string Handshake::name(int rank) const {
  return "rank " + std::to_string(meeting_.global_ranks.empty()
                                      ? rank
                                      : meeting_.global_ranks[rank]);
}

}  // namespace

Membership meet(const Exchange& exchange, const Meeting& meeting) {
  check_meeting(meeting);
  return Handshake(exchange, meeting).run();
}

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat space {};
  if (!(file >> boot)) {
    throw std::runtime_error(
        "/proc/sys/kernel/random/boot_id cannot be read, so ranks cannot tell "
        "whether they are on one host");
  }
  if (::stat("/proc/self/ns/net", &space) != 0) {
    throw_errno("/proc/self/ns/net");
  }
  return boot + "/" + std::to_string(space.st_ino) + "/" +
         std::to_string(::geteuid());
}

}  // namespace lockstep::internal::shm
