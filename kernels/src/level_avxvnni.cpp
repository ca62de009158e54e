#include "half.h"
#include "simd/avxvnni.h"

#include "microkernel.h"

LLAMAHERD_LEVEL(avxvnni, llamaherd::AvxVnni);
