#pragma once

#include <exception>
#include <string>

namespace lockstep::internal::testing {

// Returns what() of the exception that `action` throws, or "" if there is none.
template <class Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace lockstep::internal::testing
