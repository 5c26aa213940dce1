#pragma once
#include <functional>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// Measures training steps of a ResNet-50 on batches of 32 images of 224 x 224, plain and wrapped in
/// DistributedDataParallel in a world of one rank: "ddp_step/resnet50" and "ddp_step/resnet50/plain". On the CPU, one
/// image of 64 x 64. `finish` waits for the device.
Samples measure_data_parallel(Executor& executor, c10::Device device, Duration limit,
                              const std::function<void()>& finish);

}  // namespace torchspan::bench
