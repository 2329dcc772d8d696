// Files that another process leaves, which may be links, pipes or endless, and
// files that this one makes where others write, too.
#include "lockstep/base/whole_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "tests/harness/temporary_folder.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

class LeftFile : public ::testing::Test {
 protected:
  LeftFile() {
    fs::create_directories(inside() / "folder");
    write_file(inside() / "folder/file", "0123456789");
    write_file(outside(), "secret");
  }
  fs::path inside() const { return folder_.file("inside"); }
  fs::path outside() const { return folder_.file("outside"); }
  // Returns the errno with which nothing is opened; 0 if something is.
  int refusal(const fs::path& name) const {
    errno = 0;
    return open_left_file(inside(), name) ? 0 : errno;
  }

  TemporaryFolder folder_;
};

TEST_F(LeftFile, ARegularFileIsRead) {
  EXPECT_EQ(read_left_file(inside(), "folder/file", 100), "0123456789");
  EXPECT_EQ(read_left_file(inside(), "folder/file", 4), "0123");
  EXPECT_EQ(read_end_of_left_file(inside(), "folder/file", 4), "6789");
  EXPECT_EQ(read_end_of_left_file(inside(), "folder/file", 100), "0123456789");
  EXPECT_EQ(refusal("folder/none"), ENOENT);
}

TEST_F(LeftFile, NothingElseIsOpenedAndNothingIsFollowed) {
  fs::create_symlink(outside(), inside() / "link");
  fs::create_directory_symlink(folder_.path(), inside() / "linked");
  ASSERT_EQ(::mkfifo((inside() / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(refusal("link"), ELOOP);
  EXPECT_NE(refusal("linked/outside"), 0);
  EXPECT_EQ(refusal("pipe"), EINVAL) << "and waits for no writer";
  EXPECT_EQ(refusal("folder"), EINVAL);
  EXPECT_EQ(refusal("../outside"), EINVAL);
  EXPECT_EQ(refusal("folder/../../outside"), EINVAL);
  EXPECT_EQ(refusal(outside()), EINVAL);
}

TEST_F(LeftFile, AnOwnFileTakesThePlaceOfWhatIsThere) {
  fs::create_symlink(outside(), inside() / "link");
  ASSERT_EQ(::mkfifo((inside() / "pipe").c_str(), 0600), 0);
  for (const char* name : {"link", "pipe", "folder/file", "new"}) {
    EXPECT_TRUE(write_own_file(inside() / name, "own")) << name;
    EXPECT_EQ(read_left_file(inside(), name, 100), "own") << name;
  }
  EXPECT_EQ(read_left_file(folder_.path(), "outside", 100), "secret");
  EXPECT_FALSE(write_own_file(inside() / "folder", "own"));
}

// A bug (Fault 33): the file that is written before it is renamed had a name
// that others could guess, and a link there led to any file of the user.
TEST_F(LeftFile, WritingAsideFollowsNoLinkAtItsName) {
  const fs::path report = inside() / "report.json";
  const fs::path guessed = report.string() + "." + std::to_string(::getpid());
  fs::create_symlink(outside(), guessed);
  EXPECT_EQ(write_aside(report.string(), "report", /*is_private=*/false), 0);
  EXPECT_EQ(read_left_file(folder_.path(), "outside", 100), "secret");
  EXPECT_EQ(read_left_file(inside(), "report.json", 100), "report");
  EXPECT_TRUE(fs::is_symlink(guessed));
}

TEST_F(LeftFile, WritingToAPipeThatNobodyReadsIsAnError) {
  const fs::path pipe = inside() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(write_aside(pipe.string(), "report"), ENXIO);
  const FileDescriptor reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK));
  EXPECT_EQ(write_aside(pipe.string(), "report"), 0);
  char bytes[100];
  EXPECT_EQ(::read(reader.get(), bytes, sizeof bytes), 6);
}

}  // namespace
}  // namespace lockstep::internal::testing
