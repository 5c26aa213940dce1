#pragma once
#include <torchspan/core/error.h>

namespace torchspan::data_parallel {

/// Adds advice to a failure of the group, for the case that ranks have different numbers of batches.
inline Error with_advice(const Error& error) {
  if (error.kind() != ErrorKind::kDisconnected && error.kind() != ErrorKind::kTimedOut) return error;
  Error advised(error.kind(), error.message() +
                                  ". If that rank has fewer batches than the others, run the loop over them "
                                  "in DistributedDataParallel::join() on all ranks");
  advised.with_worker(error.worker()).with_call(error.call());
  for (const RemoteFrame& frame : error.frames()) advised.with_frame(frame);
  return advised;
}

}  // namespace torchspan::data_parallel
