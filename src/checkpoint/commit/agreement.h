#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/commit/listing.h"
#include "checkpoint/commit/ranks.h"
#include "checkpoint/commit/rounds.h"

namespace torchspan::checkpoint {

/// What a rank says when it begins a save.
struct SaveProposal {
  std::int64_t step = 0;
  std::uint64_t token = 0;
  std::uint64_t digest = 0;  ///< SaveAgreement::digest_of() of its listing
  std::optional<double> metric = {};
  std::map<std::string, Value> values = {};
};
/// Throws Error{kInvalid} naming a value that is not UTF-8.
Bytes encode_proposal(const SaveProposal& proposal);
SaveProposal decode_proposal(BytesView bytes);

/// Lets the ranks agree on what is saved and on which rank writes what. Keeps the plan while all ranks have it and no
/// rank's listing changes, so that most saves exchange a few bytes only. A rank without the plan, such as one that
/// replaces a dead rank, makes all ranks exchange their listings again.
class SaveAgreement {
 public:
  explicit SaveAgreement(Ranks& ranks) : ranks_(ranks) {}

  /// Identifies a listing and the plan that this rank keeps. Ranks without a plan have equal digests if their
  /// listings are equal.
  std::uint64_t digest_of(const Listing& listing) const;
  /// Exchanges the proposals; throws the same Error on all ranks if one failed or they disagree. The returned
  /// job has the values of all ranks.
  SaveJob agree(const RankOutcome& proposal, std::int64_t step, const Listing& listing);

 private:
  void exchange_listings(const std::vector<std::uint64_t>& digests, const Listing& listing,
                         std::uint64_t token);

  Ranks& ranks_;
  std::uint64_t plan_token_ = 0;         ///< of the save that made `plan_`; 0: there is no plan
  std::vector<std::uint64_t> expected_;  ///< digests of ranks that all have the plan and these listings
  std::vector<Listing> listings_;
  Plan plan_;
};

}  // namespace torchspan::checkpoint
