#pragma once

#include <signal.h>

#include <exception>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// Thrown to leave the program through every destructor.
class Interrupted : public std::exception {
 public:
  explicit Interrupted(int signal) : signal_(signal) {}
  int signal() const { return signal_; }
  const char* what() const noexcept override { return "interrupted"; }

 private:
  int signal_;
};

// Makes SIGINT, SIGTERM and SIGHUP readable from a descriptor, for poll(). They
// are blocked for the whole program from construction on. A program makes one
// StopSignal, before it starts any thread.
class StopSignal {
 public:
  StopSignal();
  int fd() const { return fd_.get(); }
  // Throws Interrupted if one has come.
  void check() const;
  // The signal mask that a child must start with.
  const sigset_t& original_mask() const { return original_; }

 private:
  sigset_t original_{};
  FileDescriptor fd_;
};

}  // namespace lockstep::internal
