// A program as users write one: a call, a gradient and a step on every other worker.
#include <cstdio>

#include <ATen/ATen.h>

#include <torchspan/torchspan.h>

namespace ts = torchspan;

at::Tensor weight() { return at::ones({3}, at::kDouble).requires_grad_(); }
at::Tensor forward(const ts::RRef<at::Tensor>& weight, const at::Tensor& x) {
  return (weight.local_value() * x).sum();
}
inline constexpr ts::Function<weight> kWeight{"weight"};
inline constexpr ts::Function<forward> kForward{"forward"};

int main() {
  ts::Session session(ts::WorkerOptions::from_env(), ts::FunctionTable().add(kWeight, kForward));
  ts::Worker& worker = session.worker();
  int failed = session.world_size() == 2 ? 0 : 1;
  if (session.rank() == 0) {
    const auto there = worker.remote("worker1", kWeight);
    ts::optim::DistributedOptimizer optimizer(worker, ts::optim::SGD{.lr = 0.5}, {there});
    const at::Tensor x = at::arange(3, at::kDouble);
    {
      ts::autograd::Context context(session);
      context.backward(worker.rpc_sync("worker1", kForward, there, x));
      optimizer.step(context);
    }
    const double after =
        worker.rpc_sync("worker1", kForward, there, x).item<double>();  // 3 - 0.5 * (0 + 1 + 4)
    std::printf("after a step: %.2f\n", after);
    failed += after == 0.5 ? 0 : 1;
    // An exception of the library is caught by its type.
    try {
      worker.rpc_sync("worker7", kWeight);
      ++failed;
    } catch (const ts::Error& error) {
      std::printf("refused: %s\n", error.what());
      failed += error.kind() == ts::ErrorKind::kInvalid ? 0 : 1;
    }
  }
  session.shutdown();
  return failed;
}
