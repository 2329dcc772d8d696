#pragma once

#include <signal.h>

#include <exception>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::bench {

// Leaves the program through every destructor.
class Interrupted : public std::exception {
 public:
  explicit Interrupted(int signal) : signal_(signal) {}
  int signal() const { return signal_; }
  const char* what() const noexcept override { return "interrupted"; }

 private:
  int signal_;
};

// SIGINT, SIGTERM and SIGHUP as a descriptor: blocked for the whole program
// from construction on, for poll() to see. One a program, before any thread.
class StopSignal {
 public:
  StopSignal();
  int fd() const { return fd_.get(); }
  // Throws Interrupted if one has come.
  void check() const;
  // What a child is to start with.
  const sigset_t& original_mask() const { return original_; }

 private:
  sigset_t original_{};
  FileDescriptor fd_;
};

}  // namespace lockstep::bench
