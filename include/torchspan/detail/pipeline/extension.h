#pragma once
#include <memory>

#include <torchspan/detail/rpc/extension.h>

namespace torchspan::pipeline {

/// Receives the pipeline messages of one worker: an extension that a Session includes by default.
class PipelineExtension final : public rpc::Extension {
 public:
  PipelineExtension();
  ~PipelineExtension() override;
  void attach(rpc::Registrar& registrar) override;

  class MessageRouter;
  const std::shared_ptr<MessageRouter>& router() const { return router_; }

 private:
  std::shared_ptr<MessageRouter> router_;
};

}  // namespace torchspan::pipeline
