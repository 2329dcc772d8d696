#include "lockstep/base/error_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep {
namespace {

// What the process has noted. Never destroyed: a process may fail while its
// static objects are destroyed.
struct Noted {
  std::mutex mutex{};
  std::optional<FailureKind> kind{};
  pid_t pid = 0;  // that noted first
};

Noted& noted() {
  static Noted& instance = *std::make_unique<Noted>().release();
  return instance;
}

// The length of the UTF-8 sequence that `text` begins with; 0: it is none.
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const size_t length = byte(0) < 0x80   ? 1
                        : byte(0) < 0xc2 ? 0
                        : byte(0) < 0xe0 ? 2
                        : byte(0) < 0xf0 ? 3
                        : byte(0) < 0xf5 ? 4
                                         : 0;
  for (size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return 0;
  }
  // Overlong forms, surrogates, and what lies past U+10FFFF.
  if ((byte(0) == 0xe0 && byte(1) < 0xa0) ||
      (byte(0) == 0xed && byte(1) > 0x9f) ||
      (byte(0) == 0xf0 && byte(1) < 0x90) ||
      (byte(0) == 0xf4 && byte(1) > 0x8f)) {
    return 0;
  }
  return length;
}

// As a string of JSON. A byte that is no UTF-8 becomes '?'.
std::string quoted(std::string_view text) {
  std::string json = "\"";
  while (!text.empty()) {
    const char first = text.front();
    const size_t length = sequence_length(text);
    if (first == '"' || first == '\\') {
      json += {'\\', first};
    } else if (first == '\n') {
      json += "\\n";
    } else if (length == 0 || static_cast<unsigned char>(first) < 0x20) {
      json += length == 0 ? '?' : ' ';
    } else {
      json += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return json + "\"";
}

std::string document(FailureKind kind, std::string_view message) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto words = quoted(message);
  return "{\"message\": {\"message\": " + words +
         ", \"extraInfo\": {\"timestamp\": \"" +
         std::to_string(std::chrono::floor<std::chrono::seconds>(now).count()) +
         "\", \"time_ns\": \"" +
         std::to_string(std::chrono::nanoseconds(now).count()) +
         "\", \"py_callstack\": " + words + ", \"kind\": \"" +
         (kind == FailureKind::echo ? "echo" : "cause") + "\"}}}\n";
}

void write_aside(const std::string& path, std::string_view bytes) {
  const auto aside = path + "." + std::to_string(::getpid());
  FileDescriptor file(
      ::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file) return;
  while (!bytes.empty()) {
    const ssize_t count = ::write(file.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      ::unlink(aside.c_str());
      return;
    }
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  ::rename(aside.c_str(), path.c_str());
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
    if (const auto path = get_env("TORCHELASTIC_ERROR_FILE")) {
      write_aside(*path, document(kind, message));
    }
  } catch (...) {
    // No memory: the process fails without words.
  }
}

bool failure_noted() noexcept {
  Noted& all = noted();
  std::lock_guard lock(all.mutex);
  return all.kind.has_value();
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
    // No memory.
  }
}

}  // namespace lockstep
