#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// The samples of all rounds. A value is the median over the rounds of each round's median; a ratio is taken
/// within each round, and then the median over the rounds; the 99th percentile is that of all samples.
class Report {
 public:
  /// Figures of that round; those of the peer begin with "peer/".
  void add(int round, const Samples& figures);
  bool has(const std::string& figure) const { return rounds_.contains(figure); }
  /// The metrics of the section's file, those with a goal saying whether it is met; rows that were not
  /// measured are left out.
  nlohmann::json metrics() const;

 private:
  using Rounds = std::map<int, std::vector<double>>;
  std::map<int, double> medians(const std::string& figure) const;
  nlohmann::json row(const std::string& name, const std::string& figure, const std::string& unit) const;
  void hold_against(nlohmann::json& metric, const std::string& figure, const std::string& peer,
                    double goal) const;
  void add_engine(nlohmann::json& list) const;
  void add_passes(nlohmann::json& list) const;
  void add_modes(nlohmann::json& list) const;
  void add_wire(nlohmann::json& list) const;
  void add_python(nlohmann::json& list) const;

  std::map<std::string, Rounds> rounds_;
};

/// The metrics as a table for people.
std::string table_of(const nlohmann::json& metrics);

}  // namespace torchspan::bench
