#include "simd/emulated.h"

#include "microkernel.h"

using Emulated16 = llamaherd::Emulated<16, true>;
LLAMAHERD_LEVEL(emulated16, Emulated16);
