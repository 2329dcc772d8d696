#pragma once

#include <gmock/gmock.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {

// Runs `lockstep inspect snapshot` on files of the test.
class InspectSnapshotTest : public ProgramTest {
 protected:
  // The beginning of a line on stderr.
  static constexpr const char* kHead = "lockstep inspect snapshot: ";

  std::string path(const std::string& name) const {
    return (scratch() / name).string();
  }

  ProgramResult inspect(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     {LOCKSTEP_BIN_DIR "/lockstep", "inspect", "snapshot"});
    return run_program(arguments, {}, std::chrono::seconds(60));
  }

  // Returns the JSON of a run that must end with `exit_code`.
  nlohmann::json inspect_json(std::vector<std::string> arguments,
                              int exit_code = 0) {
    arguments.insert(arguments.begin(), "--json");
    const auto result = inspect(std::move(arguments));
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    return nlohmann::json::parse(result.out);
  }

  // Returns stderr of a run that must print nothing else.
  std::string one_line_error(const std::vector<std::string>& arguments,
                             int exit_code) {
    const auto result = inspect(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    return result.err;
  }

  // Changes one bit where the file has `bytes` for the first time.
  static void flip_bit(const std::string& file, const std::string& bytes) {
    std::string content = read_file(file);
    const auto at = content.find(bytes);
    ASSERT_NE(at, std::string::npos);
    content[at] = static_cast<char>(content[at] ^ 1);
    std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
  }

  // Returns the entry of a listing in JSON with that name.
  static nlohmann::json tensor_in(const nlohmann::json& listing,
                                  const std::string& name) {
    for (const auto& tensor : listing.at("tensors")) {
      if (tensor.at("name") == name) return tensor;
    }
    ADD_FAILURE() << name << " is not listed in " << listing.dump();
    return {};
  }
};

}  // namespace lockstep::internal::testing
