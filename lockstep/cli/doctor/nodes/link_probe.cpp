#include "lockstep/cli/doctor/nodes/link_probe.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "lockstep/base/deadline.h"
#include "lockstep/cli/doctor/nodes/link_stream.h"
#include "lockstep/cli/doctor/nodes/nodes_findings.h"

namespace lockstep::internal {
namespace {

void pair_up(LinkStep& step, int one, int other) {
  step[static_cast<size_t>(one)] = other;
  step[static_cast<size_t>(other)] = one;
}

// One node stays in its seat and the others move on by one seat in each step;
// the node that sits opposite is the partner. An odd number gets an empty seat.
std::vector<LinkStep> all_links(int nodes) {
  const int seats = nodes + nodes % 2;
  std::vector<LinkStep> plan;
  for (int turn = 0; turn + 1 < seats; ++turn) {
    LinkStep step(static_cast<size_t>(nodes));
    const auto sits_at = [&](int seat) {
      return seat == 0 ? 0 : 1 + (seat - 1 + turn) % (seats - 1);
    };
    for (int seat = 0; seat < seats / 2; ++seat) {
      const int one = sits_at(seat);
      const int other = sits_at(seats - 1 - seat);
      if (one < nodes && other < nodes) pair_up(step, one, other);
    }
    plan.push_back(std::move(step));
  }
  return plan;
}

std::vector<LinkStep> ring(int nodes) {
  std::vector<LinkStep> plan(static_cast<size_t>(2 + nodes % 2),
                             LinkStep(static_cast<size_t>(nodes)));
  for (int node = 0; node < nodes; ++node) {
    // In an odd ring the last link touches links of both other steps.
    const bool closes = nodes % 2 == 1 && node + 1 == nodes;
    const auto step = static_cast<size_t>(closes ? 2 : node % 2);
    pair_up(plan[step], node, (node + 1) % nodes);
  }
  return plan;
}

}  // namespace

std::vector<LinkStep> link_plan(int nodes) {
  if (nodes < 2) return {};
  return nodes <= kMostNodesOfAllLinks ? all_links(nodes) : ring(nodes);
}

std::vector<std::pair<int, int>> links_of(const std::vector<LinkStep>& plan) {
  std::vector<std::pair<int, int>> links;
  for (const auto& step : plan) {
    for (int node = 0; node < std::ssize(step); ++node) {
      const auto partner = step[static_cast<size_t>(node)];
      if (partner && node < *partner) links.emplace_back(node, *partner);
    }
  }
  std::ranges::sort(links);
  return links;
}

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// How long a node asks for the time, which on slow links is a few round trips.
constexpr milliseconds kPingTime{250};
constexpr int kLeastPings = 3;

int64_t microseconds(Clock::duration time) {
  return std::chrono::round<std::chrono::microseconds>(time).count();
}

std::string hello(const std::string& token, int rank) {
  std::string text(kLinkGreeting);
  text += token;
  for (int shift = 24; shift >= 0; shift -= 8) {
    text += static_cast<char>(rank >> shift & 0xff);
  }
  return text;
}

std::optional<int64_t> mtu_of(int fd) {
  int mtu = 0;
  socklen_t size = sizeof mtu;
  if (getsockopt(fd, IPPROTO_IP, IP_MTU, &mtu, &size) == 0) return mtu;
  if (getsockopt(fd, IPPROTO_IPV6, IPV6_MTU, &mtu, &size) == 0) return mtu;
  return std::nullopt;
}

// Returns false if the other side stopped answering.
bool ask_for_time(LinkStream& stream, const Deadline& deadline,
                  LinkFigures& figures) {
  std::vector<Clock::duration> trips;
  auto best = Clock::duration::max();
  const Deadline enough = Deadline::after(kPingTime);
  while (std::ssize(trips) < kMostPings &&
         (std::ssize(trips) < kLeastPings || !enough.expired())) {
    uint64_t answer = 0;
    const int64_t clock = host_clock_ns();
    const auto asked = Clock::now();
    if (!stream.write_all({&kLinkPing, 1}, deadline) ||
        !stream.read_number(answer, deadline)) {
      return false;
    }
    const auto trip = Clock::now() - asked;
    trips.push_back(trip);
    if (trip >= best) continue;
    best = trip;
    // The other clock was read at some time within the round trip, so that half
    // of it is the most by which the offset is wrong.
    const int64_t half = std::chrono::nanoseconds(trip).count() / 2;
    figures.clock_offset_us =
        (static_cast<int64_t>(answer) - (clock + half)) / 1000;
    figures.clock_error_us = half / 1000 + 1;
  }
  const auto middle = trips.begin() + std::ssize(trips) / 2;
  std::ranges::nth_element(trips, middle);
  figures.round_trip_us = microseconds(*middle);
  return true;
}

// Returns false if no answer came.
bool send_stream(LinkStream& stream, const Deadline& deadline,
                 LinkFigures& figures) {
  const std::vector<char> bytes(256 << 10);
  if (!stream.write_all({&kLinkStream, 1}, deadline)) return false;
  // The other side says when it is enough.
  while (true) {
    pollfd entry{stream.fd(), POLLIN | POLLOUT, 0};
    const int ready =
        poll(&entry, 1, static_cast<int>(deadline.remaining().count()));
    if (ready <= 0) return false;
    if ((entry.revents & POLLIN) != 0) break;
    if (::send(stream.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0 &&
        errno != EAGAIN && errno != EINTR) {
      return false;
    }
  }
  uint64_t count = 0;
  uint64_t nanoseconds = 0;
  if (!stream.read_number(count, deadline) ||
      !stream.read_number(nanoseconds, deadline)) {
    return false;
  }
  if (nanoseconds > 0) {
    figures.bytes_per_second = static_cast<int64_t>(
        static_cast<double>(count) * 1e9 / static_cast<double>(nanoseconds));
  }
  return true;
}

FileDescriptor connect_first(const Endpoint& endpoint, const Deadline& deadline,
                             LinkFigures& figures) {
  for (const auto& address : resolve(endpoint)) {
    const auto begin = Clock::now();
    const auto allowed = std::min(kMostConnectTime, deadline.remaining());
    if (auto fd = connect_to(address, allowed)) {
      figures.connect_us = microseconds(Clock::now() - begin);
      return fd;
    }
    figures.error = errno == ETIMEDOUT
                        ? "no answer within " + seconds_text(allowed)
                        : std::strerror(errno);
  }
  return {};
}

int64_t bounded_number(const nlohmann::ordered_json& document,
                       const char* name) {
  const int64_t value = document.at(name).get<int64_t>();
  // A century in microseconds; figures beyond it would overflow sums.
  constexpr int64_t kMost = int64_t{100} * 366 * 86'400 * 1'000'000;
  if (value < -kMost || value > kMost) {
    throw std::runtime_error(std::string(name) + " is out of range");
  }
  return value;
}

}  // namespace

nlohmann::ordered_json LinkFigures::json() const {
  nlohmann::ordered_json document{{"error", nullptr}};
  if (!error.empty()) {
    document["error"] = error;
    return document;
  }
  document.update({{"connect_us", connect_us},
                   {"round_trip_us", round_trip_us},
                   {"clock_offset_us", clock_offset_us},
                   {"clock_error_us", clock_error_us},
                   {"bytes_per_second", bytes_per_second},
                   {"mtu", nullptr}});
  if (mtu) document["mtu"] = *mtu;
  return document;
}

LinkFigures LinkFigures::parse(const std::string& text) try {
  const auto document = nlohmann::ordered_json::parse(text);
  LinkFigures figures;
  if (!document.at("error").is_null()) {
    figures.error = printable(document.at("error").get<std::string>());
    if (figures.error.empty()) figures.error = "?";
    return figures;
  }
  figures.connect_us = bounded_number(document, "connect_us");
  figures.round_trip_us = bounded_number(document, "round_trip_us");
  figures.clock_offset_us = bounded_number(document, "clock_offset_us");
  figures.clock_error_us = bounded_number(document, "clock_error_us");
  figures.bytes_per_second = bounded_number(document, "bytes_per_second");
  if (!document.at("mtu").is_null())
    figures.mtu = bounded_number(document, "mtu");
  return figures;
} catch (const nlohmann::json::exception&) {
  throw std::runtime_error("the figures of a link are no such document");
}

LinkFigures measure_link(const Endpoint& endpoint, const std::string& token,
                         int rank, const Deadline& deadline) {
  LinkFigures figures;
  try {
    FileDescriptor socket = connect_first(endpoint, deadline, figures);
    if (!socket) return figures;
    figures.error.clear();
    LinkStream stream(std::move(socket));
    char ready = 0;
    if (!stream.write_all(hello(token, rank), deadline) ||
        !stream.read_all(&ready, 1, deadline)) {
      figures.error = deadline.expired()
                          ? "connected, but no answer came"
                          : "connected, but the connection was closed: another "
                            "process may answer at that address";
      return figures;
    }
    // The time of the other node's turn does not count.
    const Deadline most =
        Deadline::after(std::min(kMostLinkTime, deadline.remaining()));
    if (!ask_for_time(stream, most, figures)) {
      figures.error = "connected, but answers stopped";
      return figures;
    }
    send_stream(stream, most, figures);
    figures.mtu = mtu_of(stream.fd());
  } catch (const std::exception& error) {
    figures.error = error.what();
  }
  return figures;
}

}  // namespace lockstep::internal
