#include "lockstep/data/files/idx_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "tests/data/datasets/file_contents.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using namespace std::string_literals;

std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

std::string idx(char type, const std::vector<uint32_t>& sizes,
                const std::string& elements) {
  std::string text = "\0\0"s + type + static_cast<char>(sizes.size());
  for (const uint32_t size : sizes) text += big_endian(size);
  return text + elements;
}

TEST(IdxFile, ReadsRowsOfEveryTypeInThisMachinesOrder) {
  const TemporaryFolder folder;
  // Two rows; the second one holds 258 in its first element, as far as the type
  // can hold it.
  const auto row = [&](char type, const std::string& first,
                       const std::string& second, bool packed) {
    std::string content = idx(type, {2, 1}, first + second);
    const IdxFile file(folder.write("f", packed ? gzipped(content) : content));
    EXPECT_EQ(static_cast<char>(file.type()), type);
    EXPECT_EQ(file.sizes(), (std::vector<int64_t>{2, 1}));
    EXPECT_EQ(file.rows(), 2u);
    EXPECT_EQ(file.row_bytes(), second.size());
    std::string bytes(file.row_bytes(), '\xee');
    file.copy_row(1, bytes.data());
    return bytes;
  };
  const auto of = [](auto value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  for (const bool packed : {false, true}) {
    EXPECT_EQ(row(0x08, "\1"s, "\xff"s, packed), of(uint8_t{255}));
    EXPECT_EQ(row(0x09, "\1"s, "\xff"s, packed), of(int8_t{-1}));
    EXPECT_EQ(row(0x0b, "\0\1"s, "\1\2"s, packed), of(int16_t{258}));
    EXPECT_EQ(row(0x0c, "\0\0\0\1"s, "\0\0\1\2"s, packed), of(int32_t{258}));
    EXPECT_EQ(row(0x0d, "\0\0\0\0"s, "\x40\x20\0\0"s, packed), of(2.5f));
    EXPECT_EQ(row(0x0e, std::string(8, '\0'), "\x40\x04\0\0\0\0\0\0"s, packed),
              of(2.5));
  }
}

TEST(IdxFile, MayHaveNoRows) {
  const TemporaryFolder folder;
  const IdxFile file(folder.write("f", idx(8, {0, 28, 28}, "")));
  EXPECT_EQ(file.rows(), 0u);
  const IdxFile packed(folder.write("g", gzipped(idx(8, {0, 28, 28}, ""))));
  EXPECT_EQ(packed.rows(), 0u);
  const IdxFile thin(folder.write("h", idx(8, {3, 0}, "")));
  EXPECT_EQ(thin.rows(), 3u);
  thin.copy_row(2, nullptr);
}

TEST(IdxFile, SaysWhatIsWrong) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& content) {
    const std::string path = folder.write("f", content);
    return message_of([&] { IdxFile file(path); });
  };
  EXPECT_THAT(refusal(""), HasSubstr("ends inside its first four bytes"));
  EXPECT_THAT(refusal("\0\0\x08\3\0\0\0\1"s), HasSubstr("inside its sizes"));
  EXPECT_THAT(
      refusal("PK\3\4"s),
      HasSubstr("is not an IDX file: it begins with the bytes 0x50 0x4b "
                "0x03 0x04; IDX begins with 0x00 0x00 and a type"));
  EXPECT_THAT(refusal("\0\0\x0a\1\0\0\0\0"s), HasSubstr("is not an IDX file"));
  EXPECT_THAT(refusal("\0\0\x08\0"s), HasSubstr("has 0 dimensions (byte 3)"));
  EXPECT_THAT(refusal(idx(8, {2, 3}, "12345")),
              AllOf(HasSubstr("its sizes [2, 3] with 1 bytes for each element "
                              "need 18 bytes, and it has 17"),
                    HasSubstr("it was cut short")));
  EXPECT_THAT(refusal(idx(8, {2, 3}, "1234567")),
              HasSubstr("the file goes on after that"));
  EXPECT_THAT(refusal(gzipped(idx(8, {2, 3}, "1234567"))),
              HasSubstr("the file goes on after that"));
  EXPECT_THAT(refusal(gzipped(idx(8, {2, 3}, "12345"))),
              HasSubstr("it has 17"));
}

// A file of some bytes must not make the program ask for much memory.
TEST(IdxFile, RefusesClaimsBeforeItAllocates) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& content) {
    const std::string path = folder.write("f", content);
    return message_of([&] { IdxFile file(path); });
  };
  const uint32_t most = UINT32_MAX;
  EXPECT_THAT(refusal(idx(14, {most, most}, "")),
              HasSubstr("claims too many elements"));
  EXPECT_THAT(refusal(idx(14, {most, 0, most}, "")),
              HasSubstr("claims too many elements"))
      << "a size of 0 hides no overflow";
  EXPECT_THAT(refusal(idx(8, {most, 1000}, "")), HasSubstr("it has 12"));
  EXPECT_THAT(refusal(gzipped(idx(8, {most, 1000}, ""))),
              HasSubstr("no gzip file of "));
}

TEST(IdxFile, SurvivesDamage) {
  const TemporaryFolder folder;
  const std::string good = idx(11, {3, 2, 2}, std::string(24, '\7'));
  const auto use = [&](const std::string& damaged) {
    const IdxFile file(folder.write("f", damaged));
    std::vector<char> row(file.row_bytes());
    for (size_t i = 0; i < std::min<size_t>(file.rows(), 1000); ++i) {
      file.copy_row(i, row.data());
    }
  };
  EXPECT_EQ(for_damaged(good, 500, use), 0u);
  EXPECT_EQ(for_damaged(gzipped(good), 500, use), 0u);
}

}  // namespace
}  // namespace lockstep::internal
