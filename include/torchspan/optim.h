#pragma once
// Optimizers for local parameters (Optimizer) and remote ones (DistributedOptimizer), and learning-rate
// schedules.
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/extension.h>
#include <torchspan/optim/from_torch.h>
#include <torchspan/optim/grad_scaler.h>
#include <torchspan/optim/optimizer.h>
