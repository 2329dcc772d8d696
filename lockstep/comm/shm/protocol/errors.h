#pragma once

#include <stdexcept>
#include <string>

namespace lockstep::shm {

// The group is of no use any more: a rank died or left, or the time was over.
// Every later call fails with the same words.
class GroupBroken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The ranks called different things. All of them get this, with the
// descriptions of all; no data was touched, and the group can go on.
class CallMismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A message was given up: by this rank, whose time for it was over or who asked
// for that, or by its sender. Its memory is the caller's again, and the group
// is as good as before.
class MessageGivenUp : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Shared memory cannot be had between these ranks: the system lends none, or
// they are not of one host. All ranks get this: of the handshake, or of the
// group whose other memory is as good as before.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep::shm
