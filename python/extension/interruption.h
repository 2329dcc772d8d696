#pragma once

#include <exception>

// Python's signals in waits of the library, and its global lock (GIL).
namespace lockstep::internal::python {

// Lets threads that wait in the library look for Python's signals: from now on
// a handler that raises, such as that of Ctrl-C, ends the wait of the main
// thread.
void watch_signals();

// Throws the exception of Python's handler that has ended the last wait of this
// thread. Does nothing if no handler did.
void raise_from_handler();

// Runs `operation`, whose waits Python's signals can end.
template <typename Operation>
auto interruptible(const Operation& operation) {
  try {
    return operation();
  } catch (const std::exception&) {
    raise_from_handler();
    throw;
  }
}

// Releases the GIL, if this thread has it, until the scope ends.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;  // a PyThreadState
};

}  // namespace lockstep::internal::python
