#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/shm/protocol/message_engine.h"

// Message engines of several ranks in one process, over one segment. Each rank
// is a thread, so ThreadSanitizer sees both sides.
namespace lockstep::internal::shm {

using namespace std::chrono_literals;

// Longer than any test takes.
inline constexpr milliseconds kLong = 60s;

class MessageRank {
 public:
  MessageRank(std::shared_ptr<SharedMemory> memory, int own, int ranks,
              std::vector<FileDescriptor> sockets)
      : rank(own),
        size(ranks),
        segment(std::move(memory), ranks, default_tuning(ranks)),
        links(std::move(sockets)),
        waiting(segment, links, own, ranks, {}),
        engine(segment, waiting, own, ranks) {}

  std::shared_ptr<Message> send(int to, int tag,
                                const std::vector<uint8_t>& data) {
    return engine.start_send(to, tag, {data.data(), data.size()}, DType::uint8);
  }
  std::shared_ptr<Message> receive(int from, int tag,
                                   std::vector<uint8_t>& data) {
    return engine.start_receive(from, tag, {data.data(), data.size()},
                                DType::uint8);
  }
  void wait(const std::shared_ptr<Message>& message,
            milliseconds timeout = kLong) {
    engine.wait(*message, timeout);
  }
  void leave() {
    waiting.leave();
    links.hang_up();
  }
  // Makes the peers see the end of a killed process.
  void die() { links.hang_up(); }

  const int rank;
  const int size;
  Segment segment;
  PeerLinks links;
  Waiting waiting;
  MessageEngine engine;
};

class MessageWorld {
 public:
  explicit MessageWorld(int size) {
    const auto memory = std::make_shared<SharedMemory>(
        SharedMemory::create(Segment::bytes(size, default_tuning(size))));
    // Sets as many cores as ranks, so that ranks spin where the machine allows
    // it.
    Segment(memory, size, default_tuning(size)).state(0).cores[0] =
        (uint64_t{1} << size) - 1;
    std::vector<std::vector<FileDescriptor>> sockets(size);
    for (auto& row : sockets) row.resize(size);
    for (int one = 0; one < size; ++one) {
      for (int other = one + 1; other < size; ++other) {
        int ends[2];
        if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC,
                         0, ends) != 0) {
          throw_errno("no pair of sockets");
        }
        sockets[one][other] = FileDescriptor(ends[0]);
        sockets[other][one] = FileDescriptor(ends[1]);
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<MessageRank>(memory, rank, size,
                                                     std::move(sockets[rank])));
    }
  }

  MessageRank& operator[](int rank) { return *ranks_[rank]; }

  // Runs `body` for each rank in a thread of its own. Throws the exception of
  // the lowest rank that threw.
  void run(const std::function<void(MessageRank&)>& body) {
    std::vector<std::exception_ptr> errors(ranks_.size());
    {
      std::vector<std::jthread> threads;
      for (auto& rank : ranks_) {
        threads.emplace_back([&] {
          try {
            body(*rank);
          } catch (...) {
            errors[rank->rank] = std::current_exception();
          }
        });
      }
    }
    for (const auto& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }

 private:
  std::vector<std::unique_ptr<MessageRank>> ranks_;
};

// Returns bytes that differ for each seed and do not repeat soon.
inline std::vector<uint8_t> pattern(size_t bytes, uint64_t seed) {
  std::vector<uint8_t> data(bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (auto& byte : data) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return data;
}

// Returns the words of the `Error` that `call` throws.
template <typename Error>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no such error";
  return "";
}

}  // namespace lockstep::internal::shm
