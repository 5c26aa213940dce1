#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/error.h>
#include <torchspan/core/future.h>

namespace torchspan::sharded {

/// Lets a backward pass begin on all ranks or on none, so that a rank that threw between forward and backward does not
/// leave the others in the middle of one. Has a group of its own: what a rank announces waits there until the others begin
/// a pass, and does not disturb their forwards. Forwards have the same numbers on all ranks.
class PassAgreement {
 public:
  /// Collective.
  explicit PassAgreement(const collective::Group& group) : group_(group.split(0, group.rank())) {}

  /// Collective: a pass over the outputs of forward `number` begins; nullopt, or why it must not begin on any rank:
  /// kRemoteFailure names a rank that runs no such pass. Throws failures of the group.
  std::optional<Error> begin_pass(std::int64_t number);
  /// This rank runs no pass over the outputs of forward `number` and those before. Returns at once.
  void announce_no_pass(std::int64_t number);
  /// Collective, also with ranks that begin a pass, which fails: whether `ok` on all ranks. If not, passes over
  /// outputs of forwards up to `number` must not begin.
  bool agree(bool ok, std::int64_t number);
  void abort(const Error& cause) const { group_.abort(cause); }

 private:
  enum class Kind : std::uint8_t { kNone, kPass, kNoPass, kAgrees, kDisagrees };
  struct Word {
    Kind kind;
    std::int64_t number;
  };
  Future<at::Tensor> send(Word mine) const;
  /// Returns the words of all ranks, by rank.
  std::vector<Word> exchange(Word mine) const;

  const collective::Group group_;
  std::int64_t skipped_ = -1;  ///< the newest forward that all ranks skip
};

}  // namespace torchspan::sharded
