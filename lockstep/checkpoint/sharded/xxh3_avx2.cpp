#define LOCKSTEP_XXH3 kXxh3Avx2
#include "lockstep/checkpoint/sharded/xxh3_inl.h"
