#pragma once
// Groups of ranks and their collective operations. Groups over a c10d process group are in collective/c10d.h.
#include <torchspan/collective/group.h>
