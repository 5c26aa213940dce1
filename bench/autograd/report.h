#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// PyTorch's distributed autograd over shared memory, its default on one host, whose threads poll; and over
/// TCP, whose threads sleep, which is faster on a busy machine. Each figure is compared with the faster of
/// the two.
inline constexpr const char* kPeers[] = {"torch-dist-autograd", "torch-dist-autograd-tcp"};

/// The samples of all rounds. A value is the median over the rounds of each round's median; a ratio is
/// computed in each round, and its median over the rounds is reported; the 10th and 99th percentiles are
/// those of all samples.
class Report {
 public:
  /// Adds the figures of one round; names of a peer's figures begin with its name.
  void add(int round, const Samples& figures);
  bool has(const std::string& figure) const { return rounds_.contains(figure); }
  /// Returns the metrics of the section's file; those with a goal say whether it is met. Omits rows that were
  /// not measured.
  nlohmann::json metrics() const;

 private:
  using Rounds = std::map<int, std::vector<double>>;
  std::map<int, double> medians(const std::string& figure) const;
  std::vector<double> all(const std::string& figure) const;
  nlohmann::json row(const std::string& name, const std::string& figure, const std::string& unit) const;
  void hold_against(nlohmann::json& metric, const std::string& figure, const std::string& peer,
                    double goal) const;
  /// Returns the peer that is faster at `figure`, or an empty string if there is none.
  std::string quickest_peer(const std::string& figure) const;
  void add_engine(nlohmann::json& list) const;
  void add_passes(nlohmann::json& list) const;
  void add_modes(nlohmann::json& list) const;
  void add_wire(nlohmann::json& list) const;
  void add_peers(nlohmann::json& list) const;

  std::map<std::string, Rounds> rounds_;
};

/// Formats the metrics as a table.
std::string table_of(const nlohmann::json& metrics);

}  // namespace torchspan::bench
