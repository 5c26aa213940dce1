#pragma once
#include "docs/snippets/modules.h"

extern std::uint64_t steps;
Batch next_batch();
double train(const Batch& batch);
