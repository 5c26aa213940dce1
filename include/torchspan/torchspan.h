#pragma once
// Everything that needs no more of LibTorch than tensors.
#include <torchspan/autograd.h>
#include <torchspan/checkpoint.h>
#include <torchspan/collective.h>
#include <torchspan/core/progress.h>
#include <torchspan/data_parallel.h>
#include <torchspan/optim.h>
#include <torchspan/pipeline.h>
#include <torchspan/rpc.h>
#include <torchspan/session.h>
#include <torchspan/wire.h>
