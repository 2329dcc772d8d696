// Trainings in which ranks die and are replaced end with the same bits as one
// in which nobody died, and the other ranks keep their processes. Those that go
// on with fewer ranks end with the bits of one that was restarted with fewer.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kPrograms = LOCKSTEP_BIN_DIR "/tests/";

using Arguments = std::vector<std::string>;

class Healing : public NodesTest {
 protected:
  struct Training {
    ProgramResult ended{};
    std::vector<std::string> results{};  // by rank
    int healings = 0;                    // as rank 0 counts them
    int begun = 0;                       // processes that came to the training
  };

  // The program of the ranks.
  std::string trainer_ = kPrograms + "healing_trainer";
  Arguments options_ = {"--heal", "--standby=2"};

  std::unique_ptr<RunningProgram> start_training(const fs::path& folder,
                                                 int ranks,
                                                 const Arguments& arguments,
                                                 Arguments line = {}) {
    fs::create_directories(folder);
    line.insert(line.end(), options_.begin(), options_.end());
    line.insert(line.end(), {"--nproc-per-node=" + std::to_string(ranks),
                             "--max-restarts=1000", trainer_, folder.string()});
    line.insert(line.end(), arguments.begin(), arguments.end());
    return start(line, {.environment = {"OMP_NUM_THREADS=1"}});
  }

  static Training result_of(const fs::path& folder, int ranks,
                            ProgramResult ended) {
    Training training{.ended = std::move(ended)};
    for (int rank = 0; rank < ranks; ++rank) {
      const auto path = folder / ("result-" + std::to_string(rank));
      training.results.push_back(read_file(path));
      if (rank == 0) {
        training.healings =
            std::atoi(read_file(path.string() + ".healings").c_str());
      }
    }
    std::istringstream lines(training.ended.out);
    for (std::string one; std::getline(lines, one);) {
      if (one.find("ready ") != one.npos) ++training.begun;
    }
    return training;
  }

  Training train(const std::string& name, int ranks,
                 const Arguments& arguments) {
    const auto folder = scratch() / name;
    auto job = start_training(folder, ranks, arguments);
    return result_of(folder, ranks, job->finish(seconds(180)));
  }

  // Trains with these arguments, unless a case before has. Nobody dies, so
  // no process stands by.
  Training train_undisturbed(int ranks, const Arguments& arguments) {
    static std::map<std::pair<int, Arguments>, Training> all;
    const auto [at, is_new] = all.try_emplace({ranks, arguments});
    if (!is_new) return at->second;
    const auto options = std::exchange(options_, {"--heal=shrink"});
    at->second = train("undisturbed", ranks, arguments);
    options_ = options;
    return at->second;
  }

  // Returns how many descriptors and mappings rank 0 of two has at the end.
  std::string held_after(const std::string& name, Arguments arguments,
                         const std::string& kills) {
    arguments.push_back("kill=" + kills);
    const auto healed = train(name, 2, arguments);
    EXPECT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    return read_file(scratch() / name / "result-0.held");
  }

  // Trains with and without these deaths. `deaths` processes die in their
  // training, and as many take their places.
  void expect_same(int ranks, const std::string& kills, int deaths,
                   Arguments arguments = {}) {
    options_ = {"--heal", "--standby=" + std::to_string(std::min(deaths, 2))};
    const auto undisturbed = train_undisturbed(ranks, arguments);
    ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
    arguments.push_back("kill=" + kills);
    const auto healed = train("healed", ranks, arguments);
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_THAT(healed.results[rank], HasSubstr("generator"));
      EXPECT_EQ(healed.results[rank], undisturbed.results[rank])
          << "rank " << rank << "\n"
          << healed.ended.err;
    }
    EXPECT_EQ(undisturbed.begun, ranks);
    EXPECT_EQ(healed.begun, ranks + deaths) << healed.ended.out;
    EXPECT_THAT(healed.ended.err, HasSubstr("lockstep: healed in"));
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("left no state")));
    told_ = healed.ended.err;
  }

  std::string told_;  // by the launcher and the ranks of expect_same()
};

// The moments of a step in which a rank dies. It saves in the fifth.
const std::vector<std::string> kMoments = {"next",     "forward",  "backward",
                                           "computed", "snapshot", "update",
                                           "updated",  "throws"};

// Returns what kills `rank` at the first of these moments in step 2, at the
// next one in step 4, and so on: "1@2:next,1@4:forward,...".
std::string at_each(const std::vector<std::string>& moments, int rank) {
  std::string kills;
  for (size_t i = 0; i < moments.size(); ++i) {
    kills += (i == 0 ? "" : ",") + std::to_string(rank) + "@" +
             std::to_string(2 * i + 2) + ":" + moments[i];
  }
  return kills;
}

TEST_F(Healing, RankOneDiesAtEachMoment) {
  expect_same(2, at_each(kMoments, 1), 8, {"snapshot=5"});
}

TEST_F(Healing, RankZeroOfThreeDiesAtEachMoment) {
  expect_same(3, at_each(kMoments, 0), 8, {"snapshot=5", "epochs=3"});
}

// The process that takes a place and the others find the same saves due, and
// none is left out.
TEST_F(Healing, RanksDieInDueSaves) {
  for (const std::string form : {"inside", "outside"}) {
    SCOPED_TRACE(form);
    expect_same(2, "1@5:snapshot,0@15:snapshot", 2, {"saver=" + form});
    const auto saved = scratch() / "healed" / "saved";
    for (int i = 1; i <= 4; ++i) {
      const auto name =
          "00000" + std::to_string(i) + "-step-" + std::to_string(5 * i);
      EXPECT_TRUE(fs::exists(saved / name)) << name;
    }
    fs::remove_all(scratch() / "healed");
  }
}

TEST_F(Healing, BeforeTheFirstStepAndInTheLast) {
  expect_same(2, "0@0:forward,1@23:computed", 2);
}

// Rank 0 has completed its last step, and would end without the other. The
// average's running statistics, which differ between ranks, are rank 0's then:
// those of rank 1 are lost, and no later update replaces them.
TEST_F(Healing, InTheLastUpdate) {
  const auto undisturbed = train_undisturbed(2, {});
  const auto healed = train("healed", 2, {"kill=1@23:update"});
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.begun, 3);
  EXPECT_EQ(healed.results[0], undisturbed.results[0]);
  const auto without_statistics = [](const std::string& result) {
    std::istringstream lines(result);
    std::string kept;
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with("average.module.1.running_")) kept += line + "\n";
    }
    return kept;
  };
  EXPECT_EQ(without_statistics(healed.results[1]),
            without_statistics(undisturbed.results[1]));
}

// Each rank has state that no other rank has: a part of the optimizer's state,
// and an item. The update has collectives.
const Arguments kDivided = {"zero=1", "own=1", "sum=1"};

// No process takes the place of one that died.
class Shrinking : public Healing {
 protected:
  Shrinking() { options_ = {"--heal=shrink"}; }

  // A training that is restarted, or goes on, with this number of ranks after
  // this step.
  struct Part {
    int ranks;
    int steps;
  };

  // Trains with restarts after these steps, unless a case before has.
  Training train_with_restarts(int ranks, const std::vector<Part>& parts,
                               const Arguments& arguments) {
    std::vector<std::pair<int, int>> numbers;
    for (const Part& part : parts) {
      numbers.emplace_back(part.ranks, part.steps);
    }
    static std::map<std::tuple<int, decltype(numbers), Arguments>, Training>
        all;
    const auto [at, is_new] = all.try_emplace({ranks, numbers, arguments});
    Training& training = at->second;
    if (!is_new) return training;
    for (const Part& part : parts) {
      auto some = arguments;
      const auto steps = std::to_string(part.steps);
      some.insert(some.end(), {"snapshot=" + steps, "last=" + steps});
      training = train("restarted", ranks, some);
      EXPECT_EQ(training.ended.exit_code, 0) << training.ended.err;
      ranks = part.ranks;
    }
    auto rest = arguments;
    rest.emplace_back("snapshot=1000");
    training = train("restarted", ranks, rest);
    return training;
  }

  // Trains with `ranks`, of which some die, and again with restarts in the
  // place of that.
  void expect_as_restarted(int ranks, const std::string& kills,
                           const std::vector<Part>& parts,
                           const Arguments& arguments = {}) {
    const auto restarted = train_with_restarts(ranks, parts, arguments);
    ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
    auto rest = arguments;
    rest.push_back("kill=" + kills);
    const auto healed = train("healed", ranks, rest);
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    for (int rank = 0; rank < parts.back().ranks; ++rank) {
      EXPECT_THAT(healed.results[rank], HasSubstr("generator"));
      EXPECT_EQ(healed.results[rank], restarted.results[rank])
          << "rank " << rank << "\n"
          << healed.ended.err;
    }
    EXPECT_EQ(healed.begun, ranks) << healed.ended.out;
    EXPECT_EQ(healed.healings, static_cast<int>(parts.size()));
    EXPECT_THAT(healed.ended.err, HasSubstr("lockstep: healed in"));
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
  }
};

class ShrinkingAt
    : public Shrinking,
      public ::testing::WithParamInterface<std::pair<const char*, int>> {};

TEST_P(ShrinkingAt, RankOneOfThreeDies) {
  const auto [moment, steps] = GetParam();
  expect_as_restarted(3, "1@5:" + std::string(moment), {{2, steps}},
                      {"snapshot=5"});
}

// The training goes on from what rank 1 has.
TEST_P(ShrinkingAt, RankZeroOfTwoDies) {
  const auto [moment, steps] = GetParam();
  expect_as_restarted(2, "0@5:" + std::string(moment), {{1, steps}},
                      {"model=plain", "snapshot=5"});
}

INSTANTIATE_TEST_SUITE_P(
    Moments, ShrinkingAt,
    ::testing::Values(std::pair("next", 5), std::pair("backward", 5),
                      std::pair("computed", 5), std::pair("update", 6),
                      std::pair("updated", 5), std::pair("snapshot", 5),
                      std::pair("throws", 5)),
    [](const auto& moment) { return moment.param.first; });

TEST_F(Shrinking, OneRankAfterTheOther) {
  expect_as_restarted(4, "2@3:backward,1@7:update", {{3, 3}, {2, 8}});
}

TEST_F(Shrinking, TheFirstRankAndThenTheLast) {
  expect_as_restarted(3, "0@4:update,1@9:forward", {{2, 5}, {1, 9}},
                      {"model=plain"});
}

TEST_F(Shrinking, AfterTheFirstStepAndInTheLastOfAnEpoch) {
  expect_as_restarted(3, "1@1:forward,1@11:computed", {{2, 1}, {1, 11}});
}

TEST_F(Shrinking, GroupsOfRanksThatAreLeftAreMadeAgain) {
  expect_as_restarted(3, "1@5:backward", {{2, 5}}, {"groups=1"});
}

TEST_F(Shrinking, AllRestartIfTheStateIsDivided) {
  auto arguments = kDivided;
  arguments.insert(arguments.end(), {"snapshot=5", "kill=1@7:backward"});
  const auto healed = train("healed", 2, arguments);
  EXPECT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_THAT(healed.ended.err,
              HasSubstr("the training cannot go on with fewer ranks: its state "
                        "is divided over the ranks"));
  EXPECT_THAT(healed.ended.err, HasSubstr("restarting all"));
  EXPECT_EQ(healed.begun, 4) << healed.ended.out;
}

TEST_F(Shrinking, AllRestartIfAGroupIsUsedThatHasLostARank) {
  const auto healed = train("healed", 3, {"groups=ends", "kill=2@5:backward"});
  EXPECT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_THAT(healed.ended.err,
              HasSubstr("of ranks 0 and 2 has lost rank 2, and the job goes on "
                        "with fewer ranks"));
  EXPECT_THAT(healed.ended.err, HasSubstr("cannot be healed any more"));
  EXPECT_EQ(healed.begun, 6) << healed.ended.out;
}

const std::vector<std::string> kDividedMoments = {
    "next",    "forward", "backward",  "computed", "snapshot", "update",
    "stepped", "updated", "recording", "recorded", "throws"};

TEST_F(Healing, DividedRankOneDiesAtEachMoment) {
  expect_same(2, at_each(kDividedMoments, 1), 11,
              with(kDivided, {"snapshot=5"}));
}

TEST_F(Healing, DividedRankZeroOfThreeDiesAtEachMoment) {
  expect_same(3, at_each(kDividedMoments, 0), 11,
              with(kDivided, {"snapshot=5", "epochs=3"}));
}

TEST_F(Healing, DividedBeforeTheFirstStepAndInTheLast) {
  expect_same(2, "0@0:forward,1@23:computed,1@24:recorded", 3, kDivided);
}

TEST_F(Healing, DividedOneRankAfterTheOther) {
  expect_same(3,
              "0@3:backward,1@4:update,2@9:recording,0@9:stepped,"
              "2@10:recorded",
              5, kDivided);
}

TEST_F(Healing, DividedTwoRanksAtOnce) {
  expect_same(3, "0@5:recorded,2@5:recording", 2, kDivided);
}

TEST_F(Healing, DividedTheProcessThatTakesAPlaceDiesBeforeItHasJoined) {
  expect_same(2, "1@5:stepped,1@0:joining", 1, kDivided);
}

// The model is divided over the ranks.
class DividedModel : public Healing,
                     public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    Healing::SetUp();
    trainer_ = kPrograms + "divided_trainer";
  }
  Arguments arguments(Arguments more = {}) const {
    more.push_back(std::string("model=") + GetParam());
    return more;
  }
};

TEST_P(DividedModel, RanksDieInTheMidstOfSteps) {
  const bool says_forward = GetParam() != std::string("zero");
  expect_same(2,
              std::string(says_forward ? "1@3:forward" : "1@3:computed") +
                  ",0@6:update,1@9:updated,0@10:next",
              4, arguments({"snapshot=4"}));
}

TEST_P(DividedModel, OneOfThreeRanksDiesAgain) {
  expect_same(3, "0@4:computed,2@4:update,1@7:update", 3, arguments());
}

TEST_P(DividedModel, LeavesNoDescriptorsAndMappings) {
  const auto once = held_after("once", arguments(), "1@3:update");
  const auto often = held_after(
      "often", arguments(),
      "1@3:update,1@4:updated,1@5:next,1@6:computed,1@7:update,1@8:update");
  EXPECT_NE(once, "");
  EXPECT_EQ(once, often);
}

INSTANTIATE_TEST_SUITE_P(Kinds, DividedModel,
                         ::testing::Values("fsdp", "fsdp_memory", "tensor",
                                           "pipeline", "zero"),
                         [](const auto& kind) { return kind.param; });

TEST_F(Healing, ALayerOfEachRank) {
  expect_same(3, "1@5:backward,0@9:update,2@12:updated", 3, {"model=experts"});
}

TEST_F(Healing, RanksThatStepAlone) {
  expect_same(2, "1@6:backward,0@8:stepped,0@13:forward", 3, {"model=local"});
}

// Rank 0 waits in the update's collective, so no rank has a whole state.
TEST_F(Healing, AllRestartAtOnceIfNoRankHasAWholeState) {
  const auto healed = train("healed", 2, {"sum=1", "kill=1@5:stepped"});
  EXPECT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_THAT(healed.ended.err,
              HasSubstr("no rank has a whole state any more"));
  EXPECT_THAT(healed.ended.err, HasSubstr("cannot be healed any more"));
  EXPECT_THAT(healed.ended.err, ContainsRegex("healing 1 of 100"));
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("healing 2 of 100")));
  EXPECT_EQ(healed.begun, 4) << healed.ended.out;
}

TEST_F(Healing, AnObjectMadeAfterItIsNamedBeforeRanksWaitForIt) {
  const auto healed = train("healed", 2, {"late=1", "kill=1@5:forward"});
  EXPECT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_THAT(healed.ended.err,
              HasSubstr("rank 0 has 2 objects that make collectives "
                        "(DistributedDataParallel, SnapshotSaver and others), "
                        "and rank 1 has 1; make all of them before "
                        "HealedTraining"));
  EXPECT_EQ(healed.begun, 4) << healed.ended.out;
}

TEST_F(Healing, OneRankAfterTheOther) {
  expect_same(3, "0@3:backward,1@4:update,2@9:computed,0@9:forward", 4);
}

TEST_F(Healing, TwoRanksAtOnce) {
  expect_same(3, "0@5:backward,2@5:backward", 2);
}

TEST_F(Healing, TheProcessThatTakesAPlaceDiesBeforeItHasJoined) {
  expect_same(2, "1@5:backward,1@0:joining", 1);
  EXPECT_THAT(told_, ContainsRegex("healed in [0-9]+ ms: rank 1 failed: [^;]*; "
                                   "rank 1 failed: "));
}

TEST_F(Healing, SubGroupsAreMadeAgain) {
  expect_same(3, "1@5:backward,0@11:next", 2, {"groups=1"});
}

// Rank 1 completes an update in which rank 0 waits for the one that dies.
TEST_F(Healing, ARankThatTakesAStateCountsItsStep) {
  expect_same(3, "2@5:update", 1, {"groups=ends", "sum=2"});
}

TEST_F(Healing, ABatchIsOneOfTwo) {
  expect_same(2, "1@5:backward,0@7:next,1@9:updated", 3, {"pairs=1"});
}

TEST_F(Healing, LoopsThatTheProgramLeaves) {
  expect_same(2, "1@3:backward,0@7:next,1@14:updated", 3,
              {"leave=5", "epochs=4"});
}

// A process that takes a place would begin in the first loop.
TEST_F(Healing, AllRestartInASecondLoop) {
  for (const std::string loops : {"loops=2", "loops=3"}) {
    const auto undisturbed = train_undisturbed(2, {loops, "snapshot=3"});
    EXPECT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
    const auto training =
        train(loops, 2, {loops, "snapshot=3", "kill=1@14:forward"});
    EXPECT_EQ(training.ended.exit_code, 0) << training.ended.err;
    EXPECT_THAT(training.ended.err,
                HasSubstr("in the second loop over next()"));
    EXPECT_THAT(training.ended.err, HasSubstr("restarting all"));
  }
}

// Gradients to which the next call of run() adds are copied, too. At each
// moment rank 1 dies twice, in a call that adds and in one that does not, and
// rank 0 once.
std::string across_calls() {
  std::string kills;
  int step = 4;
  for (const std::string moment :
       {"next", "forward", "backward", "update", "updated"}) {
    for (const std::string rank : {"1@", "1@", "0@"}) {
      kills += (kills.empty() ? "" : ",") + rank + std::to_string(step) + ":" +
               moment;
      step += 3;
    }
  }
  return kills;
}

TEST_F(Healing, AccumulatingAcrossCalls) {
  expect_same(2, across_calls(), 15, {"model=across", "epochs=4"});
}

TEST_F(Healing, DividedAccumulatingAcrossCalls) {
  expect_same(3, across_calls(), 15, {"model=across", "own=1", "epochs=6"});
}

// The next forward does not broadcast buffers.
TEST_F(Healing, BuffersAfterAForwardThatIsNotAveraged) {
  expect_same(3, "1@23:backward", 1, {"model=across", "epochs=3"});
}

// A process that takes a place comes to calls of run() before next(), and to
// some after the last loop.
TEST_F(Healing, CallsOutsideOfTheLoop) {
  expect_same(2, "1@0:first,1@8:backward,0@14:next,0@24:last", 4,
              {"calls=1", "model=plain"});
}

// The one that comes to the first batch of an epoch has to know which epochs
// were run, when another one comes later.
TEST_F(Healing, CallsBeforeTheStep) {
  expect_same(2, "1@12:top_done,0@15:top_done", 2, {"calls=1", "model=plain"});
}

TEST_F(Healing, BeforeACallThatAddsToTheFirstGradients) {
  expect_same(2, "1@1:next", 1, {"model=across"});
}

// Nobody knew that there would be no step.
TEST_F(Healing, AllRestartInTheFirstUpdateWithoutAStep) {
  const auto training =
      train("training", 2, {"model=across", "kill=1@1:updated"});
  EXPECT_EQ(training.ended.exit_code, 0) << training.ended.err;
  EXPECT_THAT(training.ended.err,
              HasSubstr("has no copy of the gradients that were left by step"));
  EXPECT_THAT(training.ended.err, HasSubstr("restarting all"));
}

TEST_F(Healing, AnUpdateThatDrawsRandomNumbers) {
  expect_same(3, "1@5:next,0@8:forward,0@12:next,2@14:computed", 4,
              {"draws=1"});
}

TEST_F(Healing, FunctionsAloneThatDrawRandomNumbers) {
  expect_same(3, "1@5:top,0@8:next,2@8:forward,0@12:next,1@14:computed", 5,
              {"draws=2", "calls=1"});
}

// Nobody knows what the rank would have drawn.
TEST_F(Healing, AllRestartInAFunctionThatDrawsRandomNumbers) {
  const std::pair<std::string, Arguments> functions[] = {
      {"update", {"draws=1", "snapshot=5", "kill=1@7:updated"}},
      {"alone", {"draws=2", "calls=1", "snapshot=5", "kill=1@7:top_done"}}};
  for (const auto& [name, arguments] : functions) {
    const auto training = train(name, 2, arguments);
    EXPECT_EQ(training.ended.exit_code, 0) << training.ended.err;
    EXPECT_THAT(training.ended.err,
                HasSubstr("was lost in a function that draws random numbers"));
    EXPECT_THAT(training.ended.err, HasSubstr("restarting all"));
  }
}

TEST_F(Healing, AllRestartIfARankEndsWell) {
  const auto training = train("training", 2, {"kill=1@5:exits", "snapshot=5"});
  EXPECT_EQ(training.ended.exit_code, 0) << training.ended.err;
  EXPECT_THAT(training.ended.err, HasSubstr("restarting all"));
  EXPECT_THAT(training.ended.err, Not(HasSubstr("healed in")));
}

// It tells the others nothing.
TEST_F(Healing, AllRestartIfARankLeaves) {
  const auto training = train("training", 2, {"kill=1@5:leaves", "snapshot=5"});
  EXPECT_EQ(training.ended.exit_code, 0) << training.ended.err;
  EXPECT_THAT(training.ended.err, HasSubstr("restart 1 of"));
  EXPECT_THAT(training.ended.err, Not(HasSubstr("healed in")));
}

// They differ between ranks, and the update does not change them.
TEST_F(Healing, BuffersOfAnotherModule) {
  expect_same(2, "1@3:next,0@5:update,1@7:updated,0@9:forward,1@11:stepped", 5,
              {"critic=1"});
}

TEST_F(Healing, FunctionsAloneThatChangeBuffersOfAnotherModule) {
  expect_same(2, "1@3:forward,0@5:next,1@7:updated", 3,
              {"critic=1", "calls=1"});
}

TEST_F(Healing, MistakesAreNamed) {
  const auto train_with = [this](const std::string& mistake) {
    return run({"--heal=shrink", "--nproc-per-node=1", "--max-restarts=1",
                kPrograms + "healing_mistakes", mistake});
  };
  const std::map<std::string, std::string> mistakes = {
      {"step", "compute has changed the parameter \"weight\""},
      {"sgd", "compute has changed the parameter \"weight\""},
      {"steps alone", "run() alone has changed the parameter \"weight\""},
      {"nested", "run() was called in a function of run()"},
      {"next", "next() was called in a function of run()"},
      {"group", "a group was to be made in a function of"},
      {"alone", "run() alone has changed the gradient of \"weight\""},
      {"turn", "next() was called with another loader before the loop"},
      {"wrapped", "a DistributedDataParallel has parameters that no module"},
      {"lbfgs", "the state cannot be given to another process ("},
      {"another", "this process has another one"},
  };
  for (const auto& [mistake, error] : mistakes) {
    const auto ended = train_with(mistake);
    EXPECT_EQ(ended.exit_code, 1) << mistake;
    EXPECT_THAT(ended.err, HasSubstr(error)) << mistake;
  }
  const std::map<std::string, std::string> warnings = {
      {"none", ""},
      {"sharded", ""},
      {"mixed", ""},
      {"forgotten",
       "update changes the parameter \"beside.weight\", which no optimizer"},
      {"forgotten sgd",
       "update changes the parameter \"beside.weight\", which no optimizer"},
      {"later", "this is the second HealedTraining of the process"},
  };
  for (const auto& [mistake, warning] : warnings) {
    const auto ended = train_with(mistake);
    EXPECT_EQ(ended.exit_code, 0) << mistake << ended.err;
    EXPECT_THAT(ended.err, HasSubstr(warning)) << mistake;
    EXPECT_THAT(ended.err, Not(HasSubstr("HealedTraining:"))) << mistake;
  }
}

// Agents with ranks that share memory in a host and use Gloo between the hosts.
class HealingHosts : public Healing {
 protected:
  int nodes_ = 2;
  int ranks_of_each_ = 2;
  int fewer_on_last_ = 0;  // so many ranks less on the last of nodes_
  Arguments healing_ = {"--heal", "--standby=1"};
  Arguments healing_of_first_{};  // if any, that of host 0

  // The first nodes_ take part at once, and all others are spare.
  void start_hosts(const std::string& name, const Arguments& arguments,
                   int count = 2, const std::string& configuration = {}) {
    folder_ = scratch() / name;
    fs::create_directories(folder_);
    hosts_.clear();
    const std::string first = "127.0.0.1:" + std::to_string(free_port());
    const std::string second = "127.0.0.1:" + std::to_string(free_port());
    endpoints_ = second_endpoint_ ? first + "," + second : first;
    for (int host = 0; host < count; ++host)
      start_host(arguments, configuration);
  }

  void start_host(const Arguments& arguments,
                  const std::string& configuration = {}) {
    const auto host = static_cast<int>(hosts_.size());
    const Arguments role = {
        "--rdzv-conf=is_host=" + std::string(host == 0 ? "true" : "false") +
            configuration,
        host < nodes_ ? "--node-rank=" + std::to_string(host) : "--spare"};
    const Arguments& healing =
        host == 0 && !healing_of_first_.empty() ? healing_of_first_ : healing_;
    const Arguments program = {trainer_, folder_.string()};
    const int ranks =
        ranks_of_each_ - (host + 1 == nodes_ ? fewer_on_last_ : 0);
    const Arguments all = {"--nnodes=" + std::to_string(nodes_),
                           "--rdzv-endpoint=" + endpoints_,
                           "--nproc-per-node=" + std::to_string(ranks),
                           "--max-restarts=" + std::to_string(restarts_)};
    hosts_.push_back(
        start(with(with(with(with(all, healing), role), program), arguments),
              {.environment = {"OMP_NUM_THREADS=1",
                               "LOCKSTEP_HOST_ID=" + std::to_string(host)}}));
  }

  // `lost`: how many hosts do not end well.
  Training finish_hosts(int lost = 0) {
    ProgramResult ended;
    int failed = 0;
    for (const auto& host : hosts_) {
      const ProgramResult one = host->finish(seconds(180));
      ended.out += one.out;
      ended.err += one.err;
      if (one.exit_code != 0 && ++failed <= lost) continue;
      ended.exit_code = std::max(ended.exit_code, one.exit_code);
    }
    EXPECT_EQ(failed, lost);
    return result_of(folder_, nodes_ * ranks_of_each_ - fewer_on_last_, ended);
  }

  Training train_on_hosts(const std::string& name, const Arguments& arguments) {
    start_hosts(name, arguments, nodes_);
    return finish_hosts();
  }

  void expect_same_on_hosts(const std::string& kills, int deaths,
                            Arguments arguments = {}) {
    const auto undisturbed = train_on_hosts("undisturbed", arguments);
    ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
    arguments.push_back("kill=" + kills);
    const auto healed = train_on_hosts("healed", arguments);
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
    EXPECT_EQ(healed.begun, 4 + deaths) << healed.ended.out;
    EXPECT_THAT(healed.ended.err, HasSubstr("lockstep: healed in"));
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
  }

  // Continues a worker that was stopped by the first of `kill`.
  void continue_worker() const {
    EXPECT_EQ(::kill(std::stoi(read_file(folder_ / "killed-0")), SIGCONT), 0);
  }
  // Sends `signal` to a worker that was stopped so, and to its agent.
  void signal_host(int signal) const {
    const auto worker = std::stoi(read_file(folder_ / "killed-0"));
    EXPECT_EQ(::kill(worker, signal), 0);
    EXPECT_EQ(::kill(agent_of_worker(worker), signal), 0);
  }
  static pid_t agent_of_worker(pid_t worker) {
    std::istringstream stat(
        read_file("/proc/" + std::to_string(worker) + "/stat"));
    std::string word;
    for (int field = 0; field < 4; ++field) stat >> word;
    return std::stoi(word);
  }
  // Returns the process of the only rank of this host.
  pid_t worker_of(size_t host) const {
    const std::string ready = "ready " + std::to_string(host) + " ";
    hosts_[host]->await_output(ready);
    const std::string& out = hosts_[host]->out();
    return std::stoi(out.substr(out.find(ready) + ready.size()));
  }

  fs::path folder_;
  bool second_endpoint_ = false;
  int restarts_ = 1000;
  std::string endpoints_;
  std::vector<std::unique_ptr<RunningProgram>> hosts_{};
};

TEST_F(HealingHosts, RanksDie) {
  expect_same_on_hosts("1@2:backward,2@5:update,0@8:updated", 3);
}

TEST_F(HealingHosts, RanksOfADividedTrainingDie) {
  expect_same_on_hosts("3@2:backward,0@5:update,1@8:updated", 3, {"own=1"});
}

// A host is lost with its agent, and a spare one takes its place.
TEST_F(HealingHosts, OneIsLost) {
  const auto undisturbed = train_on_hosts("undisturbed", {"model=plain"});
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  for (const std::string kills : {"2@5:agent", "3@0:agent"}) {
    start_hosts("healed" + kills, {"model=plain", "kill=" + kills}, 3);
    const auto healed = finish_hosts(/*lost=*/1);
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
    EXPECT_EQ(healed.begun, 6) << healed.ended.out;
    EXPECT_THAT(healed.ended.err,
                ContainsRegex("lockstep: healed in .*node 1 .*was lost"));
    EXPECT_THAT(healed.ended.err, HasSubstr("this node takes its place"));
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
  }
}

// Generators and buffers of the lost ranks were on the other host, too.
TEST_F(HealingHosts, BuddyCopiesHealALostHost) {
  const auto undisturbed = train_on_hosts("undisturbed", {"buddies=1"});
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  start_hosts("healed", {"buddies=1", "kill=2@5:agent,3@9:agent_updated"}, 4);
  const auto healed = finish_hosts(/*lost=*/2);
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
  EXPECT_THAT(healed.ended.err, HasSubstr("lockstep: healed in"));
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("left no state")));
}

// Host 1 is lost twice: with a rank that has its copies, and when all others
// have left the last step.
TEST_F(HealingHosts, BuddyCopiesHealADividedTraining) {
  const auto arguments = with(kDivided, {"buddies=1"});
  const auto undisturbed = train_on_hosts("undisturbed", arguments);
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  start_hosts("healed",
              with(arguments, {"kill=0@3:forward,2@3:agent,3@8:agent_next"}),
              4);
  const auto healed = finish_hosts(/*lost=*/2);
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
  EXPECT_EQ(healed.begun, 9) << healed.ended.out;
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("restart 1 of")));
}

// The host with the copies of host 1 is lost in step 5, and when that is done
// again, host 1. A new host has the copies by then.
TEST_F(HealingHosts, BuddyCopiesAreMadeAgain) {
  nodes_ = 3;
  ranks_of_each_ = 1;
  const Arguments arguments = {"own=1", "buddies=1", "epochs=1"};
  const auto undisturbed = train_on_hosts("undisturbed", arguments);
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  start_hosts("healed", with(arguments, {"kill=2@5:agent,1@6:agent_updated"}),
              5);
  const auto healed = finish_hosts(/*lost=*/2);
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
  EXPECT_EQ(healed.begun, 5) << healed.ended.out;
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("restart 1 of")));
}

// The state that only the lost ranks had is lost.
TEST_F(HealingHosts, AllRestartIfOneOfADividedTrainingIsLost) {
  start_hosts("healed", {"model=plain", "own=1", "kill=2@5:agent"}, 3);
  const auto restarted = finish_hosts(/*lost=*/1);
  ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  EXPECT_THAT(
      restarted.ended.err,
      HasSubstr("this is not healed: a rank has not said that its "
                "training can be, or has state that no other rank has"));
  EXPECT_THAT(restarted.ended.err, HasSubstr("restart 1 of 1000"));
}

// It leaves without a word: the other host must not replace a rank that waits.
TEST_F(HealingHosts, AllRestartIfARankLeaves) {
  ranks_of_each_ = 1;
  start_hosts("restarted", {"model=plain", "kill=1@5:leaves"});
  const auto restarted = finish_hosts();
  EXPECT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  EXPECT_THAT(restarted.ended.err,
              HasSubstr("another rank has ended its training meanwhile"));
  EXPECT_THAT(restarted.ended.err, HasSubstr("restarting all 2 workers"));
  EXPECT_THAT(restarted.ended.err, Not(HasSubstr("healed in")));
}

TEST_F(HealingHosts, BuddyCopiesOfSomeRanksOnlyAreRefused) {
  ranks_of_each_ = 1;
  restarts_ = 1;
  start_hosts("refused", {"buddies=2"});
  const auto refused = finish_hosts(/*lost=*/2);
  EXPECT_THAT(refused.ended.err,
              HasSubstr("HealedTrainingOptions::buddy_copies"));
}

// A rank of host 0 has ended its training when host 1 is lost; the other one
// has ended, too, or its process runs on.
TEST_F(HealingHosts, AllRestartIfOneIsLostAtTheEnd) {
  for (const std::string rest : {"", ",1@6:lingers"}) {
    start_hosts("restarted" + rest,
                {"model=plain", "epochs=1", "kill=2@6:end" + rest}, 3);
    const auto restarted = finish_hosts(/*lost=*/1);
    ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
    EXPECT_THAT(restarted.ended.err, HasSubstr("restart 1 of 1000"));
    EXPECT_THAT(restarted.ended.err, Not(HasSubstr("restart 2")));
    EXPECT_THAT(restarted.ended.err, Not(HasSubstr("healing 2")));
    if (rest.empty()) continue;
    EXPECT_THAT(
        restarted.ended.err,
        HasSubstr("cannot take its place: a rank has ended its training"));
  }
}

// Host 0, whose agent hosts the store, is lost, with the ranks of this host and
// the store at which the workers meet; then the host of the next store or the
// other one.
TEST_F(HealingHosts, TheOneWithTheStoreIsLost) {
  nodes_ = 3;
  ranks_of_each_ = 1;
  second_endpoint_ = true;
  for (const Arguments& arguments :
       {Arguments{"model=plain"}, with(kDivided, {"buddies=1"})}) {
    const auto undisturbed = train_on_hosts("undisturbed", arguments);
    ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
    start_hosts("healed" + arguments.front(),
                with(arguments, {"kill=2@2:backward,0@5:agent,1@8:agent"}), 5);
    const auto healed = finish_hosts(/*lost=*/2);
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
    EXPECT_EQ(healed.begun, 6) << healed.ended.out;
    EXPECT_THAT(healed.ended.err,
                HasSubstr("; the workers go on, and the nodes meet at " +
                          endpoints_.substr(endpoints_.find(',') + 1)));
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restart 1 of")));
  }
}

// A bug: a rank that had not looked at the launcher's store for a while waited
// for a generation that only the lost store had.
TEST_F(HealingHosts, TheOneWithTheStoreIsLostBeforeAllKnowOfAnEarlierDeath) {
  nodes_ = 3;
  ranks_of_each_ = 1;
  second_endpoint_ = true;
  const Arguments plain = {"model=plain"};
  const auto undisturbed = train_on_hosts("undisturbed", plain);
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  start_hosts("healed", with(plain, {"kill=1@5:stop_computed"}), 4);
  const pid_t rank_zero = worker_of(0);
  const pid_t rank_two = worker_of(2);
  for (const auto deadline = Deadline::after(seconds(60));
       !fs::exists(folder_ / "killed-0") && !deadline.expired();) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  ASSERT_EQ(::kill(rank_two, SIGKILL), 0);
  hosts_[2]->await_error("takes the place of rank 2: healing 1 of 1000");
  ASSERT_EQ(::kill(agent_of_worker(rank_zero), SIGKILL), 0);
  hosts_[3]->await_error("this node takes its place: healing 2 of 1000");
  continue_worker();
  const auto healed = finish_hosts(/*lost=*/1);
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
  EXPECT_EQ(healed.begun, 5) << healed.ended.out;
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("restart 1 of")));
}

// It is not replaced if only its ranks had some state, or if no node comes.
TEST_F(HealingHosts, AllRestartIfTheOneWithTheStoreIsNotReplaced) {
  second_endpoint_ = true;
  for (const bool spare : {true, false}) {
    start_hosts("healed" + std::to_string(spare),
                {"model=plain", spare ? "own=1" : "own=0", "kill=0@5:agent"},
                spare ? 3 : 2);
    if (!spare) {
      hosts_[1]->await_error("restart 1 of 1000");
      start_host({"model=plain", "own=0", "kill=0@5:agent"});
    }
    const auto restarted = finish_hosts(/*lost=*/1);
    ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
    EXPECT_THAT(restarted.ended.err, HasSubstr("restart 1 of 1000"));
    EXPECT_THAT(restarted.ended.err, Not(HasSubstr("restart 2")));
  }
}

// No process and no host comes in the place of what is lost.
class ShrinkingHosts : public HealingHosts {
 protected:
  ShrinkingHosts() { healing_ = {"--heal=shrink"}; }

  // Trains until the last of `steps` and saves, then with the ranks that are
  // left.
  Training train_first(const std::string& name, int steps,
                       const Arguments& arguments) {
    const auto last = std::to_string(steps);
    return train_on_hosts(
        name, with(arguments, {"snapshot=" + last, "last=" + last}));
  }
};

// The only rank of a host dies, also of the one with the agents' store, and
// then another host is lost.
TEST_F(ShrinkingHosts, RanksDie) {
  const Arguments plain = {"model=plain"};
  nodes_ = 3;
  ranks_of_each_ = 1;
  ASSERT_EQ(train_first("restarted", 5, plain).ended.exit_code, 0);
  nodes_ = 2;
  ASSERT_EQ(train_first("restarted", 9, plain).ended.exit_code, 0);
  options_ = {"--heal=shrink"};
  const auto restarted = train("restarted", 1, with(plain, {"snapshot=1000"}));
  ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  nodes_ = 3;
  for (const std::string rank : {"0", "1"}) {
    start_hosts("healed" + rank,
                with(plain, {"kill=" + rank + "@5:backward,1@9:agent"}), 3);
    const auto healed = finish_hosts(/*lost=*/1);
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    EXPECT_EQ(healed.results[0], restarted.results[0]) << healed.ended.err;
    EXPECT_EQ(healed.begun, 3) << healed.ended.out;
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
    EXPECT_THAT(healed.ended.err,
                ContainsRegex("rank " + rank +
                              " failed: .*; the job goes on with 2 ranks"));
    EXPECT_THAT(healed.ended.err,
                ContainsRegex("node 2 .*was lost: .*; the job goes on with 1 "
                              "rank: healing 2 of 1000"));
  }
}

// The second host has one rank less then, and a process takes a place of the
// first.
TEST_F(ShrinkingHosts, ARankDiesAndThenAnotherIsReplaced) {
  ASSERT_EQ(train_first("restarted", 5, {}).ended.exit_code, 0);
  fewer_on_last_ = 1;
  const auto restarted = train_on_hosts("restarted", {"snapshot=1000"});
  ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  fewer_on_last_ = 0;
  healing_of_first_ = {"--heal=shrink", "--standby=1"};
  start_hosts("healed", {"kill=3@5:backward,1@9:forward"});
  const auto healed = finish_hosts();
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(healed.results[rank], restarted.results[rank])
        << healed.ended.err;
  }
  EXPECT_EQ(healed.begun, 5) << healed.ended.out;
  EXPECT_THAT(healed.ended.err,
              ContainsRegex("takes the place of rank 1: healing 2 of 1000"));
}

// Rank 1 is replaced, and later the one that is called rank 1 then. Their
// agents say the same, and the second knows only from the announcements of the
// others which ranks are left.
TEST_F(ShrinkingHosts, TwoRanksOfOneNumberAreReplaced) {
  nodes_ = 3;
  ranks_of_each_ = 1;
  const Arguments plain = {"model=plain"};
  ASSERT_EQ(train_first("restarted", 5, plain).ended.exit_code, 0);
  nodes_ = 2;
  const auto restarted =
      train_on_hosts("restarted", with(plain, {"snapshot=1000"}));
  ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  nodes_ = 3;
  healing_of_first_ = healing_;
  healing_ = {"--heal=shrink", "--standby=1"};
  start_hosts("healed",
              with(plain, {"kill=1@3:forward,0@5:backward,1@9:forward"}), 3);
  const auto healed = finish_hosts();
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results[0], restarted.results[0]) << healed.ended.err;
  EXPECT_EQ(healed.results[1], restarted.results[1]) << healed.ended.err;
  EXPECT_EQ(healed.begun, 5) << healed.ended.out;
  EXPECT_THAT(healed.ended.err,
              ContainsRegex("takes the place of rank 1: healing 3 of 1000"));
}

// It is killed, or stopped so that no connection is closed, and comes back.
TEST_F(ShrinkingHosts, OneIsLost) {
  ASSERT_EQ(train_first("restarted", 5, {}).ended.exit_code, 0);
  options_ = {"--heal=shrink"};
  const auto restarted = train("restarted", 2, {"snapshot=1000"});
  ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  for (const std::string moment : {"agent", "node"}) {
    const bool is_stopped = moment == "node";
    start_hosts("healed " + moment, {"kill=2@5:" + moment, "pause=20"}, 2,
                ",keep_alive_interval=1,keep_alive_max_attempt=3");
    hosts_[0]->await_error("lockstep: healed in");
    if (is_stopped) signal_host(SIGCONT);
    const auto healed = finish_hosts(/*lost=*/1);
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    for (const int rank : {0, 1}) {
      EXPECT_EQ(healed.results[rank], restarted.results[rank])
          << healed.ended.err;
    }
    EXPECT_EQ(healed.begun, 4) << healed.ended.out;
    EXPECT_THAT(healed.ended.err,
                ContainsRegex("healed in .*node 1 .*was lost.*; the job goes "
                              "on with 2 ranks"));
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
    if (!is_stopped) continue;
    EXPECT_THAT(
        healed.ended.err,
        HasSubstr("was given up as lost, and the job goes on without it"));
  }
}

// Its first operation afterwards is with ranks that have left by then.
TEST_F(ShrinkingHosts, OneIsStoppedWhileARankDies) {
  fewer_on_last_ = 1;
  ASSERT_EQ(train_first("restarted", 5, {}).ended.exit_code, 0);
  ranks_of_each_ = 1;
  fewer_on_last_ = 0;
  const auto restarted = train_on_hosts("restarted", {"snapshot=1000"});
  ASSERT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  ranks_of_each_ = 2;
  fewer_on_last_ = 1;
  start_hosts("healed", {"kill=2@5:stop_computed"});
  hosts_[0]->await_output("ready 1 ");
  for (const auto deadline = Deadline::after(seconds(30));
       !fs::exists(folder_ / "killed-0") && !deadline.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  // Both ranks of host 0 wait for the one that is stopped.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const std::string& out = hosts_[0]->out();
  const auto rank_one = std::stoi(out.substr(out.find("ready 1 ") + 8));
  ASSERT_EQ(::kill(rank_one, SIGKILL), 0);
  hosts_[0]->await_error("the job goes on with 2 ranks");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  continue_worker();
  const auto healed = finish_hosts();
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  for (const int rank : {0, 1}) {
    EXPECT_EQ(healed.results[rank], restarted.results[rank])
        << healed.ended.err;
  }
  EXPECT_EQ(healed.begun, 3) << healed.ended.out;
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
}

// Both agents give up their only rank: nobody is left.
TEST_F(ShrinkingHosts, AllRestartIfNoRankIsLeft) {
  ranks_of_each_ = 1;
  start_hosts("restarted", {"snapshot=5", "kill=0@7:next,1@7:next"});
  const auto restarted = finish_hosts();
  EXPECT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  EXPECT_THAT(restarted.ended.err, HasSubstr("no rank is left"));
  EXPECT_THAT(restarted.ended.err, HasSubstr("restarting all 2 workers"));
}

// The ranks of the host of the agents' store were given up before.
TEST_F(ShrinkingHosts, AllRestartIfTheLastOneWithRanksIsLost) {
  ranks_of_each_ = 1;
  const Arguments arguments = {"model=plain", "snapshot=4",
                               "kill=0@5:next,0@7:agent"};
  start_hosts("restarted", arguments);
  hosts_[0]->await_error("this is not healed: no rank is left");
  EXPECT_NE(hosts_[1]->finish(seconds(60)).exit_code, 0);
  hosts_.pop_back();
  start_host(arguments);
  const auto restarted = finish_hosts();
  EXPECT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  EXPECT_EQ(restarted.begun, 3) << restarted.ended.out;
}

TEST_F(ShrinkingHosts, ASignalEndsAHostWithoutRanks) {
  ranks_of_each_ = 1;
  for (const size_t signalled : {0, 1}) {
    start_hosts("ended" + std::to_string(signalled),
                {"model=plain", "pause=20", "epochs=1000", "kill=0@5:next"});
    hosts_[0]->await_error("the job goes on with 1 rank");
    hosts_[1]->await_error("lockstep: healed in");
    hosts_[signalled]->signal(SIGTERM);
    for (const auto& host : hosts_) {
      EXPECT_EQ(host->finish(seconds(40)).exit_code, 128 + SIGTERM);
    }
  }
}

// The first host's rank has ended its training, and only its program goes on.
TEST_F(ShrinkingHosts, ARankThatDiesAfterAnotherHasEndedItsTrainingFails) {
  ranks_of_each_ = 1;
  restarts_ = 1;
  start_hosts("failed", {"model=plain", "outlive=1"});
  for (const auto& host : hosts_) {
    const auto ended = host->finish(seconds(60));
    EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.err;
  }
}

TEST_F(ShrinkingHosts, AllRestartIfTheyHaveCopiesOfEachOther) {
  start_hosts("restarted", {"buddies=1", "snapshot=5", "kill=3@7:backward"});
  const auto restarted = finish_hosts();
  EXPECT_EQ(restarted.ended.exit_code, 0) << restarted.ended.err;
  EXPECT_THAT(restarted.ended.err,
              HasSubstr("the job cannot go on with fewer ranks, of which each "
                        "keeps copies of another host"));
  EXPECT_THAT(restarted.ended.err, HasSubstr("restarting all 4 workers"));
}

// The agent of the host of the store shows no sign of life.
TEST_F(HealingHosts, TheOneWithTheStoreIsStopped) {
  nodes_ = 3;
  ranks_of_each_ = 1;
  second_endpoint_ = true;
  const Arguments plain = {"model=plain"};
  const auto undisturbed = train_on_hosts("undisturbed", plain);
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  start_hosts("healed", with(plain, {"kill=0@5:node"}), 4,
              ",keep_alive_interval=1,keep_alive_max_attempt=3");
  hosts_[3]->await_error("this node takes its place");
  signal_host(SIGKILL);
  const auto healed = finish_hosts(/*lost=*/1);
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
  EXPECT_EQ(healed.begun, 4) << healed.ended.out;
  EXPECT_THAT(healed.ended.err, HasSubstr("lockstep: healed in"));
}

// All that runs on a host is stopped, so that no connection is closed. When it
// comes back another one has its place.
TEST_F(HealingHosts, OneIsStoppedAndComesBack) {
  const Arguments arguments = {"model=plain", "epochs=10", "pause=50"};
  const auto undisturbed = train_on_hosts("undisturbed", arguments);
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  start_hosts("healed", with(arguments, {"kill=3@5:node"}), 3,
              ",keep_alive_interval=1,keep_alive_max_attempt=3");
  hosts_[0]->await_error("lockstep: healed in");
  signal_host(SIGCONT);
  const auto healed = finish_hosts(/*lost=*/1);
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
  EXPECT_THAT(
      healed.ended.err,
      HasSubstr("was given up as lost, and the job goes on without it"));
  EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
}

TEST_F(Healing, AccumulatedGradientsBeginAgain) {
  expect_same(2, "1@5:backward,0@7:computed", 2, {"model=accumulate"});
}

TEST_F(Healing, AScaledLossIsUnscaledOnceMore) {
  expect_same(2, "1@5:computed,0@7:update", 2, {"model=scaled"});
}

TEST_F(Healing, ARankThatIsStoppedIsReplaced) {
  const auto undisturbed = train_undisturbed(2, {});
  ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
  const auto folder = scratch() / "healed";
  auto job = start_training(folder, 2, {"kill=1@5:stop"}, {"--hang-timeout=3"});
  const auto healed = result_of(folder, 2, job->finish(seconds(180)));
  ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
  EXPECT_EQ(healed.results, undisturbed.results) << healed.ended.err;
  EXPECT_EQ(healed.begun, 3);
  EXPECT_EQ(healed.healings, 1);
}

// Each rank writes how many descriptors and mappings it has when its training
// ends. Those of a rank that has seen ten healings are those of one that has
// seen a single one.
TEST_F(Healing, LeavesNoDescriptorsAndMappings) {
  const Arguments arguments = {"epochs=3", "groups=1"};
  const auto once = held_after("once", arguments, "1@3:backward");
  const auto often =
      held_after("often", arguments,
                 "1@3:backward,1@5:forward,1@7:update,1@9:computed,"
                 "1@11:backward,1@13:forward,1@15:update,"
                 "1@17:computed,1@19:backward,1@21:forward");
  EXPECT_NE(once, "");
  EXPECT_EQ(once, often);
}

// Ranks are killed from outside at random moments: five, or LOCKSTEP_TEST_KILLS
// of them, which LOCKSTEP_TEST_SEED chooses.
class HealingAtRandom : public Healing {
 protected:
  void storm(int ranks, Arguments arguments = {}) {
    const int kills = static_cast<int>(
        get_env_int("LOCKSTEP_TEST_KILLS", 1, 500).value_or(5));
    const auto seed = static_cast<uint32_t>(
        get_env_int("LOCKSTEP_TEST_SEED", 0, 1 << 30).value_or(ranks));
    arguments.insert(arguments.end(), {"epochs=" + std::to_string(2 + kills),
                                       "pause=2", "snapshot=7"});
    const auto undisturbed = train_undisturbed(ranks, arguments);
    ASSERT_EQ(undisturbed.ended.exit_code, 0) << undisturbed.ended.err;
    const auto folder = scratch() / "healed";
    auto job = start_training(folder, ranks, arguments);
    std::mt19937 random(seed);
    int begun = ranks;
    int killed = 0;
    for (; killed < kills; ++killed) {
      job->await_output("ready ", begun, seconds(60));
      std::this_thread::sleep_for(milliseconds(random() % 120));
      // The last process that came as this rank.
      const int rank = static_cast<int>(random() % ranks);
      std::istringstream lines(job->out());
      pid_t pid = 0;
      for (std::string one; std::getline(lines, one);) {
        int who = 0;
        pid_t its = 0;
        if (std::sscanf(one.c_str() + one.find("ready"), "ready %d %d", &who,
                        &its) == 2 &&
            who == rank) {
          pid = its;
        }
      }
      if (pid == 0 || ::kill(pid, SIGKILL) != 0) break;  // it has ended
      ++begun;
    }
    const auto healed = result_of(folder, ranks, job->finish(seconds(180)));
    ASSERT_EQ(healed.ended.exit_code, 0) << healed.ended.err;
    EXPECT_GT(killed, kills / 2) << "seed " << seed;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(healed.results[rank], undisturbed.results[rank])
          << "rank " << rank << "\n"
          << healed.ended.err;
    }
    EXPECT_THAT(healed.ended.err, Not(HasSubstr("restarting all")));
  }
};

TEST_F(HealingAtRandom, TwoRanks) { storm(2); }
TEST_F(HealingAtRandom, ThreeRanks) { storm(3); }
TEST_F(HealingAtRandom, FourRanks) { storm(4); }
TEST_F(HealingAtRandom, Divided) { storm(3, kDivided); }

}  // namespace
}  // namespace lockstep::internal::testing
