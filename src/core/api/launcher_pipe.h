#pragma once
namespace torchspan {

/// The pipe to `torchspan run` that TORCHSPAN_PROGRESS_FD names, set to never block and not to be inherited; -1 if there is
/// none. A process that a worker started may have another file at that descriptor, so only a pipe counts.
int launcher_pipe();

}  // namespace torchspan
