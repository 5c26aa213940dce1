#pragma once
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/detail/rpc/extension.h>
#include <torchspan/rpc/worker.h>

namespace torchspan::python {

/// Answers greetings, as soon as this worker knows their sender as a member.
void answer_greetings(rpc::Registrar& registrar);

/// Returns when all members of an open world know this worker, so that they can call it by its name. Members that die or
/// leave meanwhile, and those without answer_greetings(), need not know it. Throws Error{kTimedOut} at the deadline.
void greet_members(rpc::WorkerBackend& backend, const rendezvous::Membership& membership, Deadline deadline);

}  // namespace torchspan::python
