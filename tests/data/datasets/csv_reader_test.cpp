#include "lockstep/data/files/csv_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "lockstep/data/data_file_error.h"
#include "tests/data/datasets/file_contents.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace lockstep::internal::testing;
using namespace std::string_literals;

using Row = std::vector<std::string>;

class Text : public ByteReader {
 public:
  explicit Text(std::string text) : text_(std::move(text)) {}
  size_t read(std::span<uint8_t> to) override {
    const size_t count = std::min(to.size(), text_.size() - consumed_);
    std::memcpy(to.data(), text_.data() + consumed_, count);
    consumed_ += count;
    return count;
  }
  uint64_t most_bytes() const override { return text_.size(); }

 private:
  std::string text_;
  size_t consumed_ = 0;
};

struct Table {
  std::vector<Row> rows;
  std::vector<uint64_t> lines;
};

Table read_pieces(const std::string& text, size_t piece, char separator) {
  Text bytes(text);
  CsvReader reader("f.csv", bytes, separator, piece);
  Table table;
  while (reader.next()) {
    Row& row = table.rows.emplace_back();
    for (size_t i = 0; i < reader.size(); ++i) row.emplace_back(reader[i]);
    table.lines.push_back(reader.line());
  }
  EXPECT_FALSE(reader.next()) << "the end stays the end";
  return table;
}

// Tries many places at which a piece ends.
Table read(const std::string& text, char separator = ',') {
  Table whole = read_pieces(text, 1 << 20, separator);
  for (const size_t piece : {3, 4, 5, 7}) {
    const Table cut = read_pieces(text, piece, separator);
    EXPECT_EQ(cut.rows, whole.rows) << "in pieces of " << piece;
    EXPECT_EQ(cut.lines, whole.lines) << "in pieces of " << piece;
  }
  return whole;
}

TEST(CsvReader, SplitsRowsAndFields) {
  const auto table = read("a,b\n1,2\n,\n3, 4 ");
  EXPECT_EQ(table.rows,
            (std::vector<Row>{{"a", "b"}, {"1", "2"}, {"", ""}, {"3", " 4 "}}));
  EXPECT_EQ(table.lines, (std::vector<uint64_t>{1, 2, 3, 4}));
  EXPECT_EQ(read("a;b\tc", ';').rows, (std::vector<Row>{{"a", "b\tc"}}));
  EXPECT_EQ(read("a;b\tc", '\t').rows, (std::vector<Row>{{"a;b", "c"}}));
}

TEST(CsvReader, TakesEveryKindOfLineEnd) {
  for (const char* end : {"\n", "\r\n", "\r"}) {
    const std::string e = end;
    const auto table = read("a,b" + e + "c,d" + e + e + "e,f" + e);
    EXPECT_EQ(table.rows,
              (std::vector<Row>{{"a", "b"}, {"c", "d"}, {"e", "f"}}));
    EXPECT_EQ(table.lines, (std::vector<uint64_t>{1, 2, 4}));
  }
}

TEST(CsvReader, SkipsEmptyLinesAndAByteOrderMark) {
  EXPECT_EQ(read("\n\na\n\n").rows, (std::vector<Row>{{"a"}}));
  EXPECT_EQ(read("\xef\xbb\xbf"
                 "a,b\n")
                .rows,
            (std::vector<Row>{{"a", "b"}}));
  EXPECT_TRUE(read("").rows.empty());
  EXPECT_TRUE(read("\xef\xbb\xbf").rows.empty());
  EXPECT_EQ(read("\"\"\n").rows, (std::vector<Row>{{""}}))
      << "a quoted empty field is a row";
}

TEST(CsvReader, QuotesHoldSeparatorsLineEndsAndQuotes) {
  const auto table = read("\"a,b\",\"say \"\"hi\"\"\",\"x\ny\r\nz\"\n1,2,3\n");
  EXPECT_EQ(table.rows, (std::vector<Row>{{"a,b", "say \"hi\"", "x\ny\r\nz"},
                                          {"1", "2", "3"}}));
  EXPECT_EQ(table.lines, (std::vector<uint64_t>{1, 4}));
  // As in Python, a quote inside of a field is an ordinary character.
  EXPECT_EQ(read("5\" disk, \"x\"\n").rows,
            (std::vector<Row>{{"5\" disk", " \"x\""}}));
}

TEST(CsvReader, NamesTheLineOfAWrongQuote) {
  EXPECT_EQ(message_of([] { read("a\nb,\"c\"d\n"); }),
            "data file \"f.csv\" line 2: field 2 goes on after its closing "
            "quote; give the separator or the end of the line there, or double "
            "the quote");
  EXPECT_EQ(message_of([] { read("a\n\"b\nc\n"); }),
            "data file \"f.csv\" line 4: the file ends inside of the quotes "
            "that begin in line 2");
}

// Without a limit a missing quote, or a small file that decompresses to much,
// takes all memory.
TEST(CsvReader, RefusesAnEndlessRow) {
  struct Endless : ByteReader {
    explicit Endless(uint8_t what) : byte(what) {}
    size_t read(std::span<uint8_t> to) override {
      std::fill(to.begin(), to.end(), byte);
      return to.size();
    }
    uint64_t most_bytes() const override { return UINT64_MAX; }
    uint8_t byte;
  };
  for (const char byte : {'x', ','}) {
    Endless bytes(static_cast<uint8_t>(byte));
    CsvReader reader("f.csv", bytes, ',');
    EXPECT_THAT(message_of([&] { reader.next(); }),
                HasSubstr("line 1: the row that begins in line 1 is longer "
                          "than 64 MiB or a million fields"));
  }
}

TEST(CsvReader, SurvivesDamage) {
  const std::string text =
      "\"name\",\"x\"\"y\",z\r\n\"a\nb\",2.5,\"3\"\r\n\n5\" d,,-7\n";
  for_damaged(text, 3000, [](const std::string& damaged) {
    const auto whole = read_pieces(damaged, 1 << 20, ',');
    const auto cut = read_pieces(damaged, 3, ',');
    if (whole.rows != cut.rows) throw std::logic_error("two\nmeanings");
  });
}

TEST(Numbers, AreReadAsPythonReadsThem) {
  const auto real = [](const std::string& text) {
    double value = -99;
    return parse_double(text, value) == Parsed::ok ? value : -99;
  };
  EXPECT_EQ(real("1"), 1.0);
  EXPECT_EQ(real(" +1.5e3\t"), 1500.0);
  EXPECT_EQ(real("-.5"), -0.5);
  EXPECT_EQ(real("5."), 5.0);
  EXPECT_EQ(real("0.1"), 0.1);
  EXPECT_EQ(real("1e-400"), 0.0);
  EXPECT_EQ(real("4.9406564584124654e-324"), 5e-324);
  EXPECT_EQ(real("-INF"), -HUGE_VAL);
  EXPECT_TRUE(std::isnan(real("NaN")));
  for (const char* text : {"", " ", "x", "1x", "1 2", "+-1", "++1", "--1", "+",
                           "0x10", "1,5", "1e", "1_000"}) {
    double value = -99;
    EXPECT_EQ(parse_double(text, value), Parsed::not_a_number) << text;
    EXPECT_EQ(value, -99) << text;
  }
  double value = 0;
  EXPECT_EQ(parse_double("1e999", value), Parsed::out_of_range);
  EXPECT_EQ(parse_double("-1e999", value), Parsed::out_of_range);
}

TEST(Numbers, IntegersHave64Bits) {
  int64_t value = 0;
  EXPECT_EQ(parse_int64("-9223372036854775808", value), Parsed::ok);
  EXPECT_EQ(value, INT64_MIN);
  EXPECT_EQ(parse_int64(" +9223372036854775807 ", value), Parsed::ok);
  EXPECT_EQ(value, INT64_MAX);
  EXPECT_EQ(parse_int64("9223372036854775808", value), Parsed::out_of_range);
  for (const char* text : {"", "1.0", "1e3", "0x1", "+-1", "- 1"}) {
    EXPECT_EQ(parse_int64(text, value), Parsed::not_a_number) << text;
  }
}

}  // namespace
}  // namespace lockstep::internal
