#pragma once

// Every collective operation. collective_options.h says what all have in
// common.
#include "lockstep/comm/barriers.h"
#include "lockstep/comm/collective_options.h"
#include "lockstep/comm/data_movement.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/point_to_point.h"
#include "lockstep/comm/reductions.h"
