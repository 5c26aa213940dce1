#pragma once
// Groups of ranks and collective operations. For groups over a c10d process group see collective/c10d.h.
#include <torchspan/collective/group.h>
