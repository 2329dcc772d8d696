#include "lockstep/comm/uncaught.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <cxxabi.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <new>
#include <optional>
#include <string_view>
#include <typeinfo>

#include "lockstep/base/environment.h"
#include "lockstep/comm/errors.h"
#include "lockstep/worker/error_file.h"
#include "lockstep/worker/rank_environment.h"
#include "lockstep/worker/standby_place.h"

namespace lockstep::internal {
namespace {

std::string mebibytes(uint64_t bytes) {
  return std::to_string(bytes >> 20) + " MiB";
}

// Returns a field of /proc/self/status in bytes, 0 if it does not exist.
uint64_t status_bytes(std::string_view field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field) && line[field.size()] == ':') {
      return std::strtoull(line.c_str() + field.size() + 1, nullptr, 10) << 10;
    }
  }
  return 0;
}

std::string limit_words(decltype(RLIMIT_AS) resource, const char* what) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return "";
  }
  return std::string("; the limit of ") + what + " is " +
         mebibytes(limit.rlim_cur);
}

// Returns how many bytes were wanted, 0 if that is not known; nothing if
// `error` is about something else.
std::optional<uint64_t> wanted_bytes(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return 0;
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  if (torch == nullptr) return std::nullopt;
  const std::string text = torch->what_without_backtrace();
  // LibTorch has no type for this error (c10/core/impl/alloc_cpu.cpp).
  constexpr std::string_view kWords =
      "DefaultCPUAllocator: can't allocate memory: you tried to allocate ";
  const auto found = text.find(kWords);
  if (found == text.npos) return std::nullopt;
  return std::strtoull(text.c_str() + found + kWords.size(), nullptr, 10);
}

}  // namespace

std::string out_of_memory_words(const std::exception& error) {
  const auto wanted = wanted_bytes(error);
  if (!wanted) return "";
  std::string words = "out of memory: the system refused ";
  words += *wanted == 0 ? "an allocation"
                        : mebibytes(*wanted) + " (" + std::to_string(*wanted) +
                              " bytes)";
  words += "; this process has used at most " +
           mebibytes(status_bytes("VmHWM")) +
           " of memory, with what it shares, and " +
           mebibytes(status_bytes("VmPeak")) + " of address space" +
           limit_words(RLIMIT_AS, "its address space (ulimit -v)") +
           limit_words(RLIMIT_DATA, "its own memory (ulimit -d)");
  return words +
         "; raise the limit, divide the model over the ranks (FullyShard), "
         "compute activations again (checkpoint), or take smaller batches";
}

namespace {

std::atomic<int> own_rank{-1};
std::atomic<bool (*)()> misses_peers{nullptr};
std::atomic<std::terminate_handler> handler_before{nullptr};

std::string full_words_of(const std::exception& error) {
  for (const auto& words : {out_of_memory_words(error), words_of(error)}) {
    if (!words.empty()) return words;
  }
  return "an exception of type " + c10::demangle(typeid(error).name()) +
         " without a text";
}

// An operation notes by itself that a peer is gone. Other errors of LibTorch's
// distributed package are echoes if a peer is known to be gone, because they
// may follow from that.
FailureKind kind_of(const std::exception& error) {
  if (dynamic_cast<const c10::DistError*>(&error) == nullptr) {
    return FailureKind::cause;
  }
  const auto ask = misses_peers.load();
  return ask != nullptr && ask() ? FailureKind::echo : FailureKind::cause;
}

// Prints in one write(2), so that the lines of several ranks do not mix.
void print_line(const std::string& words) noexcept {
  try {
    std::string line;
    const int rank = own_rank.load(std::memory_order_relaxed);
    if (rank >= 0) {
      line = "rank " + std::to_string(rank) + ": ";
    } else if (const auto name =
                   stands_by() ? std::nullopt : get_rank_env("RANK")) {
      line = "rank " + *name + ": ";
    }
    for (const char c : words) line += c == '\n' ? ' ' : c;
    line += '\n';
    [[maybe_unused]] const auto written =
        ::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {
    // No memory for the line.
  }
}

[[noreturn]] void handle_terminate() {
  static std::atomic<pid_t> ending{0};
  pid_t thread = 0;
  if (!ending.compare_exchange_strong(thread, ::gettid())) {
    // The handler that was set before has terminated, too.
    if (thread == ::gettid()) std::abort();
    // Another thread is ending the process.
    while (true) ::pause();
  }
  report_current_exception();
  const auto before = handler_before.load();
  if (before != nullptr) before();
  std::abort();
}

}  // namespace

void identify_process(int rank, bool (*function)()) {
  own_rank = rank;
  misses_peers = function;
}

void identify_process(int rank) { own_rank = rank; }

void report_uncaught() {
  const auto before = std::get_terminate();
  if (before == handle_terminate) return;
  // The handler that every program begins with is not called, because it prints
  // the exception again, with LibTorch's stack frames.
  handler_before =
      before == __gnu_cxx::__verbose_terminate_handler ? nullptr : before;
  std::set_terminate(handle_terminate);
}

void note_exception(const std::exception& error) noexcept {
  try {
    const std::string type = c10::demangle(typeid(error).name());
    const std::string words = full_words_of(error);
    const bool named = words.find(type) != words.npos ||
                       type.starts_with("lockstep::internal::");
    note_failure(kind_of(error), named ? words : type + ": " + words);
  } catch (...) {
    // No memory for the words.
  }
}

void report_current_exception() noexcept {
  const auto current = std::current_exception();
  if (!current) {
    const char* const words =
        "the program was ended by std::terminate() without an exception (a "
        "thread that was not joined, or an exception in a noexcept function)";
    note_failure(FailureKind::cause, words);
    return print_line(words);
  }
  try {
    std::rethrow_exception(current);
  } catch (const std::exception& error) {
    note_exception(error);
    print_line(full_words_of(error));
  } catch (...) {
    const auto* type = abi::__cxa_current_exception_type();
    const std::string words =
        "an exception of type " +
        (type != nullptr ? c10::demangle(type->name()) : "unknown");
    note_failure(FailureKind::cause, words);
    print_line(words);
  }
}

}  // namespace lockstep::internal
