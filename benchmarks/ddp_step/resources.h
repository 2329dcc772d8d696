#pragma once

#include <cstdint>

// The resources of its machine that a process uses (Linux; proc(5),
// getrusage(2)).
namespace benchmarks {

// In KiB. Memory that processes share counts in full in every `rss`; `pss` is
// this process's part of it (a page that two processes share counts half).
struct Memory {
  int64_t peak_rss = 0;  // since the process began
  int64_t rss = 0;
  int64_t pss = 0;
  int64_t private_rss = 0;  // shared with no other process
};
// Returns the figures of now; what cannot be read is 0. Takes milliseconds.
Memory memory();

// The time that all threads of this process have used since it began.
struct Usage {
  int64_t switches = 0;  // context switches: it waited or was preempted
  int64_t cpu_us = 0;    // in user space and in the kernel
};
Usage usage();

}  // namespace benchmarks
