#pragma once

#include <cstdint>

// The bytes of this process's tensors on the CPU, counted where they are
// allocated. Resident memory (ru_maxrss) is not a measure of that: it has the
// libraries, what malloc keeps, and the pages of peers. The names are those of
// torch.cuda (PyTorch documentation, "Memory management"); on the CPU Python
// has no such functions.
//
// Two kinds are counted apart:
//
// - Memory from LibTorch's CPU allocator: parameters, gradients, activations,
//   states of optimizers, and the scratch memory of many operators. Not
//   counted are LibTorch's own objects, scratch memory of libraries beneath it,
//   and tensors over memory of others (from_blob()).
// - Memory that the ranks of a host share: tensors of empty_shared(), buckets
//   and arenas of gradients, the parameters of FullyShard or
//   ZeroRedundancyOptimizer if the ranks have one copy, and the groups' own
//   segments. Each segment is counted by the one rank that has made it, though
//   all use it, so the sum over the ranks of a host is what the host needs.
//   (A copy in common is made by rank 0 of its group.)
//
// Any thread may call these functions; none blocks.
namespace lockstep {

// Begins to count the memory of LibTorch's CPU allocator, for the rest of the
// process. Call it at the beginning of main(): tensors that exist already are
// not counted, neither now nor when they are freed. It replaces the allocator
// (c10::SetCPUAllocator()) by one that passes everything on, with 16 bytes more
// for each tensor, which are not counted. That costs two atomic operations for
// each allocation and one for each free.
//
// The second call does nothing. Throws std::logic_error if the allocator is not
// LibTorch's own any more: because of a program's own one, or because a
// DistributedDataParallel or FullyShard was constructed before.
void record_memory_stats();

// Returns the bytes of LibTorch's CPU allocator that are in use, and the most
// that were in use at one moment since record_memory_stats() or
// reset_peak_memory_stats(). Throw std::logic_error before
// record_memory_stats().
int64_t memory_allocated();
int64_t max_memory_allocated();

// Return the same of the memory that this rank has made and shares with others.
// They count from the beginning of the process, record_memory_stats() or not.
int64_t shared_memory_allocated();
int64_t max_shared_memory_allocated();

// Makes both peaks what is in use now.
void reset_peak_memory_stats();

}  // namespace lockstep
