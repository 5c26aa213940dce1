#pragma once
#include <vector>

#include <torchspan/collective/back_end.h>

namespace torchspan::collective {

/// A group of one: everything is done before it begins.
class SingleBackEnd final : public BackEnd {
 public:
  explicit SingleBackEnd(int world_rank) : ranks_{world_rank} {}

  std::string name() const override { return "single"; }
  int rank() const override { return 0; }
  const std::vector<int>& ranks() const override { return ranks_; }
  std::shared_ptr<BackEnd> split(int color, int key) override;
  Future<at::Tensor> all_reduce(at::Tensor tensor, Reduction reduction) override;
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, Reduction reduction) override;
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override;
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override;
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override;
  std::vector<Bytes> exchange(BytesView mine, Deadline deadline) override;
  void barrier(Deadline deadline) override;
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void abort(const Error& cause) override;

 private:
  void throw_if_aborted();

  const std::vector<int> ranks_;
  Mutex mutex_;
  std::optional<Error> aborted_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::collective
