#include "half.h"
#include "simd/neon.h"

#include "microkernel.h"

LLAMAHERD_LEVEL(dotprod, llamaherd::Neon);
