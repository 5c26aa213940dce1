#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "docs/snippets/modules.h"

extern ts::Session& session;
extern ts::DistributedDataParallel<Encoder>& model;
extern ts::optim::Optimizer& optimizer;
extern ts::optim::LRScheduler& schedule;
extern ts::CheckpointManager& manager;
extern ts::Layers layers;
extern Encoder net;
extern std::int64_t samples;
void train_step();
