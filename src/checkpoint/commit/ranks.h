#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/core/time.h>

#include "core/api/agreement.h"

namespace torchspan {
class Worker;
}  // namespace torchspan

namespace torchspan::checkpoint {

/// The ranks that save and restore together, ordered; the first one commits.
class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual std::size_t index() const = 0;
  /// "rank 2 (worker2)", by index.
  virtual const std::vector<std::string>& names() const = 0;
  /// Returns all ranks' bytes once each has called it with this tag. Throws Error: kTimedOut or kDisconnected
  /// naming ranks.
  virtual std::vector<Bytes> gather(const std::string& tag, const Bytes& mine) = 0;
  /// How many of the others have died or left, and why the last one has; another process may have its rank now, which
  /// takes no part in what the ranks began before.
  struct Departures {
    std::uint64_t count = 0;
    std::optional<Error> last = {};
  };
  virtual Departures departures() const { return {}; }

  std::size_t size() const { return names().size(); }
  bool commits() const { return index() == 0; }
  /// Exchanges the outcomes of all ranks.
  std::vector<RankOutcome> exchange(const std::string& tag, const RankOutcome& mine) {
    return gather_outcomes([&](BytesView bytes) { return gather(tag, Bytes(bytes.begin(), bytes.end())); },
                           mine);
  }
  /// The same for what began when departures() counted `since`: throws why a rank has departed after that, instead of
  /// waiting for the process that has its rank now.
  std::vector<RankOutcome> exchange_since(std::uint64_t since, const std::string& tag,
                                          const RankOutcome& mine) {
    const Departures now = departures();
    if (now.count != since && now.last) throw *now.last;
    return exchange(tag, mine);
  }
};

/// A single process.
std::unique_ptr<Ranks> make_single_rank();
/// The workers `participants` (empty: all), over the membership's connections, which calls and collective
/// operations do not use. `name` separates managers of one set of workers.
std::unique_ptr<Ranks> make_worker_ranks(const Worker& worker, std::vector<std::string> participants,
                                         std::string name, Duration timeout);

}  // namespace torchspan::checkpoint
