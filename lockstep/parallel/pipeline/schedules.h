#pragma once

#include <string>

#include "lockstep/parallel/pipeline/schedule.h"

// The known schedules, with the actions in the order in which PyTorch's classes
// of the same names have them (torch.distributed.pipelining.schedules), empty
// slots included. They have no messages: with_messages() adds them, and
// Pipeline does so by itself.
//
// In all of them `ranks` and `micro_batches` are at least 1. With several
// stages a rank, stage s is on rank s % ranks (interleaved), or, in the V shape
// of ZBV and DualPipeV, rank r has the stages r and 2 * ranks - 1 - r. Each
// throws std::invalid_argument if it cannot be made, for the same numbers as
// PyTorch; the comments name the conditions.
namespace lockstep {

// All forwards, then all backwards (Huang et al., "GPipe", 2019). One stage a
// rank.
PipelineSchedule schedule_gpipe(int ranks, int micro_batches);

// A rank makes a backward as soon as it can, so that it keeps at most `ranks`
// activations (Narayanan et al., "PipeDream", 2019). One stage a rank; at least
// as many micro-batches as ranks.
PipelineSchedule schedule_1f1b(int ranks, int micro_batches);

// GPipe with several stages a rank, one stage after the other (Lamy-Poirier,
// "Breadth-First Pipeline Parallelism", 2022).
PipelineSchedule schedule_looped_bfs(int ranks, int micro_batches,
                                     int stages_per_rank);

// 1F1B with several stages a rank, whose bubble is so many times shorter
// (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
// Clusters", 2021). `micro_batches` must be a multiple of
// max(1, micro_batches / ranks); every multiple of `ranks` is.
PipelineSchedule schedule_interleaved_1f1b(int ranks, int micro_batches,
                                           int stages_per_rank);

// The same with backwards in two parts, so that gradients of parameters fill
// the bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, ZB-H1).
PipelineSchedule schedule_interleaved_zero_bubble(int ranks, int micro_batches,
                                                  int stages_per_rank);

// Two stages a rank in the shape of a V (the same paper, section 6). Without
// bubble if forward, backward for inputs and backward for parameters take the
// same time and there are at least 2 * ranks - 1 micro-batches.
PipelineSchedule schedule_zbv_zero_bubble(int ranks, int micro_batches);

// A V whose forwards and backwards may overlap (DeepSeek-V3 technical report,
// 2024, DualPipe). At least 2 * ranks micro-batches.
PipelineSchedule schedule_dual_pipe_v(int ranks, int micro_batches);

// Makes one of them by PyTorch's name, in upper or lower case: "GPipe", "1F1B",
// "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble" or
// "DualPipeV".
PipelineSchedule make_pipeline_schedule(const std::string& name, int ranks,
                                        int micro_batches, int stages_per_rank);

}  // namespace lockstep
