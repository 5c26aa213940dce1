#pragma once
// Everything of this room that needs no more of LibTorch than tensors.
#include <torchspan/collective/group.h>
