#include "lockstep/base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/base/control_groups.h"
#include "lockstep/base/huge_pages.h"
#include "lockstep/base/system_file.h"

namespace lockstep::internal {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U  // Linux 6.3
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

std::string amount(size_t bytes) {
  return std::to_string(bytes) + " bytes of shared memory";
}

FileDescriptor anonymous_file() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // If vm.memfd_noexec is 2, the system gives only memory that cannot be
  // executed.
  FileDescriptor file(::memfd_create("lockstep", kFlags | MFD_NOEXEC_SEAL));
  if (!file && errno == EINVAL) {
    file = FileDescriptor(::memfd_create("lockstep", kFlags));
  }
  if (!file) throw_errno("could not make shared memory (memfd_create)");
  return file;
}

// Throws if the host or the control group has less memory left. Reserving more
// would not fail: the kernel would end a process instead, of this job or of
// another. Amounts below `kSmall` are not checked, because that costs time.
void require_memory(size_t bytes) {
  constexpr size_t kSmall = size_t{64} << 20;
  if (bytes < kSmall) return;
  const auto available = memory_field("MemAvailable");
  if (!available) return;
  int64_t left = *available + memory_field("SwapFree").value_or(0);
  if (const auto limit = memory_limit()) left = std::min(left, limit->left());
  if (bytes <= static_cast<size_t>(left)) return;
  errno = ENOMEM;
  throw_errno("could not make " + amount(bytes) + ", as only " +
              std::to_string(left) + " are left");
}

// Huge pages need an address that is a multiple of their size. For a mapping
// like this one the system does not choose such an address by itself.
std::byte* map_aligned(int descriptor, size_t bytes) {
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  if (bytes < kHugePage) {
    void* at = ::mmap(nullptr, bytes, kAccess, MAP_SHARED, descriptor, 0);
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }
  const size_t room = bytes + kHugePage;
  void* reserved = ::mmap(nullptr, room, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  auto* aligned = begin + (kHugePage - address % kHugePage) % kHugePage;
  void* at =
      ::mmap(aligned, bytes, kAccess, MAP_SHARED | MAP_FIXED, descriptor, 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, room);
    errno = error;
    return nullptr;
  }
  if (aligned > begin) ::munmap(begin, aligned - begin);
  const long page = ::sysconf(_SC_PAGESIZE);
  auto* end = aligned + (bytes + page - 1) / page * page;
  if (end < begin + room) ::munmap(end, begin + room - end);
  return aligned;
}

}  // namespace

SharedMemory::SharedMemory(FileDescriptor descriptor, size_t bytes)
    : descriptor_(std::move(descriptor)), size_(bytes) {
  data_ = map_aligned(descriptor_.get(), bytes);
  if (data_ == nullptr) throw_errno("could not map " + amount(bytes));
  if (bytes >= kHugePage) ::madvise(data_, bytes, MADV_HUGEPAGE);
}

// Asks for huge pages whatever the system gives shared memory by itself: many
// small pages take many times longer to reserve, to map and to free. The kernel
// makes a huge page only where there is a page already. If it has none, the
// rest is left to populate(). It is asked once for all, because each time it
// waits for a thread of its own on every core, also on those that are busy.
void SharedMemory::collapse() const {
  const size_t whole = size_ - size_ % kHugePage;
  for (size_t at = 0; at < whole; at += kHugePage) {
    if (::madvise(data_ + at, 1, MADV_POPULATE_WRITE) != 0) return;
  }
  ::madvise(data_, whole, MADV_COLLAPSE);
}

// Lets the kernel map every page, and make those that are missing, so that
// missing memory is an error here instead of a SIGBUS later. Returns false if
// the kernel cannot do that: before Linux 5.14, and in some sandboxes.
bool SharedMemory::populate(const char* what) const {
  if (::madvise(data_, size_, MADV_POPULATE_WRITE) == 0) return true;
  if (errno == EINVAL) return false;
  // EFAULT stands for what would have been the SIGBUS: the system has no page
  // left.
  if (errno == EFAULT) errno = ENOSPC;
  throw_errno(what + amount(size_));
}

// Reserves all pages; in small pages if populate() cannot.
void SharedMemory::reserve() const {
  constexpr const char* kWhat = "could not reserve ";
  if (populate(kWhat)) return;
  if (::fallocate(descriptor_.get(), 0, 0, static_cast<off_t>(size_)) != 0) {
    throw_errno(kWhat + amount(size_));
  }
}

SharedMemory SharedMemory::create(size_t bytes) {
  if (bytes == 0) {
    throw std::invalid_argument(
        "0 bytes of shared memory were asked for; ask for 1 or more");
  }
  require_memory(bytes);
  auto descriptor = anonymous_file();
  require_file_size(bytes, "could not make " + amount(bytes));
  if (::ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
    throw_errno("could not make " + amount(bytes));
  }
  if (::fcntl(descriptor.get(), F_ADD_SEALS, kSeals) != 0) {
    throw_errno("could not seal " + amount(bytes));
  }
  SharedMemory memory(std::move(descriptor), bytes);
  memory.collapse();
  memory.reserve();
  memory.made_here_ = true;
  made().add(static_cast<int64_t>(bytes));
  return memory;
}

void require_file_size(uint64_t bytes, const std::string& what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= bytes) return;
  errno = EFBIG;
  throw_errno(what + " (the limit on the size of files, ulimit -f, is lower)");
}

ByteCount& SharedMemory::made() {
  static constinit ByteCount count;
  return count;
}

SharedMemory SharedMemory::map(FileDescriptor descriptor, size_t bytes,
                               Pages pages) {
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0) throw_errno("fstat");
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals ||
      status.st_size != static_cast<off_t>(bytes)) {
    throw std::invalid_argument(
        "a peer sent a descriptor that is not its sealed memory of " +
        std::to_string(bytes) + " bytes (size " +
        std::to_string(status.st_size) + ", seals " + std::to_string(seals) +
        ")");
  }
  SharedMemory memory(std::move(descriptor), bytes);
  if (pages == Pages::all) memory.touch();
  return memory;
}

// The process that made the memory has reserved its pages. If they cannot be
// mapped together, each is mapped at its first use.
void SharedMemory::touch() const { populate("could not map the pages of "); }

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      made_here_(std::exchange(other.made_here_, false)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(made_here_, other.made_here_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ == nullptr) return;
  ::munmap(data_, size_);
  if (made_here_) made().remove(static_cast<int64_t>(size_));
}

}  // namespace lockstep::internal
