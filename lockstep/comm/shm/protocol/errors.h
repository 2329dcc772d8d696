#pragma once

#include <stdexcept>
#include <string>

namespace lockstep::internal::shm {

// The group cannot be used any more: a rank died or left, or a collective timed
// out. Every later call fails with the same words.
class GroupBroken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The ranks called different things. All of them throw this, with the
// descriptions of all; no data was touched, and the group can go on. Also
// thrown by a receive, on its rank only, if its message has another size or
// dtype.
class CallMismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A message was given up: by this rank, because its time was over or the caller
// asked for it, or by its sender. The caller may use the message's memory
// again, and the group is as good as before.
class MessageGivenUp : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// These ranks cannot share memory: the system gives none, or they are not on
// one host. All ranks throw this. If the handshake throws it there is no group;
// if a call of a group throws it, the group's other memory is as good as
// before.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep::internal::shm
