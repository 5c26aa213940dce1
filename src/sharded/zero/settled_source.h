#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/state/source.h>

namespace torchspan::sharded {

/// The state of an optimizer of pieces, and of parameters that an optimizer of the whole module would have without stepping
/// them. Refuses to save or load while parameters arrive: those of the module are then of two steps.
class SettledSource final : public state::StateSource {
 public:
  /// `never_stepped`: OwnedParameter::owner of each.
  SettledSource(state::SourcePtr source, std::vector<std::string> never_stepped,
                std::function<bool()> arriving)
      : source_(std::move(source)),
        never_stepped_(std::move(never_stepped)),
        arriving_(std::move(arriving)) {}
  /// Throw Error{kInvalid} while parameters arrive.
  void save(state::StateWriter& writer) const override;
  void load(const state::StateReader& reader) override;

 private:
  void check() const;

  const state::SourcePtr source_;
  const std::vector<std::string> never_stepped_;
  const std::function<bool()> arriving_;
};

}  // namespace torchspan::sharded
