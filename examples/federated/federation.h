#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "federated/options.h"
#include "federated/site.h"

namespace federated {

/// Where training begins.
std::vector<at::Tensor> first_parameters(const Options& options);

/// The server's side: the global parameters, and the sites, which are all workers but this one unless it is alone.
class Federation {
 public:
  Federation(torchspan::Worker& worker, const Options& options);

  /// What happened in a round.
  struct Round {
    std::int64_t images = 0;
    std::vector<std::int64_t> clients;  ///< whose parameters are in the average
    std::string absences;               ///< "client 3 on rank 1 is late, …"; empty: none
  };
  /// Draws clients, sends them the parameters, and replaces these by the average of what comes back before the deadline.
  /// A site that died is created again in the next round. Throws what a client's training throws.
  Round run(std::int64_t number);
  /// Trains one client from the first parameters, as long as it would train in `rounds` rounds.
  Update train_alone(std::int64_t client, std::int64_t rounds);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  static std::int64_t sites_of(int world) { return world > 1 ? world - 1 : 1; }

 private:
  int rank_of(std::int64_t client) const;
  torchspan::Future<Update> start(const Task& task, torchspan::Duration timeout);
  /// Adds the client's update; returns why there is none, or nothing.
  std::string collect(const torchspan::Future<Update>& training, std::int64_t client,
                      std::vector<Update>& updates);
  Task task_for(std::int64_t client, std::int64_t round) const;

  torchspan::Worker worker_;
  const Options options_;
  const std::vector<at::Tensor> first_;
  std::vector<at::Tensor> parameters_;
  std::map<int, torchspan::RRef<Site>> sites_;  ///< by rank
};

/// Serves calls until rank 0 calls release_workers(), whichever other workers die and return meanwhile.
void serve(torchspan::Worker& worker);
void release_workers(torchspan::Worker& worker);

}  // namespace federated
