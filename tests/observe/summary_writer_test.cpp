// Tests what SummaryWriter does with ranks, with mistakes, and with a process
// or disk that fails. tensorboard_interop_test.cpp compares what it writes.

#include "lockstep/observe/summary_writer.h"

#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <limits>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/observe/event.h"
#include "tests/docs/in_folder.h"
#include "tests/harness/in_child.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/observe/event_records.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using namespace lockstep::internal::testing;
namespace fs = std::filesystem;

WORLD_TEST(SummaryWriter, OnlyRankZeroWrites, 1, 3) {
  auto group = init_process_group("gloo");
  const std::string folder = world.folder / "only_rank_zero";
  {
    SummaryWriter writer(folder);
    EXPECT_EQ(writer.writes(), world.rank == 0);
    EXPECT_EQ(writer.log_dir(), folder);
    writer.add_scalar("loss", torch::tensor(0.25), 3);
    writer.add_scalars("both", {{"a", 1}, {"b", 2}}, 3);
    writer.add_histogram("weights", torch::ones({3}), 3);
    writer.add_text("note", "text", 3);
    writer.add_image("image", torch::zeros({3, 2, 2}), 3);
    writer.add_images("images", torch::zeros({2, 1, 2, 2}), 3);
    writer.add_hparams({{"lr", 0.1}}, {{"final", 0.5}}, "h");
    // A mistake is the same on every rank.
    EXPECT_THROW(writer.add_scalar("", 1), std::invalid_argument);
    EXPECT_THROW(writer.add_scalar("a", torch::ones({2})),
                 std::invalid_argument);
    EXPECT_THROW(writer.add_histogram("a", torch::ones({0})),
                 std::invalid_argument);
    EXPECT_THROW(writer.add_text("a", "\xff"), std::invalid_argument);
    EXPECT_THROW(writer.add_image("a", torch::ones({2, 2})),
                 std::invalid_argument);
    writer.flush();
    writer.close();
  }
  barrier();
  EXPECT_THAT(files_below(folder), ElementsAre("both_a/events", "both_b/events",
                                               "events", "h/events"));
  EXPECT_THAT(events_of(event_file_in(folder)), SizeIs(1 + 5));
}

WORLD_TEST(SummaryWriter, EachRankWritesAFolderIfAsked, 2) {
  // Before there is a group, the rank is the launcher's.
  const std::string folder = world.folder / "every_rank";
  {
    SummaryWriter writer(folder, {.every_rank = true});
    EXPECT_EQ(writer.log_dir(), folder + "/rank_" + std::to_string(world.rank));
    writer.add_scalar("loss", world.rank);
  }
  auto group = init_process_group("gloo");
  barrier();
  EXPECT_THAT(files_below(folder),
              ElementsAre("rank_0/events", "rank_1/events"));
}

TEST(SummaryWriter, TheDefaultFolderHasDateAndHost) {
  const TemporaryFolder folder;
  const InFolder in_folder(folder.path());
  const SummaryWriter writer("", {.comment = "_lr_0.1"});
  EXPECT_THAT(
      writer.log_dir(),
      ::testing::MatchesRegex("runs/[A-Z][a-z]+[0-9]+_[0-9-]+_.*_lr_0.1"));
  EXPECT_THAT(files_below(writer.log_dir()), ElementsAre("events"));
}

TEST(SummaryWriter, TwoWritersOfAFolderHaveFilesOfTheirOwn) {
  const TemporaryFolder folder;
  const SummaryWriter one(folder.path());
  const SummaryWriter two(folder.path(), {.filename_suffix = ".two"});
  EXPECT_THAT(files_below(folder.path()), ElementsAre("events", "events"));
}

class WrittenFolder : public ::testing::Test {
 protected:
  std::vector<std::string> events() const {
    return events_of(event_file_in(folder_.path()));
  }

  TemporaryFolder folder_;
};
using SummaryWriterTest = WrittenFolder;

TEST_F(SummaryWriterTest, EachMistakeIsOneLineAndWritesNothing) {
  SummaryWriter writer(folder_.path());
  const auto mistake = [](auto call) {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(mistake([&] { writer.add_scalar("", 1); }),
            "add_scalar(): the tag is empty; give a name, such as "
            "\"train/loss\"");
  EXPECT_THAT(mistake([&] { writer.add_text("a\nb", "text"); }),
              HasSubstr("the tag \"a\\nb\" has a control character"));
  EXPECT_THAT(mistake([&] { writer.add_scalar("\xc3", 1); }),
              HasSubstr("the tag is not UTF-8"));
  EXPECT_EQ(mistake([&] { writer.add_scalar("loss", torch::ones({2, 3})); }),
            "add_scalar(\"loss\") was given a Float tensor of shape [2, 3]; "
            "give a number, or a tensor of one element and a real dtype");
  EXPECT_THAT(mistake([&] { writer.add_scalar("loss", at::Tensor()); }),
              HasSubstr("an undefined tensor"));
  EXPECT_THAT(mistake([&] {
                writer.add_scalar("loss",
                                  torch::ones({}, torch::kComplexFloat));
              }),
              HasSubstr("ComplexFloat tensor of shape []"));
  EXPECT_THAT(mistake([&] {
                writer.add_scalar("loss", torch::ones({}, torch::kMeta));
              }),
              HasSubstr("was given a Float tensor"));
  EXPECT_THAT(mistake([&] { writer.add_scalars("a", {{"", 1}}); }),
              HasSubstr("the name of a value is empty"));
  EXPECT_THAT(
      mistake([&] { writer.add_histogram("a", torch::eye(2).to_sparse()); }),
      HasSubstr("a sparse Float tensor"));
  for (const std::vector<double>& bins : std::vector<std::vector<double>>{
           {1},
           {1, 1},
           {2, 1},
           {0, std::numeric_limits<double>::infinity()},
           {0, std::numeric_limits<double>::quiet_NaN()}}) {
    EXPECT_THAT(
        mistake([&] { writer.add_histogram("a", torch::ones(1), 0, bins); }),
        HasSubstr("2 or more finite numbers that ascend"));
  }
  const auto image = torch::zeros({3, 4, 5});
  EXPECT_THAT(mistake([&] { writer.add_image("a", image, 0, {}, "NCHW"); }),
              HasSubstr("give CHW, HWC or HW"));
  for (const at::Tensor& wrong :
       {torch::zeros({2, 4, 5}), torch::zeros({3, 0, 5}), torch::zeros({4, 5}),
        image.to(at::kLong), at::Tensor()}) {
    EXPECT_THAT(mistake([&] { writer.add_image("a", wrong); }),
                HasSubstr("1, 3 or 4 channels"));
  }
  EXPECT_THAT(mistake([&] { writer.add_images("a", image); }),
              HasSubstr("[images, channels, height, width]"));
  EXPECT_THAT(
      mistake([&] { writer.add_images("a", torch::ones({1, 2, 3, 3})); }),
      HasSubstr("1, 3 or 4 channels"));
  EXPECT_THAT(mistake([&] { writer.add_hparams({{"", 1}}, {}); }),
              HasSubstr("the name of a hyperparameter is empty"));
  EXPECT_THAT(mistake([&] { writer.add_hparams({{"a", "\xff"}}, {}); }),
              HasSubstr("the text of \"a\" is not UTF-8"));
  EXPECT_THAT(mistake([&] { writer.add_hparams({}, {{"", 1}}); }),
              HasSubstr("the name of a metric is empty"));
  EXPECT_EQ(mistake([&] { writer.add_scalars("m/x", {{"../../evil", 1}}); }),
            "add_scalars(\"m/x\"): the name of a value \"../../evil\" names a "
            "folder outside of the log's; give a name without \"..\"");
  for (const std::string name : {"../out", "a/../../out", ".."}) {
    EXPECT_THAT(mistake([&] { writer.add_hparams({}, {}, name); }),
                HasSubstr("run_name \"" + name + "\" names a folder outside"));
  }
  EXPECT_THAT(mistake([&] { writer.add_hparams({}, {}, "/tmp/out"); }),
              HasSubstr("run_name \"/tmp/out\" is an absolute path"));
  EXPECT_THAT(mistake([&] { writer.add_hparams({}, {}, "a\nb"); }),
              HasSubstr("control character"));
  const std::string path = folder_.file("never");
  for (const SummaryWriterOptions& wrong :
       {SummaryWriterOptions{.max_queue = 0},
        SummaryWriterOptions{.flush_secs = std::chrono::seconds(0)}}) {
    EXPECT_THAT(mistake([&] { SummaryWriter never(path, wrong); }),
                HasSubstr("give 1 or more for each"));
  }
  EXPECT_THAT(mistake([&] { SummaryWriter never("", {.every_rank = true}); }),
              HasSubstr("every_rank needs a log_dir"));
  EXPECT_FALSE(fs::exists(path));
  writer.close();
  EXPECT_THAT(events(), SizeIs(1));
  EXPECT_THROW(writer.add_scalar("late", 1), std::logic_error);
  EXPECT_NO_THROW(writer.close());
}

// As in Python's, a name is a path, and its dots may be a part of a word.
TEST_F(SummaryWriterTest, NamesOfRunsMayHaveSlashes) {
  {
    SummaryWriter writer(folder_.path());
    writer.add_scalars("m/x", {{"a/b..", 1}});
    writer.add_hparams({{"lr", 1}}, {}, "h/..i");
  }
  EXPECT_THAT(files_below(folder_.path()),
              ::testing::UnorderedElementsAre("events", "h/..i/events",
                                              "m_x_a/b../events"));
}

TEST_F(SummaryWriterTest, AFolderThatCannotBeMadeIsAnErrorWithItsName) {
  folder_.write("file", "");
  EXPECT_THAT(
      message_of([&] { SummaryWriter writer(folder_.file("file/runs")); }),
      HasSubstr("file/runs"));
}

TEST_F(SummaryWriterTest, FlushedEventsSurviveSigkill) {
  const int ended = in_child([&] {
    SummaryWriter writer(folder_.path(), {.max_queue = 1000});
    for (int step = 0; step < 5; ++step) writer.add_scalar("a", step, step);
    writer.flush();
    writer.add_scalar("lost", 1);
    ::raise(SIGKILL);
    return 0;
  });
  EXPECT_EQ(ended, -1);
  const auto found = events();
  ASSERT_THAT(found, SizeIs(1 + 5));
  for (size_t step = 0; step < 5; ++step) {
    EXPECT_EQ(found[1 + step].substr(9),
              scalar_event({0, static_cast<int64_t>(step)}, "a",
                           static_cast<double>(step))
                  .substr(9));  // without the time
  }
}

TEST_F(SummaryWriterTest, AnEndWithoutCloseWritesAtTheDestructor) {
  { SummaryWriter(folder_.path()).add_scalar("a", 1); }
  EXPECT_THAT(events(), SizeIs(2));
}

TEST_F(SummaryWriterTest, AForkedChildLeavesTheFileAlone) {
  auto writer = std::make_unique<SummaryWriter>(folder_.path());
  writer->add_scalar("parent", 1);
  EXPECT_EQ(in_child([&] {
              const std::string message =
                  message_of([&] { writer->add_scalar("child", 1); });
              writer.reset();
              return message.find("before fork()") == std::string::npos;
            }),
            0);
  writer.reset();
  EXPECT_THAT(events(), SizeIs(2));
}

// In a name space of its own, so that mounting needs no rights, if the system
// allows that.
TEST_F(SummaryWriterTest, AFullDiskIsAWarningUntilThereIsRoom) {
  constexpr int kSkipped = 77;
  const std::string folder = folder_.file("mounted");
  fs::create_directory(folder);
  const int result = in_child([&] {
    const bool root = ::geteuid() == 0;
    if (::unshare(CLONE_NEWNS | (root ? 0 : CLONE_NEWUSER)) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=64k") != 0) {
      return kSkipped;
    }
    KeptWarnings warnings;
    SummaryWriter writer(folder);
    write_file(folder + "/large", std::string(64 << 10, 'x'));
    writer.add_text("text", std::string(10000, 't'));
    const std::string failed = message_of([&] { writer.flush(); });
    if (failed.find("cannot be written; make room, or log elsewhere: No space "
                    "left on device") == std::string::npos) {
      return 1;
    }
    for (int count = 0; count < 100; ++count) writer.add_scalar("a", 1);
    fs::remove(folder + "/large");
    writer.flush();
    const auto found = events_of(event_file_in(folder));
    if (found.size() != 1 + 1 + 100) return 2;
    if (!warnings.texts().empty()) return 3;  // flush() has told

    // Without a flush, the next call of add_...() tells, once.
    write_file(folder + "/large", std::string(64 << 10, 'x'));
    for (int count = 0; count < 100000 && warnings.texts().empty(); ++count) {
      writer.add_text("text", std::string(1000, 't'));
    }
    for (int count = 0; count < 100; ++count) writer.add_scalar("a", 1);
    if (warnings.texts().size() != 1) return 4;
    const std::string& text = warnings.texts()[0];
    if (text.find("(No space left on device); training goes on") ==
        std::string::npos) {
      return 5;
    }
    return 0;
  });
  if (result == kSkipped) GTEST_SKIP() << "this system lets nothing be mounted";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace lockstep::internal
