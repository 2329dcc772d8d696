#pragma once

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

struct ExistingGroups {
  // The default group and the others that this rank is a member of, in the
  // order in which they were made.
  std::vector<ProcessGroupPtr> groups{};
  // How many groups were made since init_process_group(), those included that
  // this rank is not a member of; torch.distributed.get_pg_count().
  int count = 0;
};

// Any thread may call. Defined beside the groups, in init.cpp.
ExistingGroups existing_groups();

}  // namespace lockstep::internal
