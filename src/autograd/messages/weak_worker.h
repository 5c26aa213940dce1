#pragma once
#include <memory>
#include <string>

#include <torchspan/rpc/worker.h>

namespace torchspan::autograd {

/// A weak reference to this worker, for objects that may outlive it.
class WeakWorker {
 public:
  explicit WeakWorker(const Worker& worker)
      : endpoint_(worker.endpoint()), host_(worker.endpoint()->host()), name_(worker.name()) {}

  const std::string& name() const { return name_; }
  /// Null after the worker was destroyed.
  std::shared_ptr<rpc::Endpoint> endpoint() const { return endpoint_.lock(); }
  const std::weak_ptr<FutureHost>& host() const { return host_; }
  /// Throws Error{kCancelled} after the worker was destroyed.
  Worker require() const;

 private:
  const std::weak_ptr<rpc::Endpoint> endpoint_;
  const std::weak_ptr<FutureHost> host_;
  const std::string name_;
};

}  // namespace torchspan::autograd
