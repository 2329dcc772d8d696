#include "benchmarks/plain_peers/kernel_reducer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/kernels/kernels.h"

namespace lockstep::internal::bench {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kMostRanks = 64;
// The protocol reduces this many bytes at a time.
constexpr size_t kPiece = size_t{16} << 10;

size_t rounded_up(size_t what, size_t to) { return (what + to - 1) / to * to; }

}  // namespace

void* KernelReducer::allocate(size_t bytes) {
  // Each rank's data begin at a page. The further page keeps them from all
  // falling into one set of a cache.
  stride_ = rounded_up(std::max<size_t>(bytes, 1), 4096) + 4096;
  const size_t all = stride_ * static_cast<size_t>(size());
  std::string where;
  if (rank() == 0) {
    memory_ = SharedMemory::create(all);
    where = "/proc/" + std::to_string(getpid()) + "/fd/" +
            std::to_string(memory_.descriptor());
  }
  where = from_first(where);
  if (rank() != 0) {
    FileDescriptor descriptor(open(where.c_str(), O_RDWR | O_CLOEXEC));
    if (!descriptor) throw_errno("open " + where);
    memory_ = SharedMemory::map(std::move(descriptor), all);
  }
  group().barrier(timeout());
  return memory_.data() + static_cast<size_t>(rank()) * stride_;
}

void KernelReducer::release(void*) { memory_ = {}; }

void KernelReducer::all_reduce(void*, size_t count, kernels::DType dtype,
                               kernels::ReduceOp op) {
  const size_t element = kernels::size_of(dtype);
  const auto ranks = static_cast<size_t>(size());
  const size_t each =
      rounded_up((count * element + ranks - 1) / ranks, kCacheLine);
  const size_t end =
      std::min((static_cast<size_t>(rank()) + 1) * each, count * element);
  for (size_t at = static_cast<size_t>(rank()) * each; at < end; at += kPiece) {
    std::array<const void*, kMostRanks> sources;
    std::array<void*, kMostRanks> destinations;
    for (size_t of = 0; of < ranks; ++of) {
      destinations[of] = memory_.data() + of * stride_ + at;
      sources[of] = destinations[of];
    }
    kernels::reduce({destinations.data(), ranks}, {sources.data(), ranks},
                    std::min(kPiece, end - at) / element, dtype, op);
  }
}

}  // namespace lockstep::internal::bench
