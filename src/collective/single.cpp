#include "collective/single.h"

#include <ATen/Functions.h>

#include "collective/tensors.h"

namespace torchspan::collective {
namespace {

template <class T, class Make>
Future<T> ready(Make make) {
  try {
    return make_ready_future<T>(make());
  } catch (const Error&) {
    return make_failed_future<T>(std::current_exception());
  }
}

}  // namespace

std::shared_ptr<SingleBackend> SingleBackend::make(int world_rank, std::shared_ptr<Runtime> runtime,
                                                   std::shared_ptr<WorldLink> world, c10::Device device) {
  const std::shared_ptr<SingleBackend> backend(
      new SingleBackend(world_rank, std::move(runtime), world, device));
  if (world) world->add(backend);
  return backend;
}

void SingleBackend::throw_if_aborted() {
  MutexLock lock(mutex_);
  if (aborted_) throw Error(*aborted_);
}

std::shared_ptr<Backend> SingleBackend::split(int, int) {
  throw_if_aborted();
  return make(ranks_[0], runtime_, world_, device_);
}

Future<at::Tensor> SingleBackend::all_reduce(at::Tensor tensor, ReduceOp reduction) {
  check_reducible(tensor, reduction);  // what larger groups reject
  return ready<at::Tensor>([&] {
    throw_if_aborted();
    return tensor.is_sparse() ? tensor.detach().coalesce() : tensor;
  });
}

Future<at::Tensor> SingleBackend::reduce_scatter(at::Tensor tensor, ReduceOp reduction) {
  check_reducible(tensor, reduction);
  return ready<at::Tensor>([&] {
    throw_if_aborted();
    return tensor.detach().clone(at::MemoryFormat::Contiguous);
  });
}

Future<std::vector<at::Tensor>> SingleBackend::all_gather(at::Tensor tensor) {
  return ready<std::vector<at::Tensor>>([&] {
    throw_if_aborted();
    return std::vector<at::Tensor>{tensor.detach().clone(at::MemoryFormat::Contiguous)};
  });
}

Future<at::Tensor> SingleBackend::broadcast(at::Tensor tensor, int) {
  return ready<at::Tensor>([&] {
    throw_if_aborted();
    return tensor;
  });
}

Future<std::vector<at::Tensor>> SingleBackend::all_to_all(std::vector<at::Tensor> parts) {
  return ready<std::vector<at::Tensor>>([&] {
    throw_if_aborted();
    return std::vector<at::Tensor>{parts[0].detach().clone(at::MemoryFormat::Contiguous)};
  });
}

std::vector<Bytes> SingleBackend::all_gather_bytes(BytesView mine, Duration) {
  throw_if_aborted();
  return {Bytes(mine.begin(), mine.end())};
}

void SingleBackend::barrier(Duration) { throw_if_aborted(); }

at::Tensor SingleBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype));
}

void SingleBackend::abort(const Error& cause) {
  MutexLock lock(mutex_);
  if (!aborted_) aborted_ = cause;
}

}  // namespace torchspan::collective
