#include "lockstep/data/files/safetensors_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/datasets/file_contents.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace lockstep::internal::testing;

const std::string kTwo =
    R"({"b":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},)"
    R"("a":{"dtype":"I16","shape":[],"data_offsets":[6,8]},)"
    R"("__metadata__":{"by":"hand"}})";

TEST(SafetensorsFile, FindsTensorsAndTheirBytes) {
  const TemporaryFolder folder;
  const SafetensorsFile file(
      folder.write("f", safetensors(kTwo, "abcdef\1\2")));
  const SafetensorsTensor* b = file.find("b");
  ASSERT_TRUE(b);
  EXPECT_EQ(b->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_STREQ(b->dtype->torch_name, "Byte");
  EXPECT_EQ(std::string(file.bytes(*b), file.bytes(*b) + 6), "abcdef");
  const SafetensorsTensor* a = file.find("a");
  ASSERT_TRUE(a);
  EXPECT_TRUE(a->shape.empty());
  EXPECT_EQ(a->dtype->bytes, 2u);
  EXPECT_EQ(file.bytes(*a)[1], 2);
  EXPECT_FALSE(file.find("__metadata__"));
  EXPECT_EQ(file.names(), R"("b", "a")");

  std::string many;
  for (char name = 'a'; name < 'm'; ++name) {
    many += (many.empty() ? "{\"" : ",\"") + std::string(1, name) +
            R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  }
  const SafetensorsFile names(folder.write("m", safetensors(many + "}", "")));
  EXPECT_THAT(names.names(),
              AllOf(HasSubstr("\"j\", ..."), Not(HasSubstr("k"))));
  EXPECT_EQ(SafetensorsFile(folder.write("n", safetensors("{}", ""))).names(),
            "none");
}

TEST(SafetensorsFile, RefusesWhatIsNone) {
  const TemporaryFolder folder;
  const auto message = [&](const std::string& content) {
    const std::string path = folder.write("f", content);
    return message_of([&] { SafetensorsFile file(path); });
  };
  EXPECT_THAT(message(""), HasSubstr("it has 0 bytes, and 8 with the length"));
  EXPECT_THAT(message("PK\3\4 zip archive"),
              AllOf(HasSubstr("is damaged, or no safetensors file: it claims a "
                              "header of "),
                    HasSubstr("there are 8, and at most 100,000,000")));
  EXPECT_THAT(message(safetensors("{]", "")), HasSubstr("not valid JSON"));
  EXPECT_THAT(message(safetensors("[]", "")), HasSubstr("is not an object"));
  EXPECT_THAT(message(safetensors(kTwo, "abcdef\1")),
              HasSubstr("need 8 bytes and it has 7, so it was cut short"));
  EXPECT_THAT(message(safetensors(kTwo, "abcdef\1\2\3")),
              HasSubstr("bytes that belong to no tensor"));
  EXPECT_THAT(
      message(safetensors(
          R"({"a\nb":{"dtype":"X\n","shape":[],"data_offsets":[0,0]}})", "")),
      HasSubstr(R"(tensor "a\nb": dtype "X\n" is not known)"));
}

TEST(SafetensorsFile, ReadsNothingOutsideOfDamagedFiles) {
  const TemporaryFolder folder;
  const size_t survived = for_damaged(
      safetensors(kTwo, "abcdef\1\2"), 3000, [&](const std::string& content) {
        const SafetensorsFile file(folder.write("f", content));
        for (const char* name : {"a", "b"}) {
          const SafetensorsTensor* tensor = file.find(name);
          if (!tensor) continue;
          unsigned sum = 0;
          for (uint64_t i = 0; i < tensor->end - tensor->begin; ++i) {
            sum += file.bytes(*tensor)[i];
          }
          EXPECT_LE(sum, 8 * 255u);
        }
      });
  EXPECT_EQ(survived, 0u);
}

}  // namespace
}  // namespace lockstep::internal
