#pragma once

// Includes all of tensor parallelism; docs/tensor-parallel.md explains it.
#include "lockstep/parallel/tensor/column_parallel_linear.h"
#include "lockstep/parallel/tensor/parallel_self_attention.h"
#include "lockstep/parallel/tensor/row_parallel_linear.h"
#include "lockstep/parallel/tensor/sequence_parallel_norm.h"
#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/tensor_parallel_random.h"
#include "lockstep/parallel/tensor/verify_replicated.h"
#include "lockstep/parallel/tensor/vocab_parallel_cross_entropy.h"
#include "lockstep/parallel/tensor/vocab_parallel_embedding.h"
