#include "lockstep/observe/recorded_spans.h"

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace lockstep::internal {
namespace {

// Lets LibTorch's callbacks see this thread, for the duration of a scope.
class InProfiledThread {
 public:
  explicit InProfiledThread(const at::ThreadLocalState& profiled) {
    if (!at::hasThreadLocalCallbacks()) guard_.emplace(profiled);
  }

 private:
  std::optional<at::ThreadLocalStateGuard> guard_;
};

std::unordered_map<std::string, c10::IValue> arguments_of(
    const SpanBegin& begin) {
  std::unordered_map<std::string, c10::IValue> arguments;
  for (const auto& [key, value] : begin.attributes) {
    if (const auto* number = std::get_if<int64_t>(&value)) {
      arguments.emplace(key, *number);
    } else {
      arguments.emplace(key, std::string(std::get<std::string_view>(value)));
    }
  }
  return arguments;
}

}  // namespace

void RecordedSpans::on_begin(const SpanBegin& begin) noexcept {
  if (begin.detached) return;
  const InProfiledThread scope(profiled_);
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  auto function = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  std::string name = "lockstep::";
  name.append(begin.category).append("::").append(begin.name);
  if (function->needsInputs()) {
    const auto arguments = arguments_of(begin);
    function->before(name, &arguments);
  } else {
    function->before(name);
  }
  const std::lock_guard lock(mutex_);
  open_.emplace(begin.id, std::move(function));
}

void RecordedSpans::on_end(const SpanEnd& end) noexcept {
  std::unique_ptr<at::RecordFunction> function;
  {
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(end.id);
    if (found == open_.end()) return;
    function = std::move(found->second);
    open_.erase(found);
  }
  const InProfiledThread scope(profiled_);
  function.reset();
}

}  // namespace lockstep::internal
