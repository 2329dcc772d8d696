#pragma once

#include <cstdint>

// What a process takes of its machine (Linux; proc(5), getrusage(2)).
namespace benchmarks {

// KiB. Memory that processes share counts in full in every `rss`; `pss` is
// this process's part of it (a page of two processes counts half).
struct Memory {
  int64_t peak_rss = 0;  // since the process began
  int64_t rss = 0;
  int64_t pss = 0;
  int64_t private_rss = 0;  // of no other process
};
// Now. Takes milliseconds. What cannot be read is 0.
Memory memory();

// All threads of this process since it began.
struct Usage {
  int64_t switches = 0;  // of context: it waited, or it was put aside
  int64_t cpu_us = 0;    // in user space and in the kernel
};
Usage usage();

}  // namespace benchmarks
