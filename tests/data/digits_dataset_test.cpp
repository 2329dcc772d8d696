#include "examples/digits_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::filesystem::path kFile =
    LOCKSTEP_SOURCE_DIR "/datasets/digits/digits.csv";

std::string content() {
  std::ostringstream text;
  text << std::ifstream(kFile).rdbuf();
  return text.str();
}

// A file with `text`, removed at the end of the test.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("digits_test." + std::to_string(getpid()) + ".csv")) {
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void refuses(const std::string& text, const char* message) {
  TemporaryFile file(text);
  EXPECT_THAT([&] { read_digits(file.path()); },
              ThrowsMessage<std::runtime_error>(
                  AllOf(HasSubstr(file.path().string()), HasSubstr(message),
                        HasSubstr("datasets/digits/digits.csv"))));
}

TEST(Digits, AreImagesWithInkBetweenZeroAndOne) {
  Digits digits = read_digits(kFile);
  EXPECT_EQ(digits.train.data().sizes(), (c10::IntArrayRef{1438, 1, 8, 8}));
  EXPECT_EQ(digits.test.data().sizes(), (c10::IntArrayRef{359, 1, 8, 8}));
  EXPECT_EQ(digits.train.data().dtype(), torch::kFloat32);
  EXPECT_EQ(digits.train.target().dtype(), torch::kInt64);
  EXPECT_EQ(digits.train.data().min().item<float>(), 0.0f);
  EXPECT_EQ(digits.train.data().max().item<float>(), 1.0f);
  // Sums over the whole file, counted with another program: ink 561718, digits
  // 8070.
  double ink = digits.train.data().sum(torch::kDouble).item<double>() +
               digits.test.data().sum(torch::kDouble).item<double>();
  EXPECT_EQ(ink * 16, 561718.0);
  EXPECT_EQ(digits.train.target().sum().item<int64_t>() +
                digits.test.target().sum().item<int64_t>(),
            8070);
}

TEST(Digits, EveryFifthRowIsForTesting) {
  Digits digits = read_digits(kFile);
  // The targets in the file begin with 0 1 2 3 4 5 6 7 8 9.
  EXPECT_TRUE(torch::equal(digits.train.target().slice(0, 0, 8),
                           torch::tensor({0, 1, 2, 3, 5, 6, 7, 8})));
  EXPECT_TRUE(
      torch::equal(digits.test.target().slice(0, 0, 2), torch::tensor({4, 9})));
  // The first row of the file is 0,0,5,13,9,1,0,0,...
  EXPECT_EQ(digits.train.data()[0][0][0][3].item<float>(), 13.0f / 16);
}

TEST(Digits, AMissingFileIsNamed) {
  EXPECT_THAT([] { read_digits("/nonexistent/digits.csv"); },
              ThrowsMessage<std::runtime_error>(
                  HasSubstr("/nonexistent/digits.csv: cannot be read")));
  EXPECT_THROW(read_digits(kFile.parent_path()), std::runtime_error);
}

TEST(Digits, ATruncatedOrForeignFileIsRefused) {
  const std::string good = content();
  size_t rows_10 = 0;
  for (int row = 0; row < 10; ++row) rows_10 = good.find('\n', rows_10) + 1;
  refuses("", "ends after 0 of 1797 lines");
  refuses(good.substr(0, rows_10), "ends after 10 of 1797 lines");
  refuses(good.substr(0, rows_10 + 40), "line 11 is not 64 integers");
  refuses(good + good.substr(0, rows_10), "line 1798 is one too many");
  refuses("<html>\n", "line 1 is not 64 integers");
  refuses("17" + good.substr(1), "line 1 is not 64 integers");
  refuses("-1" + good.substr(1), "line 1 is not 64 integers");
}

TEST(Digits, LinesMayEndAsOnWindows) {
  std::string text;
  for (char c : content()) {
    if (c == '\n') text += '\r';
    text += c;
  }
  TemporaryFile file(text);
  EXPECT_NO_THROW(read_digits(file.path()));
}

}  // namespace
}  // namespace examples
