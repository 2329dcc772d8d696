#include "lockstep/cli/report/trace_text.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/cli/report/trace_file_error.h"

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

}  // namespace lockstep::internal
