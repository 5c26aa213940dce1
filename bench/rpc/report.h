#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/rpc/rows.h"

namespace torchspan::bench {

/// The samples of all rounds: side, figure, round. Medians are taken of each round and then over the rounds,
/// so that a round in a bad mood does not count more; the 99th percentile is that of all samples together.
class Report {
 public:
  void add(const std::string& side, const Samples& round);
  /// The metrics of the section's file; rows that were not measured are left out.
  nlohmann::json metrics() const;

 private:
  using Rounds = std::vector<std::vector<double>>;
  const Rounds* find(const std::string& side, const std::string& name) const;

  std::map<std::string, std::map<std::string, Rounds>> sides_;
};

/// The names of the sides.
inline constexpr const char* kOurs = "torchspan";
inline constexpr const char* kPeer = "torch-rpc-cpp";
inline constexpr const char* kLimits = "limits";

/// The metrics as a table for people, in the units that suit each.
std::string table_of(const nlohmann::json& metrics);

}  // namespace torchspan::bench
