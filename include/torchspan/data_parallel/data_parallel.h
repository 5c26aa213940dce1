#pragma once
// Everything of this room.
#include <torchspan/data_parallel/assignment.h>
#include <torchspan/data_parallel/distributed_data_parallel.h>
#include <torchspan/data_parallel/hooks.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/data_parallel/sync_batch_norm.h>
