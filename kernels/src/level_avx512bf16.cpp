#include "half.h"
#include "simd/avx512bf16.h"

#include "microkernel.h"

LLAMAHERD_LEVEL(avx512bf16, llamaherd::Avx512Bf16);
