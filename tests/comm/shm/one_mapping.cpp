// Replaces lockstep/base/shared_memory.h's implementation for ranks that are
// threads of one process: memory that several ranks map has the same address
// for all of them. ThreadSanitizer compares addresses, and would not see that
// two mappings are the same memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "lockstep/base/shared_memory.h"

namespace lockstep::internal {
namespace {

struct Mapping {
  std::byte* data = nullptr;
  int holders = 0;
};

std::mutex mutex;
std::map<ino_t, Mapping>& mappings() {
  static std::map<ino_t, Mapping> all;
  return all;
}

ino_t identity(int descriptor) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) throw_errno("fstat");
  return status.st_ino;
}

}  // namespace

SharedMemory::SharedMemory(FileDescriptor descriptor, size_t bytes)
    : descriptor_(std::move(descriptor)), size_(bytes) {
  const std::lock_guard lock(mutex);
  auto& mapping = mappings()[identity(descriptor_.get())];
  if (mapping.holders++ == 0) {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                      descriptor_.get(), 0);
    if (at == MAP_FAILED) throw_errno("mmap");
    mapping.data = static_cast<std::byte*>(at);
  }
  data_ = mapping.data;
}

SharedMemory SharedMemory::create(size_t bytes) {
  FileDescriptor descriptor(::memfd_create("lockstep_test", MFD_CLOEXEC));
  if (!descriptor) throw_errno("memfd_create");
  if (::ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
    throw_errno("ftruncate");
  }
  return {std::move(descriptor), bytes};
}

SharedMemory SharedMemory::map(FileDescriptor descriptor, size_t bytes, Pages) {
  return {std::move(descriptor), bytes};
}

void SharedMemory::touch() const {}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ == nullptr) return;
  const std::lock_guard lock(mutex);
  const auto mapping = std::ranges::find_if(
      mappings(),
      [this](const auto& entry) { return entry.second.data == data_; });
  if (--mapping->second.holders > 0) return;
  ::munmap(data_, size_);
  mappings().erase(mapping);
}

}  // namespace lockstep::internal
