#pragma once
#include <chrono>
#include <mutex>
#include <thread>

#include "docs/snippets/modules.h"

extern std::uint64_t steps;
Batch next_batch();
double train(const Batch& batch);
extern Encoder encoder;
