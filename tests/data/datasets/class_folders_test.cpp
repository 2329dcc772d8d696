#include "lockstep/data/files/class_folders.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;

const ClassFolders::Options kImages{.extensions = {".jpg", ".png"},
                                    .refused_extensions = {".bmp"}};

// Returns "class:path below the root" of every file.
std::vector<std::string> listed(
    const std::string& root, const ClassFolders::Options& options = kImages) {
  const ClassFolders folders(root, options);
  std::vector<std::string> result;
  for (size_t i = 0; i < folders.size(); ++i) {
    result.push_back(std::to_string(folders.class_of(i)) + ":" +
                     folders.path(i).substr(root.size() + 1));
  }
  return result;
}

// The order is that of sorted() over paths in Python, where "a-b" comes before
// "a/b", and upper case before lower case.
TEST(ClassFolders, ListsFilesInTheOrderOfTorchvision) {
  const TemporaryFolder folder;
  for (const char* name :
       {"b/2.png", "b/10.png", "b/B.JPG", "b/note.txt", "Z/1.jpg", "b/x/1.png",
        "b/x/y/1.png", "b/x-/1.png", "top.png", "b/png", "b/.png"}) {
    folder.write(name, "");
  }
  const ClassFolders folders(folder.path(), kImages);
  EXPECT_THAT(folders.classes(), ElementsAre("Z", "b"));
  EXPECT_THAT(
      listed(folder.path()),
      ElementsAre("0:Z/1.jpg", "1:b/.png", "1:b/10.png", "1:b/2.png",
                  "1:b/B.JPG", "1:b/x/1.png", "1:b/x-/1.png", "1:b/x/y/1.png"));
}

TEST(ClassFolders, FollowsLinksButNoLoop) {
  const TemporaryFolder folder;
  folder.write("root/a/1.png", "");
  folder.write("other/2.png", "");
  std::filesystem::create_directory_symlink(folder.file("other"),
                                            folder.file("root/b"));
  EXPECT_THAT(listed(folder.file("root")),
              ElementsAre("0:a/1.png", "1:b/2.png"));
  std::filesystem::create_directory_symlink(folder.file("root/a"),
                                            folder.file("root/a/again"));
  EXPECT_THAT(
      message_of([&] { listed(folder.file("root")); }),
      HasSubstr("root/a/again\" is a link to a folder that it lies in"));
}

TEST(ClassFolders, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of([&] { listed(folder.path()); }),
              HasSubstr("has no folders; give a folder that has one folder of "
                        "images for each class"));
  EXPECT_THAT(message_of([&] { listed(folder.file("absent")); }),
              HasSubstr("absent\" cannot be read"));
  folder.write("full/1.png", "");
  folder.write("empty/1.txt", "");
  std::filesystem::create_directory(folder.file("emptier"));
  EXPECT_THAT(message_of([&] { listed(folder.path()); }),
              HasSubstr("has classes without a file that ends in .jpg .png: "
                        "\"emptier\", \"empty\"; remove these folders, or set "
                        "allow_empty"));
  ClassFolders::Options options = kImages;
  options.allow_empty = true;
  EXPECT_THAT(listed(folder.path(), options), ElementsAre("2:full/1.png"));
  folder.write("full/2.BMP", "");
  EXPECT_THAT(message_of([&] { listed(folder.path(), options); }),
              HasSubstr("full/2.BMP\" is an image of a format that cannot be "
                        "decoded"));
}

}  // namespace
}  // namespace lockstep::internal
