// Runs the documentation's programs and commands page by page, and checks what
// they print (snippets.py describes how a page marks them).

#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <regex>

#include "lockstep/launch/process/store_port.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::chrono::seconds kAllowed{180};

const json& pages() {
  static const json all = json::parse(std::ifstream(LOCKSTEP_SNIPPETS));
  return all;
}

std::vector<std::string> page_names() {
  std::vector<std::string> names;
  for (const auto& page : pages()) names.push_back(page["page"]);
  return names;
}

// Returns whether `line` matches `pattern`, in which "..." stands for any text.
bool matches(const std::string& line, const std::string& pattern) {
  constexpr std::string_view kAny = "...";
  size_t at = 0;
  size_t piece = 0;
  while (true) {
    const size_t end = pattern.find(kAny, piece);
    const std::string part = pattern.substr(piece, end - piece);
    const size_t found = end == std::string::npos && line.size() >= part.size()
                             ? line.size() - part.size()
                             : line.find(part, at);
    if (found == std::string::npos || found < at ||
        (piece == 0 && found != 0) || line.compare(found, part.size(), part)) {
      return false;
    }
    at = found + part.size();
    if (end == std::string::npos) return at == line.size();
    piece = end + kAny.size();
  }
}

// Expects the lines of `expected` in any order, because ranks print in any
// order. A line that is exactly "..." stands for any number of lines.
void expect_lines(std::vector<std::string> printed,
                  std::vector<std::string> expected, const std::string& all) {
  const bool more = std::erase(expected, "...") > 0;
  for (const auto& pattern : expected) {
    const auto line = std::ranges::find_if(
        printed, [&](const auto& each) { return matches(each, pattern); });
    EXPECT_NE(line, printed.end()) << "not printed: " << pattern << "\nbut\n"
                                   << all;
    if (line != printed.end()) printed.erase(line);
  }
  if (!more) {
    EXPECT_THAT(printed, ::testing::IsEmpty()) << "is not in the page";
  }
}

class Documentation : public ProgramTest,
                      public ::testing::WithParamInterface<std::string> {
 protected:
  Documentation() {
    const auto page = std::ranges::find_if(
        pages(), [](const json& each) { return each["page"] == GetParam(); });
    page_ = *page;
    fs::create_directories(scratch());
    for (const auto& program : page_["programs"]) {
      const std::string name = program["name"];
      fs::create_symlink(LOCKSTEP_BIN_DIR "/tests/docs_programs",
                         scratch() / name);
      const std::string called = program["called"];
      if (!called.empty()) fs::create_symlink(name, scratch() / called);
    }
    // Gloo's threads abort some Python processes ("terminate called without an
    // active exception") after all is done.
    constexpr const char* kEnd =
        "\nif __name__ == \"__main__\":\n"
        "    import os, sys\n"
        "    sys.stdout.flush()\n"
        "    os._exit(0)\n";
    for (const auto& script : page_["scripts"]) {
      std::ofstream(scratch() / std::string(script["name"]))
          << std::string(script["text"]) << kEnd;
    }
  }

  ProgramResult run_here(const std::vector<std::string>& command) {
    std::vector<std::string> words{
        "/usr/bin/env",
        "PATH=" LOCKSTEP_BIN_DIR ":" +
            fs::path(LOCKSTEP_TORCH_PYTHON).parent_path().string() + ":" +
            std::getenv("PATH")};
    // torchrun, which starts the page's scripts, leaves folders in TMPDIR.
    if (!page_["scripts"].empty()) {
      words.insert(words.begin() + 1,
                   {"-u", "TMPDIR", "TMPDIR=" + scratch().string()});
    }
    words.insert(words.end(), command.begin(), command.end());
    return run_program(
        words,
        {.environment = {"OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=",
                         "PORT=" + std::to_string(port_.port()),
                         // Otherwise torch leaves a folder in TMPDIR.
                         "TORCHINDUCTOR_CACHE_DIR=" + scratch().string()},
         .folder = scratch()},
        kAllowed);
  }

  // Returns whether a command of the page starts the program with ranks.
  bool page_starts(const std::string& called) const {
    const std::regex command("lockstep run .*\\./" + called + "\\b");
    return !called.empty() &&
           std::ranges::any_of(page_["steps"], [&](const json& step) {
             return std::regex_search(step["text"].get<std::string>(), command);
           });
  }

  json page_;
  StorePort port_ = StorePort::hold("127.0.0.1", 0);
};

TEST_P(Documentation, CommandsDoWhatThePageSays) {
  for (const auto& skipped : page_["skipped"]) {
    std::cout << "not run: " << skipped["where"].get<std::string>() << ": "
              << skipped["why"].get<std::string>() << "\n";
  }
  if (!page_["scripts"].empty() && !fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python with torch at " LOCKSTEP_TORCH_PYTHON;
  }
  for (const auto& step : page_["steps"]) {
    const std::string text = step["text"];
    SCOPED_TRACE(step["where"].get<std::string>() + ":\n" + text);
    if (step["kind"] == "python") {
      if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
        GTEST_SKIP() << "no Python with torch at " LOCKSTEP_TORCH_PYTHON;
      }
      const auto result = run_here({LOCKSTEP_TORCH_PYTHON, "-c", text});
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    } else if (step["kind"] == "sh") {
      const auto result = run_here({"/bin/sh", "-e", "-c", text});
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    } else {
      const auto result = run_here({"/bin/sh", "-c", "exec 2>&1\n" + text});
      expect_lines(lines(result.out), step["output"], result.out);
    }
  }
}

TEST_P(Documentation, ProgramsRunAloneAndInTwoRanks) {
  for (const auto& program : page_["programs"]) {
    if (!program["run"]) continue;
    const std::string name = "./" + program["name"].get<std::string>();
    SCOPED_TRACE(program["where"].get<std::string>());
    for (const std::string launcher :
         {"", "lockstep run --nproc-per-node=2 "}) {
      // CommandsDoWhatThePageSays does it.
      if (!launcher.empty() && page_starts(program["called"])) continue;
      for (int start = 1; start <= program["starts"].get<int>(); ++start) {
        SCOPED_TRACE("start " + std::to_string(start));
        const auto result = run_here({"/bin/sh", "-c", launcher + name});
        EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
      }
    }
  }
}

class Names : public ProgramTest {};

TEST_F(Names, AreThoseOfTheInstalledTorch) {
  if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python with torch at " LOCKSTEP_TORCH_PYTHON;
  }
  const auto result = run_program(
      {LOCKSTEP_TORCH_PYTHON, LOCKSTEP_SOURCE_DIR "/tests/docs/python_names.py",
       LOCKSTEP_SOURCE_DIR "/docs/names.md"},
      {}, kAllowed);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(All, Documentation, ::testing::ValuesIn(page_names()),
                         [](const auto& page) {
                           std::string name =
                               fs::path(page.param).replace_extension();
                           std::ranges::replace_if(
                               name, [](char c) { return !std::isalnum(c); },
                               '_');
                           return name;
                         });

}  // namespace
}  // namespace lockstep::internal::testing
