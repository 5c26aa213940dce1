#include "fashion_mnist/client.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>

#include <ATen/ATen.h>

#include "fashion_mnist/dataset.h"
#include "fashion_mnist/training.h"

namespace fashion_mnist {

std::vector<Seen> call_server(torchspan::Worker& worker, const torchspan::RRef<Server>& server,
                              const Calls& calls) {
  TrainingOptions source;
  source.data = calls.data;
  source.limit = calls.limit;
  const Dataset data = load(source, Split::kTest);
  const auto batches = batches_in_order(data.size(), calls.images);
  const torchspan::Executor& clock = worker.runtime().executor;
  std::vector<Seen> versions;
  std::size_t ended = 0;  // calls that the last version answered
  for (std::size_t call = 0; ended < batches.size(); ++call) {
    const Batch batch = data.batch(batches[call % batches.size()]);
    const auto began = clock.now();
    const Answer answer = server.rpc_sync(kClassify, batch.images);
    const double seconds = torchspan::to_seconds(clock.now() - began);
    if (versions.empty() || versions.back().version != answer.version)
      versions.push_back({answer.version, 0, 0, {}});
    Seen& seen = versions.back();
    seen.images += batch.size();
    seen.right += answer.classes.eq(batch.labels).sum().item<std::int64_t>();
    seen.seconds.push_back(seconds);
    if (answer.version >= calls.until) ++ended;
  }
  return versions;
}

std::vector<Seen> merge(const std::vector<std::vector<Seen>>& clients) {
  std::map<std::int64_t, Seen> versions;
  for (const auto& client : clients) {
    for (const Seen& seen : client) {
      Seen& all = versions[seen.version];
      all.version = seen.version;
      all.images += seen.images;
      all.right += seen.right;
      all.seconds.insert(all.seconds.end(), seen.seconds.begin(), seen.seconds.end());
    }
  }
  std::vector<Seen> merged;
  for (const auto& [version, seen] : versions) merged.push_back(seen);
  return merged;
}

std::string describe(const Seen& seen) {
  std::vector<double> times = seen.seconds;
  std::sort(times.begin(), times.end());
  return fmt::format("version {:3}: {:5} calls, p50 {:.2f} ms, p99 {:.2f} ms, accuracy {:.2f} %",
                     seen.version, times.size(), 1e3 * times[times.size() / 2],
                     1e3 * times[times.size() * 99 / 100],
                     100 * static_cast<double>(seen.right) / static_cast<double>(seen.images));
}

}  // namespace fashion_mnist
