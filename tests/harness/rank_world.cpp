#include "tests/harness/rank_world.h"

#include <stdlib.h>

#include <system_error>

namespace lockstep::internal::testing {
namespace {

std::filesystem::path make_folder() {
  auto path = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX")
                  .string();
  if (::mkdtemp(path.data()) == nullptr) throw_errno("mkdtemp");
  return path;
}

}  // namespace

RankWorld::RankWorld(int size, const std::vector<std::string>& environment)
    : port_(StorePort::hold("127.0.0.1", 0)), folder_(make_folder()) {
  const auto count = std::to_string(size);
  for (int rank = 0; rank < size; ++rank) {
    const auto number = std::to_string(rank);
    std::vector<std::string> variables{
        "RANK=" + number, "LOCAL_RANK=" + number, "WORLD_SIZE=" + count,
        "LOCAL_WORLD_SIZE=" + count, "MASTER_ADDR=" + port_.address(),
        "MASTER_PORT=" + std::to_string(port_.port()), "OMP_NUM_THREADS=1",
        // LibTorch asks for the name of each address that it connects to; a
        // name server that does not answer would cost 5 s each time.
        "RES_OPTIONS=timeout:1 attempts:1",
        "LOCKSTEP_TEST_FOLDER=" + folder_.string(),
        "LOCKSTEP_FLIGHT_DIR=" + (folder_ / "flight").string()};
    variables.insert(variables.end(), environment.begin(), environment.end());
    ranks_.emplace_back(rank, variables);
  }
}

RankWorld::~RankWorld() {
  ranks_.clear();  // kills them: after this nothing writes into the folder
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace lockstep::internal::testing
