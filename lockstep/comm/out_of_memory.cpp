#include "lockstep/comm/out_of_memory.h"

#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <new>
#include <optional>
#include <string_view>

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

}  // namespace lockstep::internal
