#include "lockstep/data/files/csv_reader.h"

#include <locale.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <new>
#include <system_error>
#include <utility>

#include "lockstep/data/data_file_error.h"

namespace lockstep::internal {
namespace {

std::string_view without_blanks(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// from_chars takes a minus, but no plus.
std::string_view without_plus(std::string_view text) {
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') {
    text.remove_prefix(1);
  }
  return text;
}

// Reads a number of which from_chars says only that no double is near it.
double too_large_or_small(std::string_view text) {
  static const locale_t plain = ::newlocale(LC_ALL_MASK, "C", locale_t{});
  if (!plain) throw std::bad_alloc();
  return ::strtod_l(std::string(text).c_str(), nullptr, plain);
}

}  // namespace

Parsed parse_double(std::string_view text, double& value) {
  text = without_plus(without_blanks(text));
  double parsed = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto [rest, error] = std::from_chars(begin, end, parsed);
  if (error == std::errc::invalid_argument || rest != end) {
    return Parsed::not_a_number;
  }
  if (error == std::errc::result_out_of_range) {
    parsed = too_large_or_small(text);
    if (std::isinf(parsed)) return Parsed::out_of_range;
  }
  value = parsed;
  return Parsed::ok;
}

Parsed parse_int64(std::string_view text, int64_t& value) {
  text = without_plus(without_blanks(text));
  int64_t parsed = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto [rest, error] = std::from_chars(begin, end, parsed);
  if (error == std::errc::invalid_argument || rest != end) {
    return Parsed::not_a_number;
  }
  if (error == std::errc::result_out_of_range) return Parsed::out_of_range;
  value = parsed;
  return Parsed::ok;
}

CsvReader::CsvReader(std::string path, ByteReader& bytes, char separator,
                     size_t piece)
    : path_(std::move(path)),
      bytes_(bytes),
      separator_(separator),
      piece_(piece) {}

int CsvReader::peek() {
  if (at_ == filled_) {
    at_ = 0;
    filled_ = bytes_.read(piece_);
    if (!started_) {
      started_ = true;
      if (filled_ >= 3 && piece_[0] == 0xef && piece_[1] == 0xbb &&
          piece_[2] == 0xbf) {
        at_ = 3;
        if (at_ == filled_) return peek();
      }
    }
    if (filled_ == 0) return kEnd;
  }
  return piece_[at_];
}

void CsvReader::refuse(const std::string& problem) const {
  throw DataFileError(path_,
                      "line " + std::to_string(next_line_) + ": " + problem);
}

void CsvReader::check_length() const {
  if (text_.size() > kMostRowBytes || ends_.size() > kMostFields) {
    refuse("the row that begins in line " + std::to_string(row_line_) +
           " is longer than 64 MiB or a million fields; is a quote not "
           "closed, or is it another kind of file?");
  }
}

// Appends the bytes of an unquoted field, as far as this piece has them.
void CsvReader::append_until_special() {
  const size_t begin = at_;
  while (at_ < filled_) {
    const char c = static_cast<char>(piece_[at_]);
    if (c == separator_ || c == '\n' || c == '\r') break;
    ++at_;
  }
  text_.append(reinterpret_cast<const char*>(piece_.data()) + begin,
               at_ - begin);
  check_length();
}

// Reads from after the opening quote to after the closing one.
void CsvReader::read_quoted() {
  const uint64_t opened = next_line_;
  bool cr = false;
  while (true) {
    const int c = peek();
    if (c == kEnd) {
      refuse("the file ends inside of the quotes that begin in line " +
             std::to_string(opened));
    }
    consume();
    if (c == '"') {
      if (peek() != '"') return;
      consume();
    } else if (c == '\r' || (c == '\n' && !cr)) {
      ++next_line_;
    }
    cr = c == '\r';
    text_.push_back(static_cast<char>(c));
    check_length();
  }
}

void CsvReader::end_field() {
  ends_.push_back(text_.size());
  check_length();
}

bool CsvReader::next() {
  while (true) {
    text_.clear();
    ends_.clear();
    if (peek() == '\n' && after_cr_) consume();
    after_cr_ = false;
    row_line_ = next_line_;
    if (peek() == kEnd) return false;
    bool quoted = false;
    bool ended = false;
    while (!ended) {
      if (peek() == '"') {
        consume();
        quoted = true;
        read_quoted();
        const int after = peek();
        if (after != kEnd && after != '\n' && after != '\r' &&
            after != static_cast<uint8_t>(separator_)) {
          refuse("field " + std::to_string(ends_.size() + 1) +
                 " goes on after its closing quote; give the separator or the "
                 "end of the line there, or double the quote");
        }
      }
      while (true) {
        const int c = peek();
        if (c == static_cast<uint8_t>(separator_)) {
          consume();
          end_field();
          break;
        }
        if (c == kEnd || c == '\n' || c == '\r') {
          if (c != kEnd) consume();
          after_cr_ = c == '\r';
          end_field();
          ended = true;
          break;
        }
        append_until_special();
      }
    }
    ++next_line_;
    if (ends_.size() > 1 || !text_.empty() || quoted) return true;
  }
}

}  // namespace lockstep::internal
