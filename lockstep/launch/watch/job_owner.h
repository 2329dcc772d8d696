#pragma once

#include <sys/types.h>

namespace lockstep::internal {

// The user whose job a command looks at, with the rights that go with it. Root
// may look at the jobs of all users, but what a job names, a file or a program,
// must not become root's to read, move or run. (Groups that the user has beside
// its first one are not among these rights.)
struct JobOwner {
  uid_t user = 0;
  gid_t group = 0;
};

// If this process is root's, gives it the rights of `owner` for good, also for
// the programs that it starts. Throws std::system_error.
void give_up_root(const JobOwner& owner);

// While it lives, a process of root's has the rights of `owner` for files.
// Other processes' rights, and the rights to signal this one, stay as they are.
class OwnersRights {
 public:
  // Throws std::system_error.
  explicit OwnersRights(const JobOwner& owner);
  ~OwnersRights();
  OwnersRights(const OwnersRights&) = delete;
  OwnersRights& operator=(const OwnersRights&) = delete;

 private:
  bool taken_;
};

}  // namespace lockstep::internal
