#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/commit/listing.h"
#include "checkpoint/commit/outcomes.h"
#include "checkpoint/commit/save_round.h"

namespace torchspan::checkpoint {

/// What a rank says when it begins a save.
struct SaveProposal {
  std::int64_t step = 0;
  std::uint64_t token = 0;
  std::uint64_t digest = 0;  ///< of its listing
  std::optional<double> metric = {};
  std::map<std::string, Value> values = {};
};
Bytes encode_proposal(const SaveProposal& proposal);
SaveProposal decode_proposal(BytesView bytes);

/// Lets the ranks agree on what is saved and on which rank writes what. Keeps the plan while no rank's listing
/// changes, so that most saves exchange a few bytes only.
class SaveAgreement {
 public:
  explicit SaveAgreement(Ranks& ranks) : ranks_(ranks) {}

  /// Exchanges the proposals; throws the same Error on all ranks if one failed or they disagree. The returned
  /// job has the values of all ranks.
  SaveJob agree(const RankOutcome& proposal, std::int64_t step, const Listing& listing);

 private:
  void exchange_listings(const std::vector<std::uint64_t>& digests, const Listing& listing);

  Ranks& ranks_;
  std::vector<std::uint64_t> digests_;  ///< of `listings_`
  std::vector<Listing> listings_;
  Plan plan_;
};

}  // namespace torchspan::checkpoint
