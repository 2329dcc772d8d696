#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

// Tests over ranks that are real processes.
//
//   WORLD_TEST(ProcessGroupContract, AllReduceSums, 1, 2, 3) {
//     auto group = lockstep::init_process_group();
//     ... EXPECT_EQ(...) ...
//   }
//
// registers ProcessGroupContract.AllReduceSums/1, /2 and /3. The body runs in
// every rank of a world of that size. A test program starts each world once, by
// executing itself again, and runs all its cases in it: LibTorch takes 0.3 s to
// start. After a failed case its world is killed, and a fresh one is started
// for the next case.
//
// A failed expectation, an exception or the death of a rank fails the case with
// that rank named. A case that has not ended after kCaseDeadline fails, and the
// failure names the ranks that have not answered. Ranks have the launcher's
// environment (RANK, LOCAL_RANK, MASTER_PORT, ...) and OMP_NUM_THREADS=1, and
// end when the test program does.
namespace lockstep::internal::testing {

inline constexpr std::chrono::seconds kCaseDeadline{180};
// How long the others may take once one rank has failed.
inline constexpr std::chrono::seconds kAfterFailureDeadline{5};

struct World {
  int rank;
  int size;
  // A folder that the ranks of this world share; removed with the world.
  std::filesystem::path folder;
};

using WorldTestBody = std::function<void(const World& world)>;

// Does what WORLD_TEST does, for cases that are made in a loop. Returns true,
// so that it can initialise a static variable.
bool register_world_test(const std::string& suite, const std::string& name,
                         const std::vector<int>& sizes, WorldTestBody body,
                         const char* file, int line);

// The main() of a test program; in a process that was started as a rank, runs
// that rank.
int run_tests(int argc, char** argv);

}  // namespace lockstep::internal::testing

#define WORLD_TEST(suite, name, ...)                                      \
  static void suite##_##name##_body(                                      \
      const ::lockstep::internal::testing::World&);                       \
  [[maybe_unused]] static const bool suite##_##name##_registered =        \
      ::lockstep::internal::testing::register_world_test(                 \
          #suite, #name, {__VA_ARGS__}, &suite##_##name##_body, __FILE__, \
          __LINE__);                                                      \
  static void suite##_##name##_body(                                      \
      [[maybe_unused]] const ::lockstep::internal::testing::World& world)
