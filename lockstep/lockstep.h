#pragma once

// All of Lockstep. Each header is a contract of its own; read them in this
// order.
#include "lockstep/checkpoint/state_dict.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
