// Files changed by an accident: cut short, a bit flipped, or simply not a
// snapshot (fault 19). None may crash the reader or yield wrong content.

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <system_error>

#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace lockstep::internal::testing;

class DamagedFile : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    path_ = folder_.file(std::string("snapshot") + GetParam());
    save_snapshot_file(path_, sample_snapshot());
    content_ = read_file(path_);
  }
  TemporaryFolder folder_;
  std::string path_;
  std::string content_;
};

INSTANTIATE_TEST_SUITE_P(, DamagedFile,
                         ::testing::Values(".pt", ".safetensors"),
                         [](const auto& test) {
                           return std::string(test.param).substr(1);
                         });

TEST_P(DamagedFile, CutShortAtAnyLengthIsAnErrorThatNamesTheFile) {
  for (size_t length = 0; length < content_.size(); ++length) {
    std::filesystem::resize_file(path_, content_.size() - length - 1);
    EXPECT_THAT(
        message_of([&] { load_snapshot_file(path_); }),
        AllOf(HasSubstr("snapshot \"" + path_ + "\""), Not(HasSubstr("\n"))))
        << length;
  }
}

TEST_P(DamagedFile, AnyFlippedByteIsAnErrorOrChangesNothing) {
  size_t refused = 0;
  std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&](size_t at, char byte) {
    file.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
  };
  for (size_t at = 0; at < content_.size(); ++at) {
    for (const int bits : {0x01, 0x80, 0xff}) {
      put(at, static_cast<char>(content_[at] ^ bits));
      try {
        EXPECT_TRUE(same_snapshot(load_snapshot_file(path_), sample_snapshot()))
            << "byte " << at << " xor " << bits;
      } catch (const SnapshotError&) {
        ++refused;
      }
    }
    put(at, content_[at]);
  }
  EXPECT_GT(refused, content_.size() / 4);
}

TEST_P(DamagedFile, AFlippedBitInATensorNamesIt) {
  // Finds exp_avg of parameter 0, which repeats 0.25f.
  const size_t at = content_.find(std::string("\0\0\x80\x3e\0\0\x80\x3e", 8));
  ASSERT_NE(at, std::string::npos);
  content_[at + 2] ^= 1;
  write_file(path_, content_);
  EXPECT_THAT(message_of([&] { load_snapshot_file(path_); }),
              AllOf(HasSubstr("does not match its checksum"),
                    HasSubstr(std::string(GetParam()) == ".pt"
                                  ? "\"archive/data/"
                                  : "\"lockstep.state.0.exp_avg\"")));
}

TEST_P(DamagedFile, SurplusAtTheEndIsAnError) {
  write_file(path_, content_ + "x");
  EXPECT_THROW(load_snapshot_file(path_), SnapshotError);
}

TEST(ForeignFile, EachKindIsOneLineThatNamesTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder.file("snapshot.pt");
  const auto message = [&](const std::string& content) {
    write_file(path, content);
    return message_of([&] { load_snapshot_file(path); });
  };
  EXPECT_THAT(message(""), HasSubstr("is empty"));
  EXPECT_THAT(message("Dear reader, this is a text.\n"),
              HasSubstr("neither a file of torch.save nor a safetensors file"));
  EXPECT_THAT(message("\xff\xd8\xff\xe0 JFIF and so on"), HasSubstr("neither"));
  EXPECT_THAT(message("{\"json\": 1, \"but\": \"no tensors\"}"),
              HasSubstr("neither"));
  EXPECT_THAT(message(std::string("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20"
                                  "\x6a\xa8\x50\x19.",
                                  15)),
              HasSubstr("torch.save before version 1.6"));
  EXPECT_THAT(message(std::string(100, '\0')), HasSubstr("neither"));
}

TEST(ForeignFile, ATorchScriptArchiveIsNamed) {
  const TemporaryFolder folder;
  const std::string path = folder.file("model.pt");
  torch::save(torch::nn::Linear(2, 2), path);
  EXPECT_THAT(message_of([&] { load_snapshot_file(path); }),
              HasSubstr("TorchScript archive"));
}

TEST(MissingFile, TheErrorNamesItAndItsCause) {
  const TemporaryFolder folder;
  const std::string path = folder.file("none.pt");
  try {
    load_snapshot_file(path);
    FAIL();
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code(), std::errc::no_such_file_or_directory);
    EXPECT_THAT(error.what(), HasSubstr(path));
  }
}

TEST(MissingFile, AnEmptyFolderOrAPipeIsNoSnapshot) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of([&] { load_snapshot_file(folder.file("")); }),
              HasSubstr("is a folder without snapshots"));
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { load_snapshot_file(folder.file("pipe")); }),
              HasSubstr("is not a regular file"));
}

}  // namespace
}  // namespace lockstep::internal
