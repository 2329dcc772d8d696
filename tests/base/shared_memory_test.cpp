#include "lockstep/base/shared_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/system_file.h"
#include "tests/harness/call_filter.h"
#include "tests/harness/in_child.h"

namespace lockstep::internal {
namespace {

using testing::filter_calls;
using testing::in_child;

FileDescriptor another(int descriptor) {
  return FileDescriptor(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
}

TEST(SharedMemory, IsZerosOfTheSizeAskedForWhereverItBegins) {
  for (const size_t bytes :
       {size_t{1}, size_t{4096}, size_t{5000}, (size_t{2} << 20) - 1,
        size_t{2} << 20, (size_t{5} << 20) + 1}) {
    const auto memory = SharedMemory::create(bytes);
    ASSERT_TRUE(memory);
    EXPECT_EQ(memory.size(), bytes);
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    EXPECT_EQ(at % (bytes >= size_t{2} << 20 ? size_t{2} << 20 : 4096), 0u);
    EXPECT_TRUE(std::ranges::all_of(
        memory.bytes(), [](std::byte byte) { return byte == std::byte{}; }));
    memory.bytes().back() = std::byte{1};
  }
}

// Returns how many KiB of the mapping that begins at `data` are huge pages.
int64_t huge_kib(const void* data) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<uintptr_t>(data) << '-';
  std::ifstream maps("/proc/self/smaps");
  bool is_it = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") != std::string::npos) {
      is_it = line.starts_with(begin.str());
    }
    constexpr std::string_view kField = "ShmemPmdMapped:";
    if (is_it && line.starts_with(kField)) {
      return std::stoll(line.substr(kField.size()));
    }
  }
  return 0;
}

// Whatever the system gives shared memory by itself.
TEST(SharedMemory, LiesInHugePagesIfTheKernelMakesThem) {
  constexpr size_t kHuge = size_t{2} << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1
  const FileDescriptor file(::memfd_create("lockstep-test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), 2 * kHuge), 0);
  // A huge page begins at a multiple of its size, in memory and in the file.
  void* const reserved =
      ::mmap(nullptr, 3 * kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  auto* aligned = static_cast<std::byte*>(reserved);
  aligned += (kHuge - reinterpret_cast<uintptr_t>(reserved) % kHuge) % kHuge;
  ASSERT_EQ(::mmap(aligned, 2 * kHuge, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_FIXED, file.get(), 0),
            aligned);
  *aligned = std::byte{1};
  const bool makes_some = ::madvise(aligned, kHuge, kCollapse) == 0;
  ::munmap(reserved, 3 * kHuge);
  if (!makes_some) GTEST_SKIP() << "the kernel makes no huge pages";
  const auto memory = SharedMemory::create(2 * kHuge + 1);
  EXPECT_EQ(huge_kib(memory.data()), 4096);
  const auto other =
      SharedMemory::map(another(memory.descriptor()), 2 * kHuge + 1);
  EXPECT_EQ(huge_kib(other.data()), 4096);
}

TEST(SharedMemory, ItsMappingsShowTheSameBytes) {
  const auto one = SharedMemory::create(3 << 20);
  const auto other = SharedMemory::map(another(one.descriptor()), 3 << 20);
  EXPECT_NE(one.data(), other.data());
  one.bytes().back() = std::byte{7};
  other.bytes().front() = std::byte{8};
  EXPECT_EQ(other.bytes().back(), std::byte{7});
  EXPECT_EQ(one.bytes().front(), std::byte{8});
}

TEST(SharedMemory, OutlivesItsDescriptorAndItsMaker) {
  auto one = SharedMemory::create(4096);
  auto other = SharedMemory::map(another(one.descriptor()), 4096);
  other.close_descriptor();
  EXPECT_EQ(other.descriptor(), -1);
  one.bytes()[5] = std::byte{9};
  one = SharedMemory();
  EXPECT_EQ(other.bytes()[5], std::byte{9});
}

TEST(SharedMemory, AChildWritesWhatItsParentReads) {
  const auto memory = SharedMemory::create(4096);
  const auto child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    memory.bytes()[100] = std::byte{3};
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(memory.bytes()[100], std::byte{3});
}

TEST(SharedMemory, NobodyCanCutIt) {
  const auto memory = SharedMemory::create(8192);
  EXPECT_NE(::ftruncate(memory.descriptor(), 4096), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(::ftruncate(memory.descriptor(), 16384), 0);
  EXPECT_NE(::fcntl(memory.descriptor(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(SharedMemory, OfAnotherSizeOrKindIsNotMapped) {
  const auto memory = SharedMemory::create(8192);
  EXPECT_THROW(SharedMemory::map(another(memory.descriptor()), 4096),
               std::invalid_argument);
  FileDescriptor unsealed(::memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 8192), 0);
  EXPECT_THROW(SharedMemory::map(std::move(unsealed), 8192),
               std::invalid_argument);
  FileDescriptor file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_THROW(SharedMemory::map(std::move(file), 8192), std::invalid_argument);
}

// Gives madvise(MADV_POPULATE_WRITE) the error that kernels before Linux 5.14
// give. Cannot be taken back.
bool refuse_to_populate() {
  constexpr uint32_t kPopulateWrite = 23;
  constexpr auto kAdvice = offsetof(seccomp_data, args) + 2 * sizeof(uint64_t);
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kAdvice),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kPopulateWrite, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  return filter_calls(program);
}

// Memory whose descriptor was closed, as that of peers is, could not be touched
// ("Bad file descriptor"), so that FullyShard did not work on CPUs.
TEST(SharedMemory, OfAPeerIsUsedOnAKernelThatMapsNoPagesTogether) {
  constexpr int kNoFilter = 99;
  const int ended = in_child([] {
    if (!refuse_to_populate()) return kNoFilter;
    const auto own = SharedMemory::create(3 << 20);
    auto peers = SharedMemory::map(another(own.descriptor()), own.size(),
                                   SharedMemory::Pages::none);
    peers.close_descriptor();
    peers.touch();
    own.bytes().back() = std::byte{7};
    return peers.bytes().back() == std::byte{7} ? 0 : 1;
  });
  if (ended == kNoFilter) GTEST_SKIP() << "system calls cannot be filtered";
  EXPECT_EQ(ended, 0);
}

TEST(SharedMemory, ThatIsNotThereIsAnErrorWithItsSize) {
  try {
    SharedMemory::create(size_t{1} << 50);
    FAIL() << "a pebibyte was found";
  } catch (const std::system_error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("1125899906842624 bytes"));
  }
  EXPECT_THROW(SharedMemory::create(0), std::invalid_argument);
}

// A bug: the kernel ended the process, or another one of the host, because the
// pages were filled until no memory was left.
TEST(SharedMemory, OfMoreThanTheHostHasLeftIsAnErrorBeforeItIsFilled) {
  const auto total = memory_field("MemTotal");
  ASSERT_TRUE(total);
  try {
    SharedMemory::create(static_cast<size_t>(
        *total + memory_field("SwapTotal").value_or(0) + 1));
    FAIL() << "more memory than there is was made";
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code(), std::errc::not_enough_memory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(" are left"));
  }
}

TEST(SharedMemory, AboveTheLimitOfFilesIsAnErrorAndNoSignal) {
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &usual), 0);
  const rlimit small{.rlim_cur = 4096, .rlim_max = usual.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::error_code code;
  try {
    SharedMemory::create(8192);
  } catch (const std::system_error& error) {
    code = error.code();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &usual), 0);
  EXPECT_EQ(code, std::errc::file_too_large);
}

TEST(SharedMemory, MovesWithItsMapping) {
  auto one = SharedMemory::create(4096);
  auto* data = one.data();
  auto other = std::move(one);
  EXPECT_FALSE(one);  // NOLINT(bugprone-use-after-move): it is empty then
  EXPECT_EQ(other.data(), data);
  one = std::move(other);
  EXPECT_EQ(one.data(), data);
  EXPECT_EQ(one.size(), 4096u);
}

}  // namespace
}  // namespace lockstep::internal
