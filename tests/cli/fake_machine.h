#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal::testing {

// A test with folders in place of /proc, /sys and /dev, which begin empty.
class FakeMachine : public ::testing::Test {
 protected:
  FakeMachine() {
    std::string name =
        (std::filesystem::temp_directory_path() / "machine_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "mkdtemp";
    root_ = name;
  }
  ~FakeMachine() override { std::filesystem::remove_all(root_); }

  // Writes root/`path`: "proc/loadavg".
  void write(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  MachineRoots roots() const {
    return {.proc = root_ / "proc", .sys = root_ / "sys", .dev = root_ / "dev"};
  }
  const std::filesystem::path& root() const { return root_; }

 private:
  std::filesystem::path root_;
};

}  // namespace lockstep::internal::testing
