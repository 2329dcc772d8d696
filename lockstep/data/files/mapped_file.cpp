#include "lockstep/data/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

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

}  // namespace lockstep::internal
