#include "lockstep/cli/report/trace_scan.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <istream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/cli/report/trace_events.h"

namespace lockstep::internal {
namespace {

constexpr unsigned kPieceBytes = 1 << 18;

}  // namespace

TraceText::TraceText(const std::string& path)
    : path_(path), piece_(kPieceBytes) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) {
    throw TraceFileError(path + ": " + std::generic_category().message(errno));
  }
  if (!S_ISREG(status.st_mode)) throw TraceFileError(path + " is not a file");
  if (status.st_size == 0) {
    throw TraceFileError(path +
                         " is empty: was the program killed before it wrote?");
  }
  file_.reset(gzdopen(file.get(), "rb"));
  if (!file_) throw TraceFileError(path + ": out of memory");
  file.release();
  gzbuffer(file_.get(), kPieceBytes);
}

TraceText::int_type TraceText::underflow() {
  const int count = gzread(file_.get(), piece_.data(), kPieceBytes);
  int error = Z_OK;
  const char* words = gzerror(file_.get(), &error);
  // zlib reports an end in the middle of compressed data as Z_BUF_ERROR.
  if (count < 0 || (count == 0 && error != Z_OK)) {
    throw TraceFileError(
        path_ + " cannot be read on after byte " + std::to_string(bytes_) +
        (error == Z_BUF_ERROR ? std::string(": the file was cut off")
         : error == Z_ERRNO   ? ": " + std::generic_category().message(errno)
                              : ": " + std::string(words)));
  }
  if (count == 0) return traits_type::eof();
  bytes_ += count;
  setg(piece_.data(), piece_.data(), piece_.data() + count);
  return traits_type::to_int_type(*gptr());
}

namespace {

using Json = nlohmann::json;

// Base, offset and time of an event are added, so each is at most a quarter of
// what int64_t holds: 73 years in nanoseconds.
constexpr int64_t kMostTime = int64_t{1} << 61;
constexpr int64_t kHighestRank = (1 << 20) - 1;
constexpr size_t kMostHostName = 256;

// Returns `text` in quotation marks, as JSON has it.
std::string json_text(std::string_view text) {
  std::string all = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      all += '\\';
      all += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr const char* kDigits = "0123456789abcdef";
      all += "\\u00";
      all += kDigits[(c >> 4) & 1];
      all += kDigits[c & 15];
    } else {
      all += c;
    }
  }
  return all + '"';
}

// Returns whole nanoseconds of a decimal number of microseconds. It reads the
// digits, because a double has too few for the time since 1970. Returns false
// for numbers with an exponent and for too large ones.
bool nanoseconds_of(std::string_view text, int64_t& nanoseconds) {
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  const size_t point = std::min(text.find('.'), text.size());
  if (point > 15) return false;
  int64_t value = 0;
  for (size_t i = 0; i < point + 4; ++i) {
    if (i == point) continue;
    const char c = i < text.size() ? text[i] : '0';
    if (c < '0' || c > '9') return false;
    value = value * 10 + (c - '0');
  }
  if (text.find_first_not_of("0123456789.") != text.npos) return false;
  nanoseconds = negative ? -value : value;
  return true;
}

// The handler of nlohmann's parser. Members of an event are at depth 3, those
// of its args at depth 4.
class Scanner : public nlohmann::json_sax<Json> {
 public:
  Scanner(const std::string& path, const TraceText& text, bool keep_rest,
          const std::function<void(const TraceEvent&)>& on_event)
      : path_(path), text_(text), keep_rest_(keep_rest), on_event_(on_event) {}

  const TraceHeader& header() const { return header_; }

  bool null() override { return scalar("null", Kind::other); }
  bool boolean(bool value) override {
    if (in_header_ && depth_ == 2 && key_[2] == "merged" && value) {
      header_.merged = true;
      return false;  // nothing more is of interest
    }
    return scalar(value ? "true" : "false", Kind::other);
  }
  bool number_integer(number_integer_t value) override {
    return scalar(std::to_string(value), Kind::number);
  }
  bool number_unsigned(number_unsigned_t value) override {
    return scalar(std::to_string(value), Kind::number);
  }
  bool number_float(number_float_t, const string_t& text) override {
    return scalar(text, Kind::number);
  }
  bool string(string_t& value) override { return scalar(value, Kind::text); }
  bool binary(binary_t&) override { return true; }

  bool start_object(size_t) override {
    if (depth_ == 2 && in_events_) {
      clear_event();
    } else {
      begin_structure("{");
    }
    if (depth_ == 1) {
      in_header_ = key_[1] == "distributedInfo" || key_[1] == "lockstep";
    }
    ++depth_;
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ < 5) key_[depth_] = name;
    if (in_event()) {
      special_ = depth_ == 3 && (name == "pid" || name == "tid" ||
                                 name == "ts" || name == "id");
      if (keep_rest_ && !special_) write(json_text(name) + ":", false);
    }
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ == 2 && in_events_) {
      finish_event();
    } else {
      end_structure("}");
    }
    if (depth_ == 1) in_header_ = false;
    return true;
  }
  bool start_array(size_t) override {
    if (depth_ == 0) {
      throw TraceFileError(
          path_ +
          " is not a trace of a profiler: the document must be "
          "an object with \"traceEvents\"");
    }
    if (depth_ == 1 && key_[1] == "traceEvents") {
      in_events_ = header_.has_events = true;
    } else {
      begin_structure("[");
      if (in_sizes() && depth_ == 5) inputs_.sizes.emplace_back();
    }
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    if (depth_ == 1) {
      in_events_ = false;
    } else {
      end_structure("]");
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    const auto end = static_cast<size_t>(text_.bytes());
    if (position > end) {
      throw TraceFileError(path_ + " ends in the middle, after byte " +
                           std::to_string(end) +
                           ": was the program killed while it wrote?");
    }
    std::string words = error.what();
    const size_t reason = words.find(" - ");
    words = reason == std::string::npos ? "" : ": " + words.substr(reason + 3);
    for (char& c : words) {
      if (c < 0x20 || c > 0x7e) c = '?';
    }
    throw TraceFileError(path_ + " is not JSON at byte " +
                         std::to_string(position) + words);
  }

 private:
  enum class Kind { number, text, other };

  bool in_event() const { return in_events_ && depth_ >= 3; }
  bool in_sizes() const {
    return in_event() && key_[3] == "args" && key_[4] == "Input Dims";
  }

  [[noreturn]] void refuse(const std::string& member, std::string given,
                           const std::string& allowed) const {
    for (char& c : given) {
      if (c < 0x20 || c > 0x7e) c = '?';
    }
    if (given.size() > 80) given = given.substr(0, 77) + "...";
    throw TraceFileError(path_ + ": " + member + " is " + given +
                         "; allowed is " + allowed);
  }
  std::string place(const char* member) const {
    return "traceEvents[" + std::to_string(index_) + "]." + member;
  }

  // Writes to the text of the event, with a comma if one belongs before it.
  void write(std::string_view text, bool complete) {
    if (!keep_rest_) return;
    if (comma_) event_.rest += ',';
    event_.rest += text;
    comma_ = complete;
  }
  void begin_structure(const char* bracket) {
    if (!in_event()) {
      if (depth_ == 2 && in_events_) {
        refuse("traceEvents[" + std::to_string(index_) + "]", "a list",
               "an object");
      }
      return;
    }
    if (special_ && depth_ == 3) {
      refuse(place(key_[3].c_str()), "not a number or a text", "one of these");
    }
    write(bracket, false);
  }
  void end_structure(const char* bracket) {
    if (!in_event() || !keep_rest_) return;
    event_.rest += bracket;
    comma_ = true;
  }

  bool scalar(const std::string& text, Kind kind) {
    if (depth_ == 0) {
      throw TraceFileError(path_ + " is not a trace of a profiler");
    }
    if (in_event()) {
      event_scalar(text, kind);
    } else if (in_events_ && depth_ == 2) {
      refuse("traceEvents[" + std::to_string(index_) + "]", text, "an object");
    } else if (depth_ == 1 && key_[1] == "baseTimeNanoseconds") {
      header_.base_ns = whole(key_[1], text, kind, -kMostTime, kMostTime);
    } else if (depth_ == 1 && key_[1] == "host_name") {
      // From Kineto. Lockstep's own field says the same.
      if (header_.host.empty()) header_.host = host_name(key_[1], text, kind);
    } else if (depth_ == 2 && in_header_) {
      header_scalar(text, kind);
    }
    return true;
  }

  void event_scalar(const std::string& text, Kind kind) {
    const bool is_text = kind == Kind::text;
    if (depth_ == 3) {
      const std::string& member = key_[3];
      if (member == "name" && is_text) event_.name = text;
      if (member == "cat" && is_text) event_.category = text;
      if (member == "ph" && is_text) event_.phase = text;
      if (member == "pid") event_.process = is_text ? json_text(text) : text;
      if (member == "tid") event_.thread = is_text ? json_text(text) : text;
      if (member == "id") event_.id = is_text ? json_text(text) : text;
      if (member == "ts") {
        event_.begin_ns = microseconds("ts", text, kind, -kMostTime);
        event_.has_time = true;
      }
      if (member == "dur") {
        event_.duration_ns = microseconds("dur", text, kind, 0);
      }
      if (special_) return;
    } else if (depth_ == 4 && key_[3] == "args") {
      if (key_[4] == "name" && is_text) event_.named = text;
      if (key_[4] == "labels" && is_text) event_.labels = text;
      // Kineto writes some numbers as texts.
      if (key_[4] == "flops" || key_[4] == "Flops") {
        const double flops = std::strtod(text.c_str(), nullptr);
        if (std::isfinite(flops) && flops > 0) event_.flops = flops;
      }
    } else if (depth_ == 6 && in_sizes() && kind == Kind::number &&
               !inputs_.sizes.empty()) {
      inputs_.sizes.back().push_back(std::strtod(text.c_str(), nullptr));
    } else if (depth_ == 5 && key_[3] == "args" &&
               key_[4] == "Concrete Inputs") {
      inputs_.values.push_back(text);
    }
    if (keep_rest_) write(is_text ? json_text(text) : text, true);
  }

  int64_t microseconds(const char* member, const std::string& text, Kind kind,
                       int64_t lowest) const {
    int64_t nanoseconds = 0;
    bool fits = kind == Kind::number;
    if (fits && !nanoseconds_of(text, nanoseconds)) {
      const double value = 1000 * std::strtod(text.c_str(), nullptr);
      fits = std::abs(value) < static_cast<double>(kMostTime);
      if (fits) nanoseconds = std::llround(value);
    }
    if (!fits || nanoseconds < lowest || nanoseconds > kMostTime) {
      refuse(place(member), text, "a number of microseconds, at most 73 years");
    }
    return nanoseconds;
  }

  int64_t whole(const std::string& member, const std::string& text, Kind kind,
                int64_t lowest, int64_t highest) const {
    int64_t value = 0;
    const auto* end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, value);
    if (kind != Kind::number || read.ec != std::errc() || read.ptr != end ||
        value < lowest || value > highest) {
      refuse(member, text,
             "a whole number from " + std::to_string(lowest) + " to " +
                 std::to_string(highest));
    }
    return value;
  }

  void header_scalar(const std::string& text, Kind kind) {
    const std::string& member = key_[2];
    const std::string place = key_[1] + "." + member;
    if (member == "rank") {
      // The profiler's group, which "lockstep" is about, may be a part of the
      // default group.
      const int rank =
          static_cast<int>(whole(place, text, kind, 0, kHighestRank));
      if (key_[1] == "lockstep" && default_group_) return;
      default_group_ = key_[1] == "distributedInfo";
      header_.rank = rank;
      header_.has_rank = true;
    } else if (member == "world_size") {
      const int world_size =
          static_cast<int>(whole(place, text, kind, 1, kHighestRank + 1));
      if (key_[1] == "lockstep" && default_group_) return;
      header_.world_size = world_size;
    } else if (key_[1] != "lockstep") {
      return;
    } else if (member == "version") {
      whole(place, text, kind, 1, 1);
    } else if (member == "pid") {
      header_.pid = static_cast<int>(whole(place, text, kind, 0, INT32_MAX));
    } else if (member == "clock_offset_ns") {
      header_.clock_offset_ns = whole(place, text, kind, -kMostTime, kMostTime);
      header_.clock_measured = true;
    } else if (member == "clock_uncertainty_ns") {
      header_.clock_uncertainty_ns = whole(place, text, kind, 0, kMostTime);
    } else if (member == "host") {
      header_.host = host_name(place, text, kind);
    }
  }
  std::string host_name(const std::string& member, const std::string& text,
                        Kind kind) const {
    const bool printable =
        std::ranges::all_of(text, [](char c) { return c >= 0x20 && c < 0x7f; });
    if (kind != Kind::text || !printable || text.size() > kMostHostName) {
      refuse(member, text, "at most 256 printable ASCII characters");
    }
    return text;
  }

  void clear_event() {
    // Assigning a new event would free the strings' memory.
    for (auto* text : {&event_.name, &event_.category, &event_.phase,
                       &event_.process, &event_.thread, &event_.id,
                       &event_.named, &event_.labels, &event_.rest}) {
      text->clear();
    }
    event_.has_time = false;
    event_.begin_ns = event_.duration_ns = 0;
    event_.flops = 0;
    inputs_.sizes.clear();
    inputs_.values.clear();
    comma_ = false;
  }
  void finish_event() {
    if (event_.flops == 0 && !inputs_.sizes.empty()) {
      event_.flops = operator_flops(event_.name, inputs_);
    }
    on_event_(event_);
    ++index_;
  }

  const std::string& path_;
  const TraceText& text_;
  const bool keep_rest_;
  const std::function<void(const TraceEvent&)>& on_event_;
  TraceHeader header_;
  TraceEvent event_;
  OperatorInputs inputs_;  // of the event, if it is an operator
  std::string key_[5];     // the member that is being read, at each depth
  size_t depth_ = 0;
  size_t index_ = 0;
  bool in_events_ = false;
  bool in_header_ = false;
  bool default_group_ = false;  // "distributedInfo" was read
  bool special_ = false;
  bool comma_ = false;
};

}  // namespace

TraceHeader scan_trace(const std::string& path, bool keep_rest,
                       const std::function<void(const TraceEvent&)>& on_event) {
  TraceText text(path);
  std::istream stream(&text);
  Scanner scanner(path, text, keep_rest, on_event);
  Json::sax_parse(stream, &scanner);
  if (!scanner.header().has_events && !scanner.header().merged) {
    throw TraceFileError(
        path + " is not a trace of a profiler: it has no \"traceEvents\"");
  }
  return scanner.header();
}

}  // namespace lockstep::internal
