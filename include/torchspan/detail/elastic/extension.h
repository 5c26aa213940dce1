#pragma once
#include <memory>
#include <string>

#include <torchspan/detail/rpc/extension.h>

namespace torchspan::elastic {

class Coordinator;

/// On rank 0: decides for elastic trainers which ranks train together (docs/architecture/survival.md). A Session
/// includes one.
class ElasticExtension final : public rpc::Extension {
 public:
  ElasticExtension();
  ~ElasticExtension() override;
  void attach(rpc::Registrar& registrar) override;

  /// On rank 0: whether a rank waits to join the trainer of this name.
  bool is_awaited(const std::string& trainer) const;

 private:
  std::shared_ptr<Coordinator> coordinator_;
};

}  // namespace torchspan::elastic
