#pragma once
// Optimizers for local parameters (Optimizer) and remote ones (DistributedOptimizer), and learning-rate schedules.
// Includes no torch/nn.
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/functional.h>
#include <torchspan/optim/grad_scaler.h>
#include <torchspan/optim/optimizer.h>
