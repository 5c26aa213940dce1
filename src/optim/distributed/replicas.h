#pragma once
#include <functional>
#include <string>

#include <torchspan/optim/distributed_optimizer.h>

namespace torchspan::optim {

/// Returns the largest of the norms that `norm_here` returns on the replicas. Collective over options.replicas; the
/// failure of one replica fails all. `verb` is the function that the program called.
double largest_norm(const Worker& worker, const ClipOptions& options, const char* verb,
                    const std::function<double()>& norm_here);

/// Throws Error{kInvalid}: replicas that clip by different norms would diverge.
[[noreturn]] void refuse_local_norm(const std::string& averaged, const std::string& own, const char* verb);

}  // namespace torchspan::optim
