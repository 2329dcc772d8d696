#include "lockstep/comm/errors.h"

namespace lockstep::internal {

std::string words_of(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  return torch != nullptr ? torch->what_without_backtrace() : error.what();
}

std::string words_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return words_of(error);
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace lockstep::internal
