#pragma once

#include <exception>
#include <string>

namespace lockstep::internal {

// Returns the message of an exception, without a stack trace.
std::string words_of(const std::exception_ptr& failure);

}  // namespace lockstep::internal
