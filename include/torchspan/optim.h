#pragma once
// Optimizers for parameters here (Optimizer) and on other workers (DistributedOptimizer), and their schedules.
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/optim/from_torch.h>
#include <torchspan/optim/lr_scheduler.h>
#include <torchspan/optim/optimizer.h>
