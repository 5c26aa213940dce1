#pragma once
#include <functional>
#include <string>

#include <torchspan/optim/distributed_optimizer.h>

namespace torchspan::optim {

/// The largest of the norms that the replicas have, each by `norm_here`. Collective over options.replicas: a
/// failure of one of them fails all.
double largest_norm(const Worker& worker, const ClipOptions& options,
                    const std::function<double()>& norm_here);

/// Says why replicas that clip each by its own norm would drift apart, and what to do.
[[noreturn]] void refuse_local_norm(const std::string& averaged, const std::string& own);

}  // namespace torchspan::optim
