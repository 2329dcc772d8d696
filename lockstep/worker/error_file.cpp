#include "lockstep/worker/error_file.h"

#include <unistd.h>

#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "lockstep/base/environment.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/base/whole_file.h"

namespace lockstep::internal {
namespace {

// The failure that the process has noted. Never destroyed, because a process
// may fail while its static objects are destroyed.
struct Noted {
  std::mutex mutex{};
  std::optional<FailureKind> kind{};
  std::string message{};
  pid_t pid = 0;  // of the process that noted first
};

Noted& noted() {
  static NoDestructor<Noted> instance;
  return *instance;
}

const char* name_of(FailureKind kind) {
  return kind == FailureKind::echo ? "echo" : "cause";
}

// The launcher reads 1 MiB of a file. The file has the message twice, and a
// byte of it may take six.
constexpr size_t kLongestMessage = 64 << 10;

// Bytes that are not valid UTF-8 become U+FFFD.
std::string document(FailureKind kind, std::string_view whole) {
  std::string message(whole.substr(0, kLongestMessage));
  if (message.size() < whole.size()) message += " ...";
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(now).count();
  const auto time_ns = std::chrono::nanoseconds(now).count();
  const nlohmann::json json{{"message",
                             {{"message", message},
                              {"extraInfo",
                               {{"timestamp", std::to_string(seconds)},
                                {"time_ns", std::to_string(time_ns)},
                                {"py_callstack", message},
                                {"kind", name_of(kind)}}}}}};
  return json.dump(-1, ' ', /*ensure_ascii=*/false,
                   nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace

void note_failure(FailureKind kind, std::string_view message) noexcept {
  try {
    Noted& all = noted();
    std::lock_guard lock(all.mutex);
    if (all.kind && (*all.kind != FailureKind::cause_without_words ||
                     kind == FailureKind::cause_without_words)) {
      return;
    }
    if (all.pid == 0) all.pid = ::getpid();
    if (all.pid != ::getpid()) return;
    all.kind = kind;
    all.message = message.substr(0, kLongestMessage);
    if (const auto path = get_env("TORCHELASTIC_ERROR_FILE")) {
      write_aside(*path, document(kind, message));
    }
  } catch (...) {
    // Out of memory: the process fails without an error file.
  }
}

std::string noted_echo() {
  Noted& all = noted();
  std::lock_guard lock(all.mutex);
  const bool is_own = all.pid == ::getpid();
  return is_own && all.kind == FailureKind::echo ? all.message : "";
}

void forget_failure() noexcept {
  Noted& all = noted();
  std::lock_guard lock(all.mutex);
  if (!all.kind || all.pid != ::getpid()) return;
  all.kind.reset();
  try {
    if (const auto path = get_env("TORCHELASTIC_ERROR_FILE")) {
      ::unlink(path->c_str());
    }
  } catch (...) {
    // Out of memory: the file stays.
  }
}

}  // namespace lockstep::internal
