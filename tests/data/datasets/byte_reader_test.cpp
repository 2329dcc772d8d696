#include "lockstep/data/files/byte_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <vector>

#include "lockstep/data/data_file_error.h"
#include "tests/data/datasets/file_contents.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;

// Reads a file in pieces of `piece` bytes.
std::string content_of(const std::string& path, size_t piece = 1000) {
  const MappedFile file(path);
  const auto reader = open_bytes(file);
  std::string content;
  std::vector<uint8_t> bytes(piece);
  while (const size_t got = reader->read(bytes)) {
    content.append(bytes.begin(),
                   bytes.begin() + static_cast<std::ptrdiff_t>(got));
    if (content.size() > reader->most_bytes()) {
      throw std::logic_error("more bytes than the bound says");
    }
    if (got < piece) break;
  }
  return content;
}

TEST(ByteReader, ReadsPlainAndCompressedFiles) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 5000; ++i) text += std::to_string(i * i) + "\n";
  const std::string half = text.substr(0, 20001);
  const std::string rest = text.substr(20001);
  const std::string plain = folder.write("plain", text);
  const std::string packed = folder.write("packed", gzipped(text));
  const std::string members =
      folder.write("members", gzipped(half) + gzipped("") + gzipped(rest));
  for (const size_t piece : {1u, 7u, 4096u, 1u << 20}) {
    EXPECT_EQ(content_of(plain, piece), text);
    EXPECT_EQ(content_of(packed, piece), text);
    EXPECT_EQ(content_of(members, piece), text);
  }
  EXPECT_EQ(content_of(folder.write("empty", "")), "");
  EXPECT_EQ(content_of(folder.write("nothing", gzipped(""))), "");
  // Zeros pad a file to whole blocks.
  EXPECT_EQ(content_of(
                folder.write("padded", gzipped(text) + std::string(100, '\0'))),
            text);
}

// The bound with which claimed sizes are compared: zeros compress best.
TEST(ByteReader, KnowsABoundOfTheContent) {
  const TemporaryFolder folder;
  const std::string zeros(8'000'000, '\0');
  const std::string packed = gzipped(zeros);
  const MappedFile file(folder.write("zeros", packed));
  const uint64_t bound = open_bytes(file)->most_bytes();
  EXPECT_GE(bound, zeros.size());
  EXPECT_LE(bound, zeros.size() + zeros.size() / 50);
  EXPECT_EQ(content_of(file.path(), 1 << 20), zeros);
}

TEST(ByteReader, NamesTheByteWhereAFileIsDamaged) {
  const TemporaryFolder folder;
  const std::string good = gzipped("0123456789 0123456789 0123456789");
  const auto refusal = [&](const std::string& content) {
    const std::string path = folder.write("a.gz", content);
    return message_of([&] { content_of(path); });
  };
  EXPECT_EQ(refusal(good), "");
  EXPECT_THAT(refusal(good.substr(0, 15)),
              HasSubstr("a.gz\" ends inside its gzip data at byte 15: it was "
                        "cut short"));
  EXPECT_THAT(
      refusal(good + "more"),
      HasSubstr("its gzip data end at byte " + std::to_string(good.size()) +
                ", but the file goes on after that"));
  std::string wrong = good;
  wrong[wrong.size() - 6] ^= 1;  // in the checksum
  EXPECT_THAT(refusal(wrong), HasSubstr("is damaged: its gzip data are wrong "
                                        "at byte "));
}

TEST(ByteReader, SurvivesDamage) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 100; ++i) text += std::to_string(i * i * i) + ",";
  const std::string good = gzipped(text);
  const size_t survived =
      for_damaged(good, 400, [&](const std::string& damaged) {
        content_of(folder.write("a", damaged), 100);
      });
  EXPECT_EQ(survived, 2u) << "no byte and one byte are plain files";
}

TEST(MappedFile, SaysWhatCannotBeOpened) {
  const TemporaryFolder folder;
  EXPECT_THAT(
      message_of([] { MappedFile("/nonexistent/a"); }),
      HasSubstr("data file \"/nonexistent/a\" cannot be opened: No such "
                "file"));
  EXPECT_THAT(message_of([&] { MappedFile(folder.path()); }),
              HasSubstr("is a directory; name the file"));
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { MappedFile(folder.file("pipe")); }),
              HasSubstr("is not a regular file"));
  const MappedFile empty(folder.write("empty", ""));
  EXPECT_EQ(empty.bytes().size(), 0u);
}

}  // namespace
}  // namespace lockstep::internal
