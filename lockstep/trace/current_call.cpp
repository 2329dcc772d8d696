#include "lockstep/trace/current_call.h"

#include <utility>

namespace lockstep::internal {
namespace {

thread_local CurrentCall* call_of_thread = nullptr;
thread_local const char* function_of_thread = nullptr;

}  // namespace

CurrentCall* current_call() noexcept { return call_of_thread; }

CurrentCallScope::CurrentCallScope(CurrentCall* call) noexcept
    : before_(std::exchange(call_of_thread, call)) {}

CurrentCallScope::~CurrentCallScope() { call_of_thread = before_; }

UserFunction::UserFunction(const char* name) noexcept
    : outermost_(function_of_thread == nullptr) {
  if (outermost_) function_of_thread = name;
}

UserFunction::~UserFunction() {
  if (outermost_) function_of_thread = nullptr;
}

const char* user_function() noexcept { return function_of_thread; }

}  // namespace lockstep::internal
