#include "interruption.h"

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <stdexcept>

#include "lockstep/base/interruption.h"

namespace lockstep::internal::python {
namespace {

// Only the main thread runs handlers, so only that one has an exception here.
thread_local std::optional<py::error_already_set> raised;
unsigned long main_thread = 0;

bool interpreter_runs() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

void check_signals() {
  if (PyThread_get_thread_ident() != main_thread || !interpreter_runs()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  raised.emplace();
  // A std::runtime_error breaks the group: the peers are told.
  throw std::runtime_error("it was interrupted by a signal");
}

}  // namespace

void watch_signals() {
  main_thread = py::module_::import("threading")
                    .attr("main_thread")()
                    .attr("ident")
                    .cast<unsigned long>();
  set_interruption_check(check_signals);
}

void raise_from_handler() {
  if (!raised) return;
  auto error = std::move(*raised);
  raised.reset();
  throw error;
}

WithoutGil::WithoutGil() {
  if (interpreter_runs() && PyGILState_Check()) state_ = PyEval_SaveThread();
}
WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

}  // namespace lockstep::internal::python
