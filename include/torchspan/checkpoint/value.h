#pragma once
#include <torchspan/checkpoint/state.h>
