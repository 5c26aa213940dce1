#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// PyTorch's distributed autograd over shared memory, which it takes by itself on one host and polls, and
/// over TCP, where it sleeps: better on a busy machine. Each figure is held against the quicker of the two.
inline constexpr const char* kPeers[] = {"torch-dist-autograd", "torch-dist-autograd-tcp"};

/// The samples of all rounds. A value is the median over the rounds of each round's median; a ratio is taken
/// within each round, and then the median over the rounds; the 10th and 99th percentiles are
/// those of all samples.
class Report {
 public:
  /// Figures of that round; those of a peer begin with its name.
  void add(int round, const Samples& figures);
  bool has(const std::string& figure) const { return rounds_.contains(figure); }
  /// The metrics of the section's file, those with a goal saying whether it is met; rows that were not
  /// measured are left out.
  nlohmann::json metrics() const;

 private:
  using Rounds = std::map<int, std::vector<double>>;
  std::map<int, double> medians(const std::string& figure) const;
  std::vector<double> all(const std::string& figure) const;
  nlohmann::json row(const std::string& name, const std::string& figure, const std::string& unit) const;
  void hold_against(nlohmann::json& metric, const std::string& figure, const std::string& peer,
                    double goal) const;
  /// The peer that is quicker at `figure`; empty without any.
  std::string quickest_peer(const std::string& figure) const;
  void add_engine(nlohmann::json& list) const;
  void add_passes(nlohmann::json& list) const;
  void add_modes(nlohmann::json& list) const;
  void add_wire(nlohmann::json& list) const;
  void add_peers(nlohmann::json& list) const;

  std::map<std::string, Rounds> rounds_;
};

/// The metrics as a table for people.
std::string table_of(const nlohmann::json& metrics);

}  // namespace torchspan::bench
