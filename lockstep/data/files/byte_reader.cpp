#include "lockstep/data/files/byte_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/data/data_file_error.h"

namespace lockstep::internal {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // O_NONBLOCK, because opening a pipe would otherwise wait for a writer.
  const FileDescriptor fd(
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) throw_errno("data file \"" + path + "\" cannot be opened");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) {
    throw_errno("data file \"" + path + "\" cannot be read");
  }
  if (!S_ISREG(status.st_mode)) {
    throw DataFileError(
        path, std::string(S_ISDIR(status.st_mode) ? "is a directory"
                                                  : "is not a regular file") +
                  "; name the file that holds the data");
  }
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;  // mmap refuses an empty file
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (mapped == MAP_FAILED) {
    throw_errno("data file \"" + path + "\" cannot be mapped");
  }
  data_ = static_cast<const uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<uint8_t*>(data_), size_);
}

namespace {

class PlainReader : public ByteReader {
 public:
  explicit PlainReader(Bytes bytes) : rest_(bytes), size_(bytes.size()) {}

  size_t read(std::span<uint8_t> to) override {
    const size_t count = std::min(to.size(), rest_.size());
    if (count > 0) std::memcpy(to.data(), rest_.data(), count);
    rest_ = rest_.subspan(count);
    return count;
  }
  uint64_t most_bytes() const override { return size_; }

 private:
  Bytes rest_;
  uint64_t size_;
};

class GzipReader : public ByteReader {
 public:
  explicit GzipReader(const MappedFile& file) : file_(file) {
    // 16 asks for the gzip format with its checksum.
    if (::inflateInit2(&stream_, 16 + MAX_WBITS) != Z_OK)
      throw std::bad_alloc();
  }
  ~GzipReader() override { ::inflateEnd(&stream_); }
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  size_t read(std::span<uint8_t> to) override {
    size_t count = 0;
    while (count < to.size() && !ended_) count += read_some(to.subspan(count));
    return count;
  }

  // Deflate writes at most 258 bytes for each two bits (RFC 1951, 3.2.5).
  uint64_t most_bytes() const override {
    return uint64_t{file_.bytes().size()} * 1032;
  }

 private:
  // zlib counts in 32 bits.
  static uInt limited(size_t size) {
    return static_cast<uInt>(std::min<size_t>(size, size_t{1} << 30));
  }

  size_t read_some(std::span<uint8_t> to) {
    const Bytes rest = file_.bytes().subspan(consumed_);
    stream_.next_in = const_cast<Bytef*>(rest.data());
    stream_.avail_in = limited(rest.size());
    stream_.next_out = to.data();
    stream_.avail_out = limited(to.size());
    const uInt offered_in = stream_.avail_in;
    const uInt offered_out = stream_.avail_out;
    const int status = ::inflate(&stream_, Z_NO_FLUSH);
    consumed_ += offered_in - stream_.avail_in;
    const size_t written = offered_out - stream_.avail_out;
    const std::string place = " at byte " + std::to_string(consumed_);
    if (status == Z_STREAM_END) {
      next_member(place);
    } else if (status == Z_MEM_ERROR) {
      throw std::bad_alloc();
    } else if (status != Z_OK && status != Z_BUF_ERROR) {
      throw DataFileError(
          file_.path(), "is damaged: its gzip data are wrong" + place + " (" +
                            (stream_.msg ? stream_.msg : "zlib says no more") +
                            ")");
    } else if (written == 0 && consumed_ == file_.bytes().size()) {
      throw DataFileError(file_.path(), "ends inside its gzip data" + place +
                                            ": it was cut short");
    }
    return written;
  }

  void next_member(const std::string& place) {
    const Bytes rest = file_.bytes().subspan(consumed_);
    // Zeros pad a file to whole blocks of a tape or a disk; gzip, too, skips
    // them.
    if (std::all_of(rest.begin(), rest.end(),
                    [](uint8_t byte) { return byte == 0; })) {
      ended_ = true;
    } else if (!is_gzip(rest) || ::inflateReset(&stream_) != Z_OK) {
      throw DataFileError(file_.path(),
                          "is damaged: its gzip data end" + place +
                              ", but the file goes on after that");
    }
  }

  const MappedFile& file_;
  z_stream stream_{};
  size_t consumed_ = 0;
  bool ended_ = false;
};

}  // namespace

bool is_gzip(Bytes bytes) {
  return bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b;
}

std::unique_ptr<ByteReader> open_bytes(const MappedFile& file) {
  if (is_gzip(file.bytes())) return std::make_unique<GzipReader>(file);
  return std::make_unique<PlainReader>(file.bytes());
}

}  // namespace lockstep::internal
