#include "half.h"
#include "simd/neon_i8mm.h"

#include "microkernel.h"

LLAMAHERD_LEVEL(i8mm, llamaherd::NeonI8mm);
