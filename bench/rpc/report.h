#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/rpc/rows.h"

namespace torchspan::bench {

/// The samples of all rounds, by side, figure and round. A value is the median over the rounds of each
/// round's median, so that a slow round does not count more; the 99th percentile is that of all samples.
class Report {
 public:
  void add(const std::string& side, const Samples& round);
  /// Returns the metrics of the section's file; omits rows that were not measured.
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

/// Formats the metrics as a table, in suitable units.
std::string table_of(const nlohmann::json& metrics);

}  // namespace torchspan::bench
