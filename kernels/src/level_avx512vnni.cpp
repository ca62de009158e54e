#include "half.h"
#include "simd/avx512vnni.h"

#include "microkernel.h"

LLAMAHERD_LEVEL(avx512vnni, llamaherd::Avx512Vnni);
