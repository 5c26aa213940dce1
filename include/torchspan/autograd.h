#pragma once
// Distributed autograd: Context, backward passes over workers, and the graph as a picture.
#include <torchspan/autograd/context.h>
#include <torchspan/autograd/graph.h>
