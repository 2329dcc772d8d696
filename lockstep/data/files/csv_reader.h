#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/files/byte_reader.h"

namespace lockstep::internal {

enum class Parsed {
  ok,
  not_a_number,
  out_of_range,
};

// Read the decimal number that `text` holds and nothing else, whatever the
// locale; blanks (spaces and tabs) around it and a leading "+" are allowed.
// Write `value` only if the result is Parsed::ok.
//
// A double is the nearest one, as Python's float() gives it; "nan" and "inf"
// are numbers, too. Too small a number becomes 0; too large a one is out of
// range.
Parsed parse_double(std::string_view text, double& value);
Parsed parse_int64(std::string_view text, int64_t& value);

// Splits comma-separated text into rows and fields, as RFC 4180 says and
// Python's csv module does it:
//
// - A row ends with CR LF, LF or CR; the last row need not.
// - A field that begins with `"` ends at the next single `"`. It may hold
//   separators and line ends; `""` in it is one `"`. A quote inside of any
//   other field is an ordinary character.
// - Empty lines are skipped, and so is a byte order mark (UTF-8) at the start.
//
// Stricter than Python: text after a closing quote and a quote that is never
// closed are errors.
//
// Belongs to one thread.
class CsvReader {
 public:
  // Rows longer than this are refused: they are a sign of a missing quote.
  static constexpr size_t kMostRowBytes = size_t{64} << 20;
  static constexpr size_t kMostFields = size_t{1} << 20;

  // `path` is for errors. `bytes` must outlive this object; it is read in
  // pieces of `piece` bytes (3 or more).
  CsvReader(std::string path, ByteReader& bytes, char separator,
            size_t piece = size_t{64} << 10);

  // Reads the next row; returns whether there was one. Throws DataFileError.
  bool next();

  // The fields of the row, until the next call of next().
  size_t size() const { return ends_.size(); }
  std::string_view operator[](size_t field) const {
    const size_t begin = field == 0 ? 0 : ends_[field - 1];
    return std::string_view(text_).substr(begin, ends_[field] - begin);
  }

  // The number of the line, from 1 on, in which the row begins.
  uint64_t line() const { return row_line_; }

  const std::string& path() const { return path_; }

 private:
  static constexpr int kEnd = -1;

  // Returns the next byte without or with consuming it, kEnd at the end.
  int peek();
  void consume() { ++at_; }
  void append_until_special();
  void read_quoted();
  void end_field();
  void check_length() const;
  [[noreturn]] void refuse(const std::string& problem) const;

  std::string path_;
  ByteReader& bytes_;
  const char separator_;

  std::vector<uint8_t> piece_;
  size_t at_ = 0;
  size_t filled_ = 0;
  bool started_ = false;
  // Whether the last byte was a CR that ended a line, so that an LF belongs to
  // the same end.
  bool after_cr_ = false;
  uint64_t next_line_ = 1;

  std::string text_;          // the row's fields, unquoted, one after another
  std::vector<size_t> ends_;  // the end of each field in text_
  uint64_t row_line_ = 0;
};

}  // namespace lockstep::internal
