#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/collective.h>

namespace torchspan::collective {

Future<at::Tensor> Backend::reduce(at::Tensor tensor, int root, ReduceOp reduction) {
  if (root == rank()) return all_reduce(std::move(tensor), reduction);
  const at::NoGradGuard no_grad;
  return all_reduce(tensor.detach().clone(), reduction).then([tensor](const Future<at::Tensor>& reduced) {
    reduced.wait();
    return tensor;
  });
}

Future<std::vector<at::Tensor>> Backend::coalesced(CoalescedCall call, at::Tensor flat) {
  if (call.verb == CoalescedCall::Verb::kAllGather) return all_gather(std::move(flat));
  return (call.verb == CoalescedCall::Verb::kAllReduce ? all_reduce(std::move(flat), call.reduction)
                                                       : reduce_scatter(std::move(flat), call.reduction))
      .then([](const Future<at::Tensor>& result) { return std::vector<at::Tensor>{result.wait()}; });
}

}  // namespace torchspan::collective
