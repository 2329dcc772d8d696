#pragma once

// Includes every communication hook. ddp/comm_hook.h says what a hook is,
// default_hooks.h what all hooks have in common.
#include "lockstep/parallel/comm_hooks/comm_bytes.h"
#include "lockstep/parallel/comm_hooks/default_hooks.h"
#include "lockstep/parallel/comm_hooks/post_local_sgd_hook.h"
#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"
#include "lockstep/parallel/comm_hooks/quantization_hooks.h"
#include "lockstep/parallel/ddp/comm_hook.h"
