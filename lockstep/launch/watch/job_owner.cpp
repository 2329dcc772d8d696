#include "lockstep/launch/watch/job_owner.h"

#include <grp.h>
#include <unistd.h>

#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

bool is_needed(const JobOwner& owner) {
  return ::geteuid() == 0 && owner.user != 0;
}

[[noreturn]] void fail_to_take(const JobOwner& owner) {
  throw_errno("taking the rights of user " + std::to_string(owner.user) +
              ", whose job it is");
}

constexpr auto kUnchangedUser = static_cast<uid_t>(-1);
constexpr auto kUnchangedGroup = static_cast<gid_t>(-1);

}  // namespace

void give_up_root(const JobOwner& owner) {
  if (!is_needed(owner)) return;
  const auto [user, group] = owner;
  if (::setgroups(0, nullptr) != 0 || ::setresgid(group, group, group) != 0 ||
      ::setresuid(user, user, user) != 0) {
    fail_to_take(owner);
  }
}

OwnersRights::OwnersRights(const JobOwner& owner) : taken_(is_needed(owner)) {
  if (!taken_) return;
  if (::setgroups(0, nullptr) != 0 ||
      ::setresgid(kUnchangedGroup, owner.group, kUnchangedGroup) != 0 ||
      ::setresuid(kUnchangedUser, owner.user, kUnchangedUser) != 0) {
    fail_to_take(owner);
  }
}

OwnersRights::~OwnersRights() {
  // If the system refuses, this process goes on with fewer rights. The groups
  // do not come back: root needs none.
  if (taken_ && ::setresuid(kUnchangedUser, 0, kUnchangedUser) == 0) {
    [[maybe_unused]] const int ignored =
        ::setresgid(kUnchangedGroup, ::getgid(), kUnchangedGroup);
  }
}

}  // namespace lockstep::internal
