#pragma once

// Includes all learning-rate schedulers.
#include "lockstep/optim/lr_scheduler/composed_schedulers.h"
#include "lockstep/optim/lr_scheduler/cosine_annealing.h"
#include "lockstep/optim/lr_scheduler/cyclic_schedulers.h"
#include "lockstep/optim/lr_scheduler/formula_schedulers.h"
#include "lockstep/optim/lr_scheduler/lambda_schedulers.h"
#include "lockstep/optim/lr_scheduler/lr_scheduler.h"
#include "lockstep/optim/lr_scheduler/reduce_lr_on_plateau.h"
#include "lockstep/optim/lr_scheduler/swalr.h"
