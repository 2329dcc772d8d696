#include "lockstep/base/native_stack.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace lockstep::internal {
namespace {

// Names of templates may have kilobytes.
constexpr size_t kLongestName = 200;

std::string_view file_name(std::string_view path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
      std::free);
  std::string text = name ? name.get() : symbol;
  if (text.size() > kLongestName) text = text.substr(0, kLongestName) + "...";
  return text;
}

}  // namespace

void prepare_stacks() { capture_stack(); }

NativeStack capture_stack() noexcept {
  NativeStack stack;
  stack.size = ::backtrace(stack.addresses.data(), NativeStack::kMost);
  return stack;
}

void write_stack(const NativeStack& stack, int fd) noexcept {
  ::backtrace_symbols_fd(stack.addresses.data(), stack.size, fd);
}

std::string frame_text(std::string_view line) {
  const size_t open = line.rfind('(');
  const size_t close = line.rfind(')');
  if (open == std::string_view::npos || close == std::string_view::npos ||
      close < open) {
    return std::string(line);
  }
  const std::string module(file_name(line.substr(0, open)));
  const std::string_view inside = line.substr(open + 1, close - open - 1);
  const size_t plus = inside.rfind('+');
  const std::string symbol(inside.substr(0, plus));
  const std::string offset(
      plus == std::string_view::npos ? "" : inside.substr(plus));
  if (symbol.empty()) return module + " " + offset;
  return demangled(symbol) + " " + offset + " in " + module;
}

std::string frame_text(void* address) {
  Dl_info info{};
  // A return address may be the first byte of the next function.
  const auto place = reinterpret_cast<uintptr_t>(address) - 1;
  if (::dladdr(reinterpret_cast<void*>(place), &info) == 0 ||
      info.dli_fname == nullptr) {
    char text[32];
    std::snprintf(text, sizeof text, "%p", address);
    return text;
  }
  const bool named = info.dli_sname != nullptr;
  const auto base =
      reinterpret_cast<uintptr_t>(named ? info.dli_saddr : info.dli_fbase);
  char offset[32];
  std::snprintf(offset, sizeof offset, "+0x%zx",
                static_cast<size_t>(place + 1 - base));
  return frame_text(std::string(info.dli_fname) + "(" +
                    (named ? info.dli_sname : "") + offset + ")");
}

}  // namespace lockstep::internal
