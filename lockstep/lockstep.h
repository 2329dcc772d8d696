#pragma once

// All of Lockstep. Each header is a contract of its own; read them in this
// order.
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
