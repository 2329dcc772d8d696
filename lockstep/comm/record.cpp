#include "lockstep/comm/record.h"

#include "lockstep/comm/uncaught.h"

namespace lockstep {

void record_error(const std::exception& error) noexcept {
  internal::note_exception(error);
}

int record(const std::function<int()>& body) noexcept {
  try {
    return body();
  } catch (...) {
    internal::report_current_exception();
    return 1;
  }
}

}  // namespace lockstep
