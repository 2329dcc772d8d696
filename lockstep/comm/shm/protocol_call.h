#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/shm/protocol/errors.h"

// Calls the protocol from c10d.
namespace lockstep::internal::shm {

// Runs `call` and turns errors of the protocol into errors of c10d. Costs
// nothing if there is no error.
template <typename Call>
decltype(auto) translated(Call&& call) {
  auto as_c10 = [](const std::exception& error) {
    return c10::DistBackendError(error.what());
  };
  try {
    return std::forward<Call>(call)();
  } catch (const GroupBroken& error) {
    throw as_c10(error);
  } catch (const CallMismatch& error) {
    throw Disagreement(error.what());
  } catch (const MessageGivenUp& error) {
    throw as_c10(error);
  } catch (const Unavailable& error) {
    throw as_c10(error);
  } catch (const std::system_error& error) {
    throw as_c10(error);
  }
}

// Returns the time that is left for the next step of an operation. It is never
// zero, so that the step still waits and its error says what it waited for.
inline std::chrono::milliseconds left(const Deadline& deadline) {
  return std::max(deadline.remaining(), std::chrono::milliseconds(1));
}

// Throws in a child that was forked after `made_in` was made. The child has
// copies of objects that stand for the parent's memory, which it must not write
// to.
inline void refuse_in_child(const ProcessMark& made_in) {
  if (!made_in.is_foreign()) return;
  throw std::runtime_error(
      "memory that ranks share is used in a process that was forked from a "
      "rank; use it in the rank itself only");
}

}  // namespace lockstep::internal::shm
