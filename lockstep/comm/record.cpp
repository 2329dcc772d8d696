#include "lockstep/comm/record.h"

#include "lockstep/comm/uncaught.h"

namespace lockstep {

void record_error(const std::exception& error) noexcept {
  note_exception(error);
}

int record(const std::function<int()>& body) noexcept {
  try {
    return body();
  } catch (...) {
    report_current_exception();
    return 1;
  }
}

}  // namespace lockstep
