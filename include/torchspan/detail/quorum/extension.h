#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <torchspan/detail/rpc/extension.h>

namespace torchspan::quorum {

class Coordinator;

/// On rank 0: decides for elastic trainers which ranks train together (docs/architecture/survival.md). A Session
/// includes one.
class QuorumExtension final : public rpc::Extension {
 public:
  QuorumExtension();
  ~QuorumExtension() override;
  void attach(rpc::Registrar& registrar) override;

  /// Notes that a trainer of this name begins to train. Throws Error{kInvalid} if one did before: rank 0 keeps its generations
  /// by name, and would take this one for the one before.
  void claim(const std::string& trainer);
  /// On rank 0: whether the trainer of this name needs its next generation: a rank waits to join, or the current one
  /// lacks rank 0 or has lost a member.
  bool is_over(const std::string& trainer) const;
  /// How many processes of a rank have ended, as far as this worker knows.
  std::uint64_t departures(int rank) const;

 private:
  std::shared_ptr<Coordinator> coordinator_;
};

}  // namespace torchspan::quorum
