#pragma once

// The options of DistributedDataParallel that the fuzzer draws, one row each.
// The member of Options (case.h) follows from the row, and how a case is
// wrapped, counted, printed and made smaller; for a flag, also its Trait and
// its draw. A new option needs a row here and, only if there are such, what it
// may not be combined with (traits.cpp), its own draw (draw_case.cpp) and what
// it changes in the results (reference.cpp).

// Options that a trait of their own switches: FLAG(option, default, trait).
#define LOCKSTEP_FUZZ_FLAGS(FLAG)                         \
  FLAG(find_unused_parameters, false, find_unused)        \
  FLAG(static_graph, false, static_graph)                 \
  FLAG(gradient_as_bucket_view, true, no_bucket_view)     \
  FLAG(skip_all_reduce_unused_params, false, skip_unused) \
  FLAG(check_for_nan_in_grad, false, check_nan)

// Options that draw_case.cpp draws: OPTION(type, option, default).
#define LOCKSTEP_FUZZ_OPTIONS(OPTION)                          \
  OPTION(std::optional<double>, bucket_cap_mb, std::nullopt)   \
  OPTION(std::optional<double>, first_bucket_mb, std::nullopt) \
  OPTION(bool, broadcast_buffers, true)                        \
  OPTION(int64_t, check_replicas_every, 0)
