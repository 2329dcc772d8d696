// Runs the example gpt, divided over ranks in every way: its losses are those
// of one process, and a snapshot goes on however the model is divided next.

#include <gmock/gmock.h>
#include <signal.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/examples/example_test.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class GptTest : public ExampleTest {
 protected:
  // Trains a small model, and returns the losses of steps 10 and 20. `options`
  // are words with spaces between them.
  std::vector<double> train(int ranks, const std::string& options) {
    const ProgramResult result = run(ranks, options + " --report r.json");
    EXPECT_EQ(result.exit_code, 0) << options << result.out << result.err;
    if (result.exit_code != 0) return {};
    const auto report =
        nlohmann::json::parse(read_file((scratch() / "r.json").string()));
    EXPECT_EQ(report["ranks"], ranks);
    return report["losses"];
  }
  ProgramResult run(int ranks, const std::string& options) {
    std::vector<std::string> arguments{"gpt"};
    std::istringstream words(
        "--layers 4 --heads 4 --width 16 --context 24 --batch-size 8 "
        "--steps 20 " +
        options);
    for (std::string word; words >> word;) arguments.push_back(word);
    return ranks == 1 ? run_alone(arguments)
                      : run_ranks({.ranks = ranks}, arguments);
  }
};

// Sums in float32 depend on how they are divided; 20 steps differ by less than
// 1e-5 here. An average over the wrong ranks changes the third digit.
constexpr double kBound = 1e-4;

TEST_F(GptTest, EveryDivisionTrainsAsOneProcess) {
  const auto alone = train(1, "--sample 0");
  ASSERT_EQ(alone.size(), 2u);
  EXPECT_LT(alone[1], alone[0] - 0.1);
  struct Case {
    int ranks;
    const char* options;
    double bound = kBound;
  };
  for (const auto& [ranks, options, bound] :
       std::vector<Case>{{1, "--micro-batches 3 --checkpoint"},
                         {2, ""},
                         {2, "--shard 2 --checkpoint"},
                         {2, "--shard 2 --no-shared-memory --micro-batches 2"},
                         {2, "--shard 2 --bf16", 0.01},
                         {2, "--tensor 2 --checkpoint"},
                         {2, "--context-parallel 2"},
                         {2, "--pipeline 2 --checkpoint"},
                         {4,
                          "--pipeline 2 --tensor 2 --schedule ZBVZeroBubble "
                          "--stages-per-rank 2"},
                         {4,
                          "--pipeline 2 --shard 2 --schedule Interleaved1F1B "
                          "--stages-per-rank 2"},
                         {4, "--shard 2 --tensor 2 --checkpoint"},
                         {4, "--shard 2 --context-parallel 2"},
                         {4, "--context-parallel 2 --tensor 2"},
                         {4, "--pipeline 2"}}) {
    const auto losses = train(ranks, std::string(options) + " --sample 0");
    ASSERT_EQ(losses.size(), 2u) << options;
    EXPECT_NEAR(losses[0], alone[0], bound) << options;
    EXPECT_NEAR(losses[1], alone[1], bound) << options;
  }
}

// The loss of a rank was the mean over its own tokens, which weighs a token by
// how few its rank has, and is NaN for a rank without tokens.
TEST_F(GptTest, RanksWithDifferentNumbersOfTokensTrainAsOneProcess) {
  for (const std::string context : {"25", "3"}) {
    const auto length = "--sample 0 --context " + context;
    const auto alone = train(1, length);
    ASSERT_EQ(alone.size(), 2u);
    for (const auto& [ranks, options] :
         std::vector<std::pair<int, const char*>>{
             {2, " --context-parallel 2"},
             {4, " --context-parallel 4"},
             {4, " --context-parallel 2 --pipeline 2"}}) {
      const auto losses = train(ranks, length + options);
      ASSERT_EQ(losses.size(), 2u) << length << options;
      EXPECT_NEAR(losses[0], alone[0], kBound) << length << options;
      EXPECT_NEAR(losses[1], alone[1], kBound) << length << options;
    }
  }
}

TEST_F(GptTest, ResumesHoweverTheModelIsDividedNext) {
  const auto whole = train(1, "--sample 0");
  // As if it had been killed between steps 10 and 20.
  train(2, "--shard 2 --sample 0 --snapshot s --save-every 10");
  std::filesystem::remove_all(scratch() / "s/000002-step-20");
  std::filesystem::remove(scratch() / "s/latest");
  const auto rest = train(4, "--pipeline 2 --tensor 2 --sample 0 --snapshot s");
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_NEAR(rest[0], whole.at(1), kBound);
}

TEST_F(GptTest, StopsAtASignalAfterALastSnapshot) {
  auto job =
      start_ranks({.ranks = 2}, {"gpt", "--width", "36", "--steps", "100000",
                                 "--pipeline", "2", "--snapshot", "s"});
  job->await_output("step   10 ", 1, kAllowed);
  job->signal(SIGTERM);
  EXPECT_EQ(job->finish(kAllowed).exit_code, 128 + SIGTERM);
  const auto next = run_alone({"gpt", "--width", "36", "--steps", "1",
                               "--sample", "0", "--snapshot", "s"});
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_THAT(next.out, HasSubstr("resuming after step "));
}

TEST_F(GptTest, WritesTextAndATable) {
  // The text after the empty line that follows the steps.
  const auto text = [&](const std::string& options) {
    const ProgramResult result = run(2, options + " --sample 30");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const auto end = result.out.find("\n\n");
    return end == std::string::npos ? "" : result.out.substr(end);
  };
  const std::string first = text("--tensor 2");
  EXPECT_GE(first.size(), 30u);
  EXPECT_EQ(text("--context-parallel 2"), first);
  const auto table = run(1, "--compare 2");
  EXPECT_EQ(table.exit_code, 0) << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("one process"), HasSubstr("pipeline"),
                               HasSubstr("context")));
}

TEST_F(GptTest, SaysWhatIsWrong) {
  const auto refuses = [&](int ranks, const std::string& options,
                           const std::string& message) {
    const ProgramResult result = run(ranks, options);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_THAT(result.err, HasSubstr(message));
  };
  refuses(1, "--width 18", "--width is 18; give a multiple of --heads");
  refuses(2, "--batch-size 9", "--batch-size is 9; give a multiple of the 2");
  refuses(2, "--shard 3", "shard 3");
  refuses(2, "--pipeline 2 --schedule Best", "Best");
  refuses(1, "--text /no/such/text", "/no/such/text");
  std::ofstream(scratch() / "short") << std::string(100, 'x');
  refuses(1, "--text short", "short has 4 sequences of 24 bytes, fewer than");
}

}  // namespace
}  // namespace lockstep::internal::testing
