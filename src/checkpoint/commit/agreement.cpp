#include "checkpoint/commit/agreement.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

#include "checkpoint/api/names_and_values.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/files/strict_json.h"
#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

/// Bytes of values, for comparison: NaN equals NaN.
Bytes comparable(const Value& value) {
  ByteWriter out;
  put_value(out, value);
  return out.take();
}

/// The manifest is JSON.
void require_utf8(const std::string& name, const Value& value) {
  if (!is_utf8(name)) throw_invalid("the name '{}' of a value is not UTF-8; rename it", name);
  const auto* text = std::get_if<std::string>(&value);
  if (text == nullptr || is_utf8(*text)) return;
  throw_invalid("the text '{}' is not UTF-8; save it as a tensor of bytes", name);
}

/// The digest that a rank sends which has this listing and the plan of the save with this token.
std::uint64_t digest_with(BytesView listing, std::uint64_t plan_token) {
  ByteWriter out;
  out.put(checksum_of(listing));
  out.put(plan_token);
  return checksum_of(out.bytes());
}

}  // namespace

Bytes encode_proposal(const SaveProposal& proposal) {
  ByteWriter out;
  out.put(proposal.step);
  out.put(proposal.token);
  out.put(proposal.digest);
  out.put(proposal.metric.has_value());
  out.put(proposal.metric.value_or(0));
  out.put(static_cast<std::uint32_t>(proposal.values.size()));
  for (const auto& [name, value] : proposal.values) {
    require_utf8(name, value);
    out.put_string(name);
    put_value(out, value);
  }
  return out.take();
}

SaveProposal decode_proposal(BytesView bytes) {
  ByteReader in(bytes);
  SaveProposal proposal;
  proposal.step = in.get<std::int64_t>();
  proposal.token = in.get<std::uint64_t>();
  proposal.digest = in.get<std::uint64_t>();
  const bool has_metric = in.get<bool>();
  const auto metric = in.get<double>();
  if (has_metric) proposal.metric = metric;
  for (std::size_t left = in.get_count(6); left > 0; --left) {
    std::string name = in.get_string();
    proposal.values.insert_or_assign(std::move(name), get_value(in));
  }
  in.expect_end();
  return proposal;
}

std::uint64_t SaveAgreement::digest_of(const Listing& listing) const {
  return digest_with(encode_listing(listing), plan_token_);
}

SaveJob SaveAgreement::agree(const RankOutcome& proposal, std::int64_t step, const Listing& listing) {
  const std::string what = fmt::format("the checkpoint of step {} was not saved", step);
  const std::uint64_t departures = ranks_.departures().count;
  const auto outcomes = ranks_.exchange("begin", proposal);
  if (const auto failure = joint_failure(outcomes, ranks_.names(), what)) throw *failure;
  SaveJob job;
  job.departures = departures;
  std::vector<std::uint64_t> digests;
  std::map<std::string, std::size_t> first;  // the rank that has the value
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const SaveProposal one = decode_proposal(outcomes[rank].result);
    digests.push_back(one.digest);
    if (rank == 0) {
      job.step = one.step;
      job.token = one.token;
      job.metric = one.metric;
    }
    if (one.step != job.step) {
      throw_invalid("{}: {} saves step {}, but {} step {}; all ranks save after the same step", what,
                    ranks_.names()[0], job.step, ranks_.names()[rank], one.step);
    }
    for (const auto& [name, value] : one.values) {
      const auto [place, is_new] = job.values.emplace(name, value);
      if (is_new) {
        first[name] = rank;
      } else if (comparable(place->second) != comparable(value)) {
        throw_invalid("{}: the value '{}' differs between {} and {}; register it with add_per_rank()", what,
                      name, ranks_.names()[first[name]], ranks_.names()[rank]);
      }
    }
  }
  if (digests != expected_) exchange_listings(digests, listing, job.token);
  job.listings = listings_;
  job.plan = plan_;
  return job;
}

void SaveAgreement::exchange_listings(const std::vector<std::uint64_t>& digests, const Listing& listing,
                                      std::uint64_t token) {
  plan_token_ = 0;
  expected_.clear();
  const auto first_with = [&](std::size_t rank) {
    return static_cast<std::size_t>(std::ranges::find(digests, digests[rank]) - digests.begin());
  };
  const bool mine = first_with(ranks_.index()) == ranks_.index();
  const std::vector<Bytes> all = ranks_.gather("listing", mine ? encode_listing(listing) : Bytes());
  listings_.clear();
  std::vector<std::uint64_t> expected;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::size_t first = first_with(rank);
    listings_.push_back(first == rank ? decode_listing(all[rank]) : listings_[first]);
    expected.push_back(first == rank ? digest_with(all[rank], token) : expected[first]);
  }
  plan_ = make_plan(listings_, ranks_.names());
  plan_token_ = token;
  expected_ = std::move(expected);
}

}  // namespace torchspan::checkpoint
