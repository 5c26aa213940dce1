#pragma once
// Distributed autograd: Context, distributed backward passes, and drawings of the graph.
#include <torchspan/autograd/context.h>
