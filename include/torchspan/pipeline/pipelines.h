#pragma once
#include <memory>

#include <torchspan/rpc/extension.h>

namespace torchspan::pipeline {

/// The pipelines of one worker: an extension that takes their messages in (its Session has it by default).
class Pipelines final : public rpc::Extension {
 public:
  Pipelines();
  ~Pipelines() override;
  void attach(rpc::Registrar& registrar) override;

  class Office;
  const std::shared_ptr<Office>& office() const { return office_; }

 private:
  std::shared_ptr<Office> office_;
};

}  // namespace torchspan::pipeline
