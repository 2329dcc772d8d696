#include "lockstep/worker/status_publisher.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/base/signals.h"
#include "lockstep/trace/flight_recorder.h"
#include "lockstep/worker/flight_dump.h"
#include "lockstep/worker/native_stack.h"
#include "lockstep/worker/nvml.h"
#include "lockstep/worker/profile_on_demand.h"
#include "lockstep/worker/status_board.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// An agent answers at once, unless it is stopped or the machine is overloaded.
constexpr milliseconds kAnswerTime{10'000};
// How many requests of stacks are answered at once: the newest ones.
constexpr int64_t kMostStacks = 16;
constexpr milliseconds kPollInterval{50};
constexpr milliseconds kLongTime{3'600'000};

// How often the ranks are compared, and for how long once somebody has asked
// for the slowest.
constexpr int64_t kCompareNs = 1'000'000'000;
constexpr int64_t kWatchNs = 4'000'000'000;

// The publisher of this process, for those who ask for the slowest rank.
std::mutex active_mutex;
StatusPublisher* active = nullptr;

// Operations are read from the newest to older ones, until so many in a row
// ended before the time that is asked for.
constexpr int kEndedBefore = 32;

using TimeRange = std::pair<int64_t, int64_t>;

// Returns the time that at least one of `ranges` covers. Sorts them.
int64_t covered(std::vector<TimeRange>& ranges) {
  std::ranges::sort(ranges);
  int64_t total = 0;
  int64_t until = 0;
  for (const auto& [begin, end] : ranges) {
    total += std::max<int64_t>(0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  return total;
}

}  // namespace

void read_operations(RankStatus& status, int64_t since_ns, int64_t now_ns) {
  status.operations = 0;
  status.current_since_ns = 0;
  std::vector<TimeRange> ranges;
  const FlightRecorder::Reading reading;
  for (const auto* recorder = reading.first(); recorder != nullptr;
       recorder = recorder->next()) {
    const uint64_t last = recorder->last_id();
    status.operations += static_cast<int64_t>(last);
    const uint64_t oldest =
        last > recorder->capacity() ? last - recorder->capacity() : 0;
    int before = 0;
    for (uint64_t id = last; id > oldest && before < kEndedBefore; --id) {
      FlightRecord record;
      if (!recorder->read(id, record)) continue;
      const bool ended = record.state >= FlightState::completed;
      const int64_t active =
          std::max(record.created_ns, ended ? record.ended_ns : 0);
      if (active > status.last_operation_ns) {
        status.last_operation_ns = active;
        status.last_number = static_cast<int64_t>(record.call.number);
        status.last_operation.set(record.call.operation);
        status.last_group.set(recorder->group().name);
      }
      if (ended && record.ended_ns <= since_ns) {
        ++before;
        continue;
      }
      before = 0;
      ranges.emplace_back(std::max(record.created_ns, since_ns),
                          ended ? std::min(record.ended_ns, now_ns) : now_ns);
      if (!ended && (status.current_since_ns == 0 ||
                     record.created_ns < status.current_since_ns)) {
        status.current_since_ns = record.created_ns;
        status.current_number = static_cast<int64_t>(record.call.number);
        status.current_operation.set(record.call.operation);
        status.current_group.set(recorder->group().name);
      }
    }
  }
  status.comm_ns += covered(ranges);
}

StatusPublisher::StatusPublisher(int rank) noexcept : rank_(rank) {
  try {
    const auto agent = get_env("LOCKSTEP_AGENT");
    auto place = get_env_int("LOCKSTEP_AGENT_PLACE", 0, 1 << 20);
    if (!place) place = get_env_int("LOCAL_RANK", 0, 1 << 20);
    if (!agent || !place) return;
    place_ = static_cast<int>(*place);
    try {
      thread_ = quiet_thread([this, name = *agent] { run(name); });
      pthread_setname_np(thread_.native_handle(), "lockstep-status");
    } catch (const std::exception&) {
      // The system has no thread left, so nothing is told.
    }
    if (!thread_.joinable()) return;
    const std::lock_guard lock(active_mutex);
    active = this;
  } catch (const std::exception&) {
    // A variable has a value that is not allowed: rendezvous says so.
  }
}

StatusPublisher::~StatusPublisher() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(active_mutex);
    if (active == this) active = nullptr;
  }
  if (auto* profiler = ProfileOnDemand::provided()) profiler->end();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    if (board_) board_->wake();
  }
  ended_.notify_all();
  thread_.join();
}

void StatusPublisher::run(const std::string& agent) {
  try {
    if (!attach(agent)) return;
    while (!ending_) {
      const uint32_t calls = board_->calls();
      const bool watched = board_->is_watched();
      take_profile_request();
      take_stacks_request();
      if (watched) publish();
      if (ending_) break;
      board_->wait(calls, watched ? StatusBoard::kInterval : kLongTime);
    }
    status_.has_left = 1;
    publish();
  } catch (const std::exception&) {
    // The memory or a descriptor was refused, so nothing more is told.
  }
}

bool StatusPublisher::attach(const std::string& agent) {
  const Deadline deadline = Deadline::after(kAnswerTime);
  FileDescriptor socket;
  while (!(socket = connect_to(agent))) {
    if (errno != EAGAIN || deadline.expired()) return false;
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, kPollInterval, [this] { return bool(ending_); });
    if (ending_) return false;
  }
  if (!is_own_or_roots(socket)) return false;
  const std::string question =
      "{\"question\": \"attach\", \"local_rank\": " + std::to_string(place_) +
      "}";
  if (send_packet(socket, std::as_bytes(std::span(question))) != Sent::all) {
    return false;
  }
  std::array<std::byte, 1024> words;
  Packet answer{};
  while (!ending_ && !deadline.expired()) {
    pollfd entry{socket.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(kPollInterval.count()));
    answer = receive_packet(socket, words);
    if (answer.state != Packet::State::none) break;
  }
  if (!answer.descriptor || answer.bytes > words.size()) return false;
  folder_.assign(reinterpret_cast<const char*>(words.data()), answer.bytes);
  StatusBoard board = StatusBoard::map(std::move(answer.descriptor));
  if (place_ >= board.places()) return false;
  const std::lock_guard lock(mutex_);
  board_.emplace(std::move(board));
  status_.profile = board_->last_profile().number;
  status_.stacks = board_->last_stacks();
  return !ending_;
}

void StatusPublisher::take_profile_request() {
  const auto request = board_->last_profile();
  const bool is_new = request.number != status_.profile;
  status_.profile = request.number;
  auto* profiler = ProfileOnDemand::provided();
  if (profiler == nullptr || request.number == 0) return;
  if (is_new) {
    profiler->ask(
        {.folder = folder_ + "/profile" + std::to_string(request.number),
         .duration = request.duration,
         .first_step = request.first_step});
  }
  if (board_->stopped_profile() == request.number) profiler->stop();
}

void StatusPublisher::take_stacks_request() {
  const int64_t newest = board_->last_stacks();
  if (newest == status_.stacks) return;
  write_flight_record(FlightReason::request);
  const std::string stacks =
      "{\"flight_record\": " +
      nlohmann::json(flight_record_path())
          .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
      ", \"threads\": " + to_json(thread_stacks()) + "}";
  // Each request is another process's, which waits for the file of its own
  // number; several may have come while the one before was answered.
  const int64_t before =
      std::max<int64_t>(status_.stacks, newest - kMostStacks);
  for (int64_t number = before + 1; number <= newest; ++number) {
    const std::string file =
        folder_ + "/" +
        StatusBoard::stacks_file(static_cast<int32_t>(number), rank_);
    // If the disk is full, the reader finds no file, or no whole one.
    std::ofstream(file + ".part") << stacks;
    std::error_code ignored;
    std::filesystem::rename(file + ".part", file, ignored);
  }
  status_.stacks = static_cast<int32_t>(newest);
}

void StatusPublisher::publish() {
  const int64_t now = steady_ns();
  // Events while nobody looked do not count.
  const int64_t interval =
      2 * std::chrono::nanoseconds(StatusBoard::kInterval).count();
  const int64_t since = std::max(status_.published_ns, now - interval);
  const TrainingCounters& counters = TrainingCounters::instance();
  status_.pid = getpid();
  status_.rank = rank_;
  status_.steps = counters.steps();
  status_.last_step_ns = counters.last_step_ns();
  status_.samples = counters.samples();
  status_.last_snapshot_ns = counters.last_snapshot_ns();
  status_.progress.set(counters.progress());
  if (status_.profile > 0) {
    const auto* profiler = ProfileOnDemand::provided();
    const auto profile =
        profiler != nullptr
            ? profiler->progress()
            : ProfileOnDemand::Progress{
                  ProfileState::failed,
                  "its program does not include lockstep/observe/profiler.h"};
    status_.profile_state = profile.state;
    status_.profile_words.set(profile.words);
  }
  measure_gpus(now);
  read_operations(status_, since, now);
  status_.observed_ns += now - since;
  status_.published_ns = now;
  board_->publish(place_, status_);
  if (now < compares_until_ns_) compare_ranks(now);
}

void StatusPublisher::measure_gpus(int64_t now_ns) {
  // The driver's own figures change less often.
  constexpr int64_t kMeasureNs = 1'000'000'000;
  if (gpus_measured_ns_ != 0 && now_ns - gpus_measured_ns_ < kMeasureNs) return;
  gpus_measured_ns_ = now_ns;
  const GpuUsage usage = gpu_usage().value_or(GpuUsage{});
  status_.gpus = usage.gpus;
  status_.gpu_celsius = usage.celsius.value_or(-1);
  status_.gpu_memory_bytes = usage.memory_bytes.value_or(-1);
  status_.gpu_busy_percent = usage.busy_percent.value_or(-1);
  status_.gpu_watts = usage.watts.value_or(-1);
}

void StatusPublisher::compare_ranks(int64_t now_ns) {
  if (now_ns - compared_ns_ < kCompareNs) return;
  compared_ns_ = now_ns;
  const auto before = std::exchange(ranks_before_, {});
  ranks_before_.resize(static_cast<size_t>(board_->places()));
  std::vector<RankShare> shares;
  for (int place = 0; place < board_->places(); ++place) {
    const auto at = static_cast<size_t>(place);
    ranks_before_[at] = board_->read(place).value_or(RankStatus{});
    if (before.empty()) continue;
    const RankStatus& rank = ranks_before_[at];
    const int64_t observed = rank.observed_ns - before[at].observed_ns;
    if (rank.pid == 0 || rank.pid != before[at].pid || observed <= 0) continue;
    shares.push_back({static_cast<double>(rank.comm_ns - before[at].comm_ns) /
                          static_cast<double>(observed),
                      rank.rank});
  }
  slowest_ = internal::slowest_rank(std::move(shares)).value_or(-1);
}

std::optional<int> StatusPublisher::slowest_rank() {
  const std::lock_guard lock(active_mutex);
  if (active == nullptr) return std::nullopt;
  const int64_t now = steady_ns();
  if (active->compares_until_ns_ - now < kWatchNs / 2) {
    active->compares_until_ns_ = now + kWatchNs;
    const std::lock_guard board_lock(active->mutex_);
    if (active->board_) {
      active->board_->watch(milliseconds(kWatchNs / 1'000'000));
    }
  }
  const int slowest = active->slowest_;
  return slowest < 0 ? std::nullopt : std::optional(slowest);
}

}  // namespace lockstep::internal
