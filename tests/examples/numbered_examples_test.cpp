// The numbered examples do what their opening comments say. There, a line "// $
// ..." is a command, and the lines up to the next empty one are its output.

#include <gmock/gmock.h>

#include <algorithm>
#include <sstream>

#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const fs::path kExamples = LOCKSTEP_SOURCE_DIR "/examples";

std::vector<std::string> numbered_examples() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kExamples)) {
    const std::string name = entry.path().stem().string();
    if (name[0] >= '0' && name[0] <= '9') names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

struct Session {
  std::vector<std::string> command;
  std::vector<std::string> output;
};

std::vector<std::string> words(const std::string& line) {
  std::istringstream stream(line);
  return {std::istream_iterator<std::string>(stream), {}};
}

std::vector<Session> sessions_of(const std::string& source) {
  std::vector<Session> sessions;
  bool inside = false;
  for (const auto& line : lines(source)) {
    if (!line.starts_with("//")) break;
    if (line.starts_with("//   $ ")) {
      sessions.push_back({words(line.substr(7)), {}});
      inside = true;
    } else if (inside && line.starts_with("//   ")) {
      sessions.back().output.push_back(line.substr(5));
    } else {
      inside = false;
    }
  }
  return sessions;
}

// Returns the lines without the warning of CPUs that lack AVX-512.
std::vector<std::string> without_slow_autocast(const std::string& err) {
  auto kept = lines(err);
  std::erase_if(kept, [](const std::string& line) {
    return line.find("this CPU has no fast bfloat16") != line.npos;
  });
  return kept;
}

class NumberedExamples : public ExampleTest,
                         public ::testing::WithParamInterface<std::string> {
 protected:
  std::string source() const {
    return read_file(kExamples / (GetParam() + ".cpp"));
  }
};

TEST_P(NumberedExamples, PrintsWhatItSays) {
  const auto sessions = sessions_of(source());
  std::vector<std::vector<std::string>> commands;
  for (const auto& [command, output] : sessions) {
    SCOPED_TRACE(::testing::PrintToString(command));
    commands.push_back(command);
    auto here = command;
    for (auto& word : here) {
      if (word.starts_with("build/bin/")) {
        word = LOCKSTEP_BIN_DIR + word.substr(9);
      }
    }
    ASSERT_TRUE(here.front().starts_with('/'));
    auto result = run_program(
        here, {.environment = {"OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="},
               .folder = scratch()});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(without_slow_autocast(result.err), IsEmpty());
    EXPECT_THAT(lines(result.out), ElementsAreArray(output));
    EXPECT_THAT(output, Not(IsEmpty()));
  }
  const std::string program = "build/bin/" + GetParam();
  EXPECT_THAT(commands, Contains(std::vector<std::string>{program}));
  EXPECT_THAT(commands,
              Contains(std::vector<std::string>{
                  "build/bin/lockstep", "run", "--nproc-per-node=2", program}));
}

TEST_P(NumberedExamples, IsShortAndInTheIndex) {
  EXPECT_LE(lines(source()).size(), 80u);
  EXPECT_THAT(read_file(kExamples / "README.md"),
              HasSubstr("build/bin/" + GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, NumberedExamples,
                         ::testing::ValuesIn(numbered_examples()),
                         [](const auto& example) {
                           return "Example" + example.param;
                         });

}  // namespace
}  // namespace lockstep::internal::testing
