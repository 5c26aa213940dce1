#pragma once
#include <functional>
#include <utility>

#include <torchspan/checkpoint/sources.h>

namespace torchspan::sharded {

/// Refuses to save or load while parameters arrive: those of the module are then of two steps.
class SettledSource final : public checkpoint::StateSource {
 public:
  SettledSource(checkpoint::SourcePtr source, std::function<bool()> arriving)
      : source_(std::move(source)), arriving_(std::move(arriving)) {}
  /// Throw Error{kInvalid} while parameters arrive.
  void save(checkpoint::StateWriter& writer) const override;
  void load(const checkpoint::StateReader& reader) override;

 private:
  void check() const;

  const checkpoint::SourcePtr source_;
  const std::function<bool()> arriving_;
};

}  // namespace torchspan::sharded
