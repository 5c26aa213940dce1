#pragma once
// What most programs need. Not elastic.h, sharded.h, engine/operator_trace.h, core/preemption.h and core/error_file.h,
// and no header that needs torch/nn, which take long to compile: see the header of each class.
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
