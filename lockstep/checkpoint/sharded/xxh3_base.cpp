#define LOCKSTEP_XXH3 kXxh3Base
#include "lockstep/checkpoint/sharded/xxh3_inl.h"
