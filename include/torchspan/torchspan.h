#pragma once
// Everything a program needs: Session, Worker, RRef, distributed autograd and optimizers.
#include <torchspan/autograd/context.h>
#include <torchspan/core/progress.h>
#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/rpc/remote_module.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session/session.h>
