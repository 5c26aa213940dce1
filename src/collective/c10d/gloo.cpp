#include "collective/c10d/gloo.h"

#include "collective/c10d/c10d_wire.h"

#if defined(TORCHSPAN_GLOO)
#include <algorithm>
#include <map>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torchspan::collective {
namespace {

using rendezvous::Membership;

/// What Gloo's ranks tell each other before they connect. All of them set and wait for keys in one pattern,
/// so that the first wait for an unknown key can be a gather of everything that was set so far.
class MeetingStore final : public c10d::Store {
 public:
  MeetingStore(Membership& world, std::vector<int> ranks, Deadline deadline)
      : world_(world), ranks_(std::move(ranks)), deadline_(deadline) {}

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override { values_[key] = value; }
  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    return values_.at(key);
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) {
      while (!values_.contains(key)) gather();
    }
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }
  bool check(const std::vector<std::string>& keys) override {
    return std::all_of(keys.begin(), keys.end(),
                       [&](const std::string& key) { return values_.contains(key); });
  }
  std::int64_t getNumKeys() override { return static_cast<std::int64_t>(values_.size()); }
  bool deleteKey(const std::string& key) override { return values_.erase(key) != 0; }
  std::int64_t add(const std::string&, std::int64_t) override {
    throw Error(ErrorKind::kUnsupported, "Gloo asked its store to count, which it never did before");
  }

 private:
  void gather() {
    ByteWriter writer;
    writer.put(static_cast<std::uint32_t>(values_.size()));
    for (const auto& [key, value] : values_) {
      writer.put_string(key);
      writer.put_string(std::string(value.begin(), value.end()));
    }
    for (const Bytes& theirs : world_.all_gather("torchspan.gloo", writer.bytes(), ranks_, deadline_)) {
      ByteReader reader(theirs);
      for (std::size_t left = reader.get_count(8); left > 0; --left) {
        const std::string key = reader.get_string(), value = reader.get_string();
        values_[key].assign(value.begin(), value.end());
      }
    }
  }

  Membership& world_;
  const std::vector<int> ranks_;
  const Deadline deadline_;
  std::map<std::string, std::vector<std::uint8_t>> values_;
};

bool on_one_host(const Membership& world, const std::vector<int>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int rank) { return world.member(rank).host_id == world.self().host_id; });
}

C10dGroup connect(Membership& world, const std::vector<int>& ranks, Duration timeout, Executor& executor) {
  auto options =
      c10d::ProcessGroupGloo::Options::create(std::chrono::ceil<std::chrono::milliseconds>(timeout));
  options->threads = 2;
  options->devices.push_back(on_one_host(world, ranks)
                                 ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                                 : c10d::ProcessGroupGloo::createDefaultDevice());
  auto store = c10::make_intrusive<MeetingStore>(world, ranks, executor.deadline_in(timeout));
  const auto rank = std::find(ranks.begin(), ranks.end(), world.self().rank) - ranks.begin();
  C10dGroup group;
  group.group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, static_cast<int>(rank),
                                                            static_cast<int>(ranks.size()), options);
  group.split = [&world, &executor, ranks, timeout](const std::vector<int>& members) {
    std::vector<int> part;
    for (const int member : members) part.push_back(ranks[static_cast<std::size_t>(member)]);
    return connect(world, part, timeout, executor);
  };
  return group;
}

}  // namespace

std::unique_ptr<Wire> connect_gloo(Runtime& runtime, Membership& world, const std::vector<int>& ranks,
                                   Duration timeout) {
  if (ranks.size() == 1) return nullptr;
  return std::make_unique<C10dWire>(connect(world, ranks, timeout, runtime.executor));
}

}  // namespace torchspan::collective

#else

namespace torchspan::collective {

std::unique_ptr<Wire> connect_gloo(Runtime&, rendezvous::Membership&, const std::vector<int>&, Duration) {
  throw Error(ErrorKind::kUnsupported,
              "this build has no Gloo: install libgloo-dev and configure again, or use another back end");
}

}  // namespace torchspan::collective

#endif
