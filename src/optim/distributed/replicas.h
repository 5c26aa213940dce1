#pragma once
#include <functional>
#include <string>

#include <torchspan/optim/distributed_optimizer.h>

namespace torchspan::optim {

/// The largest of the norms that `norm_here` returns on the replicas. Collective over options.replicas; the
/// failure of one replica fails all.
double largest_norm(const Worker& worker, const ClipOptions& options,
                    const std::function<double()>& norm_here);

/// Throws Error{kInvalid}: replicas that clip by different norms would diverge.
[[noreturn]] void refuse_local_norm(const std::string& averaged, const std::string& own);

}  // namespace torchspan::optim
