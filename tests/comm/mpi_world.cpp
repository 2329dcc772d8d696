// Replaces the harness's main.cpp and process_world.cpp for ranks that mpirun
// starts: each process is one rank and a test program of its own, and all run
// the cases for worlds of their size, in the same order.
// tests/comm/mpi_test.cpp starts them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "tests/harness/process_world.h"

namespace lockstep::internal::testing {
namespace {

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? -1 : std::atoi(text);
}

class WorldCase : public ::testing::Test {
 public:
  explicit WorldCase(WorldTestBody body) : body_(std::move(body)) {}
  void TestBody() override {
    const World world{.rank = number("OMPI_COMM_WORLD_RANK"),
                      .size = number("OMPI_COMM_WORLD_SIZE"),
                      .folder = std::getenv("LOCKSTEP_TEST_FOLDER")};
    body_(world);
  }

 private:
  WorldTestBody body_;
};

}  // namespace

bool register_world_test(const std::string& suite, const std::string& name,
                         const std::vector<int>& sizes, WorldTestBody body,
                         const char* file, int line) {
  const int size = number("OMPI_COMM_WORLD_SIZE");
  for (const int wanted : sizes) {
    if (wanted != size) continue;
    ::testing::RegisterTest(
        suite.c_str(), (name + "/" + std::to_string(size)).c_str(), nullptr,
        nullptr, file, line, [body]() -> ::testing::Test* {
          return std::make_unique<WorldCase>(body).release();
        });
  }
  return true;
}

}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
