#include "lockstep/worker/flight_dump.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/signals.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep::internal {
namespace {

// The values that a dump needs but cannot find out in a signal handler.
struct Destination {
  std::string folder;
  std::string path;
  std::string job;
  std::string host;
  int rank;
  int world_size;
  pid_t pid;
  // The same moment on both clocks, to convert steady times to times of day.
  int64_t steady_ns;
  int64_t unix_ns;
};

std::atomic<const Destination*> destination{nullptr};
std::atomic<unsigned> dumps{0};
// The result of the last record that a failure wrote: 0 or errno.
std::atomic<int> failure_error{0};

// The most records that a file holds: the newest ones of each group. So the
// file stays below the 64 MiB that `lockstep inspect flight` reads: a record
// takes at most about 450 bytes, with every number at its widest.
constexpr uint64_t kMostRecords = uint64_t{1} << 17;

// Writes bytes to a file; calls only what a signal handler may call.
class SignalSafeWriter {
 public:
  explicit SignalSafeWriter(int fd) : fd_(fd) {}

  void text(std::string_view bytes) {
    while (!bytes.empty()) {
      if (used_ == sizeof(buffer_)) flush();
      const size_t part = std::min(bytes.size(), sizeof(buffer_) - used_);
      std::memcpy(buffer_ + used_, bytes.data(), part);
      used_ += part;
      bytes.remove_prefix(part);
    }
  }
  template <typename Integer>
  void number(Integer value) {
    char digits[24];
    // to_chars() neither allocates nor reads the locale.
    const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
    text({digits, static_cast<size_t>(end - digits)});
  }
  // Writes `value` as a JSON string, or null if it is nullptr.
  void quoted(const char* value) {
    if (value == nullptr) return text("null");
    quoted(std::string_view(value));
  }
  void quoted(std::string_view value) {
    text("\"");
    for (const char c : value) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') text("\\");
      // Names are ASCII. Any other byte becomes "?", as JSON would require
      // valid UTF-8.
      text(byte < 0x20 || byte >= 0x7f ? std::string_view("?")
                                       : std::string_view(&c, 1));
    }
    text("\"");
  }
  int finish() {
    flush();
    return error_;
  }

 private:
  void flush() {
    size_t written = 0;
    while (written < used_ && error_ == 0) {
      const ssize_t count = ::write(fd_, buffer_ + written, used_ - written);
      if (count >= 0) {
        written += static_cast<size_t>(count);
      } else if (errno != EINTR) {
        error_ = errno;
      }
    }
    used_ = 0;
  }

  int fd_;
  int error_ = 0;
  size_t used_ = 0;
  char buffer_[2048];
};

const char* name_of(FlightReason reason) {
  switch (reason) {
    case FlightReason::failure:
      return "failure";
    case FlightReason::signal:
      return "signal";
    default:
      return "request";
  }
}

int64_t unix_time(const Destination& to, int64_t steady_ns) {
  return to.unix_ns + (steady_ns - to.steady_ns);
}

void write_record(SignalSafeWriter& out, const Destination& to,
                  const FlightRecord& record) {
  const FlightCall& call = record.call;
  out.text("{\"record_id\": ");
  out.number(record.id);
  out.text(", \"collective_seq_id\": ");
  out.number(call.number);
  out.text(call.number == 0 ? ", \"is_p2p\": true" : ", \"is_p2p\": false");
  out.text(", \"operation\": ");
  out.quoted(call.operation);
  out.text(", \"dtype\": ");
  out.quoted(call.dtype);
  out.text(", \"reduce_op\": ");
  out.quoted(call.reduce_op);
  out.text(", \"peer\": ");
  if (call.peer < 0) {
    out.text("null");
  } else {
    out.number(call.peer);
  }
  out.text(", \"in_elements\": ");
  out.number(call.in_elements);
  out.text(", \"out_elements\": ");
  out.number(call.out_elements);
  out.text(", \"state\": ");
  out.quoted(name_of(record.state));
  out.text(", \"time_created_ns\": ");
  out.number(unix_time(to, record.created_ns));
  out.text(", \"time_ended_ns\": ");
  if (record.state < FlightState::completed) {
    out.text("null");
  } else {
    out.number(unix_time(to, record.ended_ns));
  }
  out.text(", \"thread\": ");
  out.number(record.thread);
  out.text("}");
}

void write_group(SignalSafeWriter& out, const Destination& to,
                 const FlightRecorder& recorder, uint64_t most_records) {
  const FlightGroup& group = recorder.group();
  out.text("{\"process_group\": ");
  out.quoted(std::string_view(group.name));
  out.text(", \"backend\": ");
  out.quoted(std::string_view(group.backend));
  out.text(", \"rank\": ");
  out.number(group.rank);
  out.text(", \"ranks\": [");
  for (size_t i = 0; i < group.ranks.size(); ++i) {
    if (i > 0) out.text(", ");
    out.number(group.ranks[i]);
  }
  // Read the counts before the records, and write no record beyond them. If an
  // operation begins at this moment, its id may be counted already and its
  // number not yet; the loop below leaves its record out.
  const uint64_t last = recorder.last_id();
  const uint64_t last_number = recorder.last_number();
  out.text("], \"capacity\": ");
  out.number(recorder.capacity());
  out.text(", \"last_record_id\": ");
  out.number(last);
  out.text(", \"last_collective_seq_id\": ");
  out.number(last_number);
  out.text(", \"entries\": [");
  const uint64_t kept =
      std::min<uint64_t>({last, recorder.capacity(), most_records});
  const char* separator = "\n  ";
  for (uint64_t id = last - kept + 1; id <= last; ++id) {
    FlightRecord record;
    if (!recorder.read(id, record) || record.call.number > last_number) {
      continue;
    }
    out.text(separator);
    separator = ",\n  ";
    write_record(out, to, record);
  }
  out.text("]}");
}

void write_document(SignalSafeWriter& out, const Destination& to,
                    FlightReason reason, const FlightRecorder* recorder) {
  out.text("{\"format\": \"lockstep-flight\", \"version\": 1,\n\"job\": ");
  if (to.job.empty()) {
    out.text("null");
  } else {
    out.quoted(std::string_view(to.job));
  }
  out.text(", \"rank\": ");
  out.number(to.rank);
  out.text(", \"world_size\": ");
  out.number(to.world_size);
  out.text(", \"host\": ");
  out.quoted(std::string_view(to.host));
  out.text(", \"pid\": ");
  out.number(to.pid);
  out.text(",\n\"reason\": ");
  out.quoted(name_of(reason));
  out.text(", \"time_ns\": ");
  out.number(unix_time(to, steady_ns()));
  out.text(",\n\"groups\": [");
  uint64_t groups = 0;
  for (auto* one = recorder; one != nullptr; one = one->next()) ++groups;
  const uint64_t share = kMostRecords / std::max<uint64_t>(groups, 1);
  const char* separator = "\n ";
  for (; recorder != nullptr; recorder = recorder->next()) {
    out.text(separator);
    separator = ",\n ";
    write_group(out, to, *recorder, std::max<uint64_t>(share, 1));
  }
  out.text("]}\n");
}

// Makes a name beside the file that no other dump of this process uses: a
// signal may start a dump in the middle of another one.
void put_aside_name(char* name, size_t size, const Destination& to) {
  const unsigned number = dumps.fetch_add(1, std::memory_order_relaxed);
  char* at = std::copy(to.path.begin(), to.path.end(), name);
  *at++ = '.';
  at = std::to_chars(at, name + size - 1, to.pid).ptr;
  *at++ = '.';
  at = std::to_chars(at, name + size - 1, number).ptr;
  *at = '\0';
}

void dump_on_signal(int) {
  const int saved = errno;
  write_flight_record(FlightReason::signal);
  errno = saved;
}

void handle_signal() {
  struct sigaction current {};
  if (::sigaction(SIGUSR1, nullptr, &current) != 0 ||
      (current.sa_flags & SA_SIGINFO) != 0 || current.sa_handler != SIG_DFL) {
    return;
  }
  struct sigaction action {};
  action.sa_handler = dump_on_signal;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGUSR1, &action, nullptr);
}

// Returns the <job> in the file's name; empty if MASTER_PORT is not a number.
std::string job_name() {
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.size() <= 20 &&
           text.find_first_not_of("0123456789") == std::string::npos;
  };
  auto job = get_rank_env("MASTER_PORT").value_or("");
  if (!is_number(job)) return {};
  const auto restart = get_env("TORCHELASTIC_RESTART_COUNT").value_or("0");
  if (is_number(restart) && restart != "0") job += "." + restart;
  return job;
}

std::string folder_name() {
  if (auto given = get_env("LOCKSTEP_FLIGHT_DIR")) return *given;
  std::error_code error;
  auto folder = std::filesystem::temp_directory_path(error).string();
  return error ? "/tmp" : folder;
}

}  // namespace

void arm_flight_dump(int rank, int world_size) {
  if (FlightRecorder::default_capacity() == 0) return;
  const bool by_signal =
      get_env_int("LOCKSTEP_FLIGHT_SIGNAL", 0, 1).value_or(1) != 0 &&
      !ending_signals().contains(SIGUSR1);
  auto made = std::make_unique<Destination>();
  made->pid = ::getpid();
  made->rank = rank;
  made->world_size = world_size;
  made->job = job_name();
  std::error_code error;
  // The path is absolute, as a program may change its working folder.
  made->folder = std::filesystem::absolute(folder_name(), error).string();
  const auto tag =
      made->job.empty() ? "pid" + std::to_string(made->pid) : made->job;
  made->path =
      (std::filesystem::path(made->folder) /
       ("lockstep-flight-" + tag + "-rank" + std::to_string(rank) + ".json"))
          .string();
  if (made->path.size() + 32 > PATH_MAX) {
    throw std::invalid_argument(
        "the path of the flight record is longer than " +
        std::to_string(PATH_MAX - 32) +
        " characters; name a shorter folder in LOCKSTEP_FLIGHT_DIR");
  }
  made->host = host_name();
  made->unix_ns = std::chrono::nanoseconds(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count();
  made->steady_ns = steady_ns();
  // No Destination is ever destroyed: a dump may be reading it, and a thread of
  // LibTorch may fail, and dump, while the static objects of the process are
  // destroyed.
  static auto& all =
      *std::make_unique<std::vector<std::unique_ptr<Destination>>>().release();
  const Destination* before = destination.load(std::memory_order_relaxed);
  if (before == nullptr || before->path != made->path ||
      before->world_size != made->world_size || before->pid != made->pid) {
    destination.store(made.get(), std::memory_order_release);
    all.push_back(std::move(made));
  }
  if (by_signal) handle_signal();
}

int write_flight_record(FlightReason reason) noexcept {
  const Destination* to = destination.load(std::memory_order_acquire);
  const FlightRecorder::Reading reading;
  const FlightRecorder* first = reading.first();
  if (to == nullptr || first == nullptr || to->pid != ::getpid()) {
    return ENODATA;
  }
  char aside[PATH_MAX];
  put_aside_name(aside, sizeof(aside), *to);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  int fd = ::open(aside, kFlags, 0600);
  if (fd < 0 && errno == ENOENT) {
    ::mkdir(to->folder.c_str(), 0700);
    fd = ::open(aside, kFlags, 0600);
  }
  if (fd < 0) return errno;
  SignalSafeWriter out(fd);
  write_document(out, *to, reason, first);
  int error = out.finish();
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(aside, to->path.c_str()) != 0) error = errno;
  if (error != 0) ::unlink(aside);
  return error;
}

std::string flight_record_path() {
  const Destination* to = destination.load(std::memory_order_acquire);
  return to == nullptr ? std::string() : to->path;
}

std::string record_failure(FlightRecorder& recorder) {
  const auto path = flight_record_path();
  if (recorder.capacity() == 0 || path.empty()) return {};
  // If another thread is writing the record, a thread without news waits for it
  // here: the file that the error names exists then.
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (recorder.has_news()) {
    failure_error.store(write_flight_record(FlightReason::failure),
                        std::memory_order_relaxed);
  }
  const int error = failure_error.load(std::memory_order_relaxed);
  if (error == 0) return "; flight record: " + path;
  if (error == ENODATA) return {};
  return "; no flight record: " + path + ": " +
         std::generic_category().message(error);
}

}  // namespace lockstep::internal
