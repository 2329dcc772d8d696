#pragma once

#include <zlib.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <streambuf>
#include <string>
#include <vector>

namespace lockstep::internal {

// what() is one line: the file or folder, the place in it, what it has and what
// is allowed.
class TraceFileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The text of a trace file, plain or compressed by gzip, which is read piece by
// piece. Opening and reading throw TraceFileError.
class TraceText : public std::streambuf {
 public:
  explicit TraceText(const std::string& path);

  // Returns how many bytes of text were read so far.
  int64_t bytes() const { return bytes_; }

 protected:
  int_type underflow() override;

 private:
  struct Close {
    void operator()(gzFile_s* file) const { gzclose(file); }
  };
  std::string path_;
  std::unique_ptr<gzFile_s, Close> file_;
  std::vector<char> piece_;
  int64_t bytes_ = 0;
};

// Reads a trace event by event, in a single pass and in little memory: traces
// of some hundred megabytes are usual.

// An event of "traceEvents", as the Trace Event Format of Chrome has them
// (documentation of that name) and Kineto writes them.
struct TraceEvent {
  std::string name{};
  std::string category{};
  std::string phase{};    // "X": an event with a duration; "M": metadata
  std::string process{};  // "pid" and "tid" as they stand in the file: a number
  std::string thread{};   // or a text in quotation marks
  std::string id{};       // the same, of events that belong together; or empty
  bool has_time = false;
  int64_t begin_ns = 0;  // counted from the file's base_ns
  int64_t duration_ns = 0;
  double flops = 0;  // floating-point operations, as far as the event tells
  // args.name and args.labels, by which metadata names processes.
  std::string named{};
  std::string labels{};
  // The members of the event as JSON, without braces, pid, tid, ts and id; only
  // if they were asked for.
  std::string rest{};
};

// The metadata of a trace.
struct TraceHeader {
  bool has_events = false;  // there is a list "traceEvents"
  bool merged = false;      // written by `lockstep report trace --output`
  bool has_rank = false;
  int rank = 0;
  int world_size = 1;
  int pid = 0;         // 0 if it is not known
  std::string host{};  // empty if it is not known
  bool clock_measured = false;
  int64_t clock_offset_ns = 0;
  int64_t clock_uncertainty_ns = 0;
  int64_t base_ns = 0;  // nanoseconds since 1970, of "baseTimeNanoseconds"
};

// Calls `on_event` for each event, in the order of the file; the event is valid
// during the call. Of a merged trace it reads the beginning only. Throws
// TraceFileError, which names the file and the byte or the event.
TraceHeader scan_trace(const std::string& path, bool keep_rest,
                       const std::function<void(const TraceEvent&)>& on_event);

}  // namespace lockstep::internal
