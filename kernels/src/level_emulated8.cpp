#include "simd/emulated.h"

#include "microkernel.h"

using Emulated8 = llamaherd::Emulated<8, false>;
LLAMAHERD_LEVEL(emulated8, Emulated8);
