#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace lockstep::internal {

inline constexpr size_t kHugePage = size_t{2} << 20;

// Asks for huge pages for memory of this process that has not been written yet,
// where whole ones fit in: its first write is several times faster then.
// Without them it still works.
inline void prefer_huge_pages(void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin >= end) return;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace lockstep::internal
