#include "lockstep/observe/background_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/base/signals.h"

namespace lockstep::internal {
namespace {

using Clock = std::chrono::steady_clock;

// Appends to a file of `size` bytes. Returns an error if not all could be
// written; the file is as before then.
std::error_code write_whole(int file, off_t& size, std::string_view bytes) {
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const ssize_t count = ::write(file, rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const std::error_code error(errno, std::generic_category());
      // If this fails, a reader finds a broken record here.
      [[maybe_unused]] const int cut = ::ftruncate(file, size);
      return error;
    }
    rest.remove_prefix(static_cast<size_t>(count));
  }
  size += static_cast<off_t>(bytes.size());
  return {};
}

}  // namespace

struct BackgroundFiles::State {
  struct File {
    FileDescriptor descriptor;
    std::string path;
    std::string pending{};  // records that wait
    off_t size{};           // of the whole records in the file
  };

  explicit State(const BackgroundFilesOptions& given) : options(given) {}

  const BackgroundFilesOptions options;
  const ProcessMark made_in;

  std::mutex mutex;
  std::condition_variable work;      // for the thread
  std::condition_variable progress;  // the thread has ended a pass
  // A deque, because the thread uses files while others are added.
  std::deque<File> files;
  size_t records = 0;  // that wait
  size_t bytes = 0;    // of these, and of those that are being written
  Clock::time_point oldest{};
  bool urgent = false;  // a caller waits for the next pass
  bool closed = false;
  // A pass takes all records that wait and writes them.
  uint64_t passes_begun = 0;
  uint64_t passes_ended = 0;

  // Set by the last pass.
  std::error_code failure;
  std::string failed_path;
  uint64_t dropped = 0;
  std::string notice;
  bool told = false;  // of this failure
  std::atomic<bool> has_notice{false};

  std::thread thread;

  void require_own_process() const {
    if (!made_in.is_foreign()) return;
    throw std::runtime_error(
        "this log was opened before fork() and belongs to the parent process; "
        "open another one in the child");
  }

  void require_open() const {
    if (!closed) return;
    throw std::logic_error("this log was closed; log before close()");
  }

  bool is_due() const {
    return !failure &&
           (records >= options.most_records || bytes >= options.most_bytes / 2);
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      work.wait(lock, [&] { return urgent || records > 0; });
      work.wait_until(lock, oldest + options.interval,
                      [&] { return urgent || is_due(); });
      const bool last = closed;
      urgent = false;
      ++passes_begun;
      write_pending(lock);
      ++passes_ended;
      progress.notify_all();
      if (last) return;
    }
  }

  void write_pending(std::unique_lock<std::mutex>& lock) {
    struct Batch {
      File* file;
      std::string bytes;
      std::error_code error{};
    };
    std::vector<Batch> batches;
    for (File& file : files) {
      if (file.pending.empty()) continue;
      batches.push_back({&file, std::exchange(file.pending, {})});
    }
    records = 0;

    lock.unlock();
    for (Batch& batch : batches) {
      batch.error = write_whole(batch.file->descriptor.get(), batch.file->size,
                                batch.bytes);
    }
    lock.lock();

    std::error_code error;
    for (Batch& batch : batches) {
      if (!batch.error) {
        bytes -= batch.bytes.size();
        continue;
      }
      error = batch.error;
      failed_path = batch.file->path;
      batch.file->pending.insert(0, batch.bytes);
      ++records;
      oldest = Clock::now();  // from when the interval counts again
    }
    end_pass(error);
  }

  void end_pass(std::error_code error) {
    failure = error;
    if (error && !told) {
      told = true;
      note("\"" + failed_path + "\" cannot be written (" + error.message() +
           "); training goes on, and what is logged waits in memory, at most " +
           std::to_string(options.most_bytes >> 20) + " MiB, until it can");
    } else if (!error) {
      told = false;
      if (dropped > 0) {
        note(std::to_string(std::exchange(dropped, 0)) +
             " records were dropped while \"" + failed_path +
             "\" could not be written");
      }
    }
  }

  void note(std::string text) {
    notice = std::move(text);
    has_notice.store(true, std::memory_order_relaxed);
  }

  // Waits for a pass that begins after now; throws if it fails.
  void await_pass(std::unique_lock<std::mutex>& lock) {
    const uint64_t pass = passes_begun + 1;
    urgent = true;
    work.notify_one();
    progress.wait(lock, [&] { return passes_ended >= pass; });
    if (!failure) return;
    notice.clear();
    has_notice = false;
    throw std::system_error(failure, "the log \"" + failed_path +
                                         "\" cannot be written; make room, or "
                                         "log elsewhere");
  }
};

BackgroundFiles::BackgroundFiles(const BackgroundFilesOptions& options)
    : state_(std::make_unique<State>(options)) {
  // Where SIGXFSZ is blocked, a limit on the size of files is an error of
  // write() and does not end the process.
  state_->thread = quiet_thread([state = state_.get()] { state->run(); });
}

BackgroundFiles::~BackgroundFiles() {
  if (state_->made_in.is_foreign()) {
    // The thread is not in this process, and may have held the mutex when it
    // was copied, so nothing of this can be destroyed.
    [[maybe_unused]] const State* const left = state_.release();
    return;
  }
  try {
    close();
  } catch (const std::system_error&) {
  }
}

size_t BackgroundFiles::add(FileDescriptor file, std::string path) {
  state_->require_own_process();
  struct stat status;
  if (::fstat(file.get(), &status) != 0) throw_errno(path);
  const std::lock_guard lock(state_->mutex);
  state_->require_open();
  state_->files.push_back({.descriptor = std::move(file),
                           .path = std::move(path),
                           .size = status.st_size});
  return state_->files.size() - 1;
}

void BackgroundFiles::append(size_t file, std::string_view record) {
  State& state = *state_;
  state.require_own_process();
  std::unique_lock lock(state.mutex);
  state.require_open();
  const auto fits = [&] {
    return state.bytes == 0 ||
           state.bytes + record.size() <= state.options.most_bytes;
  };
  while (!fits() && !state.failure && !state.closed) {
    const uint64_t pass = state.passes_begun + 1;
    state.urgent = true;
    state.work.notify_one();
    state.progress.wait(lock, [&] { return state.passes_ended >= pass; });
  }
  state.require_open();
  if (!fits()) {
    ++state.dropped;
    return;
  }
  state.files[file].pending += record;
  state.bytes += record.size();
  const bool first = state.records++ == 0;
  if (first) state.oldest = Clock::now();
  if (first || state.is_due()) state.work.notify_one();
}

void BackgroundFiles::flush() {
  state_->require_own_process();
  std::unique_lock lock(state_->mutex);
  if (state_->closed) return;
  state_->await_pass(lock);
}

void BackgroundFiles::close() {
  state_->require_own_process();
  std::unique_lock lock(state_->mutex);
  if (std::exchange(state_->closed, true)) return;
  std::exception_ptr failure;
  try {
    state_->await_pass(lock);
  } catch (const std::system_error&) {
    failure = std::current_exception();
  }
  state_->files.clear();
  lock.unlock();
  state_->thread.join();
  if (failure) std::rethrow_exception(failure);
}

std::string BackgroundFiles::take_notice() {
  if (!state_->has_notice.load(std::memory_order_relaxed)) return "";
  state_->require_own_process();
  const std::lock_guard lock(state_->mutex);
  state_->has_notice.store(false, std::memory_order_relaxed);
  return std::exchange(state_->notice, {});
}

BackgroundFiles::Backlog BackgroundFiles::backlog() const {
  state_->require_own_process();
  const std::lock_guard lock(state_->mutex);
  return {.bytes = state_->bytes, .failed = static_cast<bool>(state_->failure)};
}

}  // namespace lockstep::internal
