#pragma once
#include <torchspan/optim/functional.h>

#include "docs/snippets/modules.h"

extern ts::RemoteModule<Encoder, std::int64_t> encoder;
extern Decoder decoder;
extern ts::RRef<at::Tensor> table;
extern Encoder net;
torch::Tensor loss_of(const Batch& batch);
extern ts::Context& context;
extern ts::optim::OptimizerTable kinds;
extern ts::FunctionTable functions;
