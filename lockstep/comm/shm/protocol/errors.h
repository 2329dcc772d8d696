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

// A message did not come, or was not taken, in the time allowed. It is still
// under way, and the group is as good as before.
class MessageTimeout : public std::runtime_error {
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
