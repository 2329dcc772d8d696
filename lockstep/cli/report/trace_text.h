#pragma once

#include <zlib.h>

#include <cstdint>
#include <memory>
#include <streambuf>
#include <string>
#include <vector>

namespace lockstep::internal {

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

}  // namespace lockstep::internal
