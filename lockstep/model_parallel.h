#pragma once

// Includes the public headers for models of which each rank computes a part:
// pipelines, tensor and context parallelism, and dry runs. lockstep.h leaves
// them out because most programs compile faster without them.
#include "lockstep/parallel/context/context_shard.h"
#include "lockstep/parallel/context/ring_attention.h"
#include "lockstep/parallel/context/ulysses_attention.h"
#include "lockstep/parallel/mesh/dry_run.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedule_simulation.h"
#include "lockstep/parallel/pipeline/schedules.h"
#include "lockstep/parallel/pipeline/stage_split.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
