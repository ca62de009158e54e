#include "half.h"
#include "simd/avx2.h"

#include "microkernel.h"

LLAMAHERD_LEVEL(avx2, llamaherd::Avx2);
