#pragma once
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/error.h>

namespace torchspan::testing {

/// Wraps a backend; after `left` allocations, further ones fail.
class ScarceBackend final : public collective::Backend {
 public:
  using Left = std::shared_ptr<std::atomic<int>>;
  ScarceBackend(std::shared_ptr<collective::Backend> inner, Left left)
      : inner_(std::move(inner)), left_(std::move(left)) {}

  std::string name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  const std::vector<int>& ranks() const override { return inner_->ranks(); }
  Runtime& runtime() const override { return inner_->runtime(); }
  std::shared_ptr<Backend> split(int color, int key) override {
    return std::make_shared<ScarceBackend>(inner_->split(color, key), left_);
  }
  Future<at::Tensor> all_reduce(at::Tensor tensor, collective::ReduceOp reduction) override {
    return inner_->all_reduce(std::move(tensor), reduction);
  }
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, collective::ReduceOp reduction) override {
    return inner_->reduce_scatter(std::move(tensor), reduction);
  }
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override {
    return inner_->all_gather(std::move(tensor));
  }
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override {
    return inner_->broadcast(std::move(tensor), root);
  }
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override {
    return inner_->all_to_all(std::move(parts));
  }
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override {
    return inner_->all_gather_bytes(mine, timeout);
  }
  void barrier(Duration timeout) override { inner_->barrier(timeout); }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    if (left_->fetch_sub(1) <= 0) throw Error(ErrorKind::kOverloaded, "the shared memory is full");
    return inner_->allocate(sizes, dtype);
  }
  void abort(const Error& cause) override { inner_->abort(cause); }

 private:
  const std::shared_ptr<collective::Backend> inner_;
  const Left left_;
};

/// A group with a ScarceBackend, which has memory for `*left` allocations.
struct Scarce {
  static constexpr int kPlenty = 1 << 20;
  explicit Scarce(const collective::Group& of) : group(std::make_shared<ScarceBackend>(of.backend(), left)) {}
  ScarceBackend::Left left = std::make_shared<std::atomic<int>>(kPlenty);
  collective::Group group;
};

}  // namespace torchspan::testing
