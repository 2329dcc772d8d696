#include "lockstep/base/host_name.h"

#include <limits.h>
#include <unistd.h>

#include <array>

namespace lockstep::internal {

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name[0] == '\0' ? "localhost" : name.data();
}

}  // namespace lockstep::internal
