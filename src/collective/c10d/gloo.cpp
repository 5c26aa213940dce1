#include "collective/c10d/gloo.h"

#include "collective/c10d/c10d_collectives.h"
#include "collective/c10d/compat.h"

#if defined(TORCHSPAN_GLOO)
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <map>
#include <netinet/in.h>
#include <optional>
#include <set>
#include <sys/socket.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <torchspan/detail/core/mutex.h>

#include "core/api/descriptor.h"
#include "net/api/network.h"

namespace torchspan::collective {
namespace {

using rendezvous::Membership;

constexpr Duration kBetweenGathers = std::chrono::milliseconds(1);
/// Gloo adds its timeout to the time; this stands for none.
constexpr Duration kLongestTimeout = std::chrono::hours(24 * 3650);

/// A number that no other socket of this system has, also after this one is closed; 0 for a descriptor that is not a socket.
std::uint64_t cookie_of(int descriptor) {
  std::uint64_t cookie = 0;
  socklen_t size = sizeof cookie;
  return ::getsockopt(descriptor, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

/// Calls `look` with a copy of each descriptor of this process: the descriptor may be closed and reused at any time.
template <class Look>
void for_each_descriptor(const Look& look) {
  std::vector<int> descriptors;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const std::string name = entry.path().filename().string();
    int descriptor = -1;
    if (std::from_chars(name.data(), name.data() + name.size(), descriptor).ec == std::errc()) {
      descriptors.push_back(descriptor);
    }
  }
  for (const int descriptor : descriptors) {
    const Descriptor copy(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (copy) look(copy.get());
  }
}

/// The TCP connections of an engine that cannot cancel its pending operations: the sockets that appear while the engine is
/// made, and have an end at an address at which its ranks listened. These addresses alone do not tell them later: their
/// ports are free again, and the system gives them to other sockets.
class Connections {
 public:
  /// Before the engine is made.
  Connections() {
    for_each_descriptor([this](int descriptor) { others_.insert(cookie_of(descriptor)); });
  }

  /// Adds the addresses at which this rank, or a peer, listens: every sockaddr found in the bytes that the
  /// engine's ranks exchanged.
  void add_own(const std::vector<std::uint8_t>& exchanged) { find(exchanged, own_); }
  void add_peer(const std::vector<std::uint8_t>& exchanged) { find(exchanged, peers_); }
  /// After the engine is made and all addresses are added.
  void identify() {
    for_each_descriptor([this](int descriptor) {
      const std::uint64_t cookie = cookie_of(descriptor);
      if (cookie != 0 && !others_.contains(cookie) && has_known_end(descriptor)) cookies_.insert(cookie);
    });
    others_.clear();
  }

  /// Shuts the connections down, as if all peers had closed them.
  void end() const {
    for_each_descriptor([this](int descriptor) {
      if (cookies_.contains(cookie_of(descriptor))) ::shutdown(descriptor, SHUT_RDWR);
    });
  }

 private:
  static void find(const std::vector<std::uint8_t>& exchanged, std::set<std::string>& addresses);
  bool has_known_end(int socket) const;

  std::set<std::uint64_t> others_, cookies_;
  std::set<std::string> own_, peers_;
};

/// Family, port and address; empty for other families.
std::string key_of(const sockaddr_storage& address) {
  const auto text = [](const void* data, std::size_t size) {
    return std::string(static_cast<const char*>(data), size);
  };
  if (address.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(address);
    return text(&four.sin_port, sizeof four.sin_port) + text(&four.sin_addr, sizeof four.sin_addr);
  }
  if (address.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
    return text(&six.sin6_port, sizeof six.sin6_port) + text(&six.sin6_addr, sizeof six.sin6_addr);
  }
  return {};
}

void Connections::find(const std::vector<std::uint8_t>& exchanged, std::set<std::string>& addresses) {
  for (const std::size_t size : {sizeof(sockaddr_in), sizeof(sockaddr_in6)}) {
    for (std::size_t at = 0; at + size <= exchanged.size(); ++at) {
      sockaddr_storage address{};
      std::memcpy(&address, exchanged.data() + at, size);
      if (address.ss_family != (size == sizeof(sockaddr_in) ? AF_INET : AF_INET6)) continue;
      addresses.insert(key_of(address));
    }
  }
}

bool Connections::has_known_end(int socket) const {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) {
    return false;
  }
  return own_.contains(key_of(own)) || peers_.contains(key_of(peer));
}

/// The store through which Gloo's ranks find each other. A thread exchanges what the ranks set, by repeated
/// gathers, until all ranks are connected.
class GlooStore final : public c10d::Store {
 public:
  GlooStore(std::shared_ptr<WorldLink> world, std::vector<int> ranks, ConnectionRounds rounds,
            Deadline deadline)
      : world_(std::move(world)),
        executor_(world_->runtime()->executor),
        ranks_(std::move(ranks)),
        rounds_(std::move(rounds)),
        deadline_(deadline),
        parker_(executor_.make_parker()),
        thread_(executor_.spawn("gloo store", [this] { run(); })) {}

  /// Waits until every rank is connected; throws the first failure of a rank. `trouble`: why this rank is not
  /// connected; empty if it is.
  void finish(const std::string& trouble) {
    {
      MutexLock lock(mutex_);
      own_.connected = trouble.empty();
      own_.trouble = trouble;
    }
    thread_.join();
    MutexLock lock(mutex_);
    if (failure_) throw Error(*failure_);
  }

  /// Adds the addresses of this rank and of its peers.
  void add_addresses(Connections& connections) {
    MutexLock lock(mutex_);
    for (const auto& [key, value] : values_) {
      if (own_.values.contains(key)) {
        connections.add_own(value);
      } else {
        connections.add_peer(value);
      }
    }
  }

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    MutexLock lock(mutex_);
    own_.values[key] = value;
    values_[key] = value;
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    MutexLock lock(mutex_);
    return values_.at(key);
  }
  void wait(const std::vector<std::string>& keys) override {
    while (!check(keys)) {
      {
        MutexLock lock(mutex_);
        if (failure_) throw Error(*failure_);
      }
      parker_->park(deadline_);
      if (deadline_.passed(executor_.now())) {
        throw Error(ErrorKind::kTimedOut,
                    "Gloo's ranks did not find each other before the deadline; raise GroupOptions::timeout");
      }
    }
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }
  bool check(const std::vector<std::string>& keys) override {
    MutexLock lock(mutex_);
    for (const std::string& key : keys) {
      if (!values_.contains(key)) return false;
    }
    return true;
  }
  /// Virtual since LibTorch 2.8. Not needed here: Gloo's ranks share one store.
  c10::intrusive_ptr<c10d::Store> clone() {
    throw Error(ErrorKind::kUnsupported, "this version of Gloo calls Store::clone(), which is not supported");
  }
  std::int64_t getNumKeys() override {
    MutexLock lock(mutex_);
    return static_cast<std::int64_t>(values_.size());
  }
  bool deleteKey(const std::string&) override { return false; }
  std::int64_t add(const std::string&, std::int64_t) override {
    throw Error(ErrorKind::kUnsupported, "this version of Gloo calls Store::add(), which is not supported");
  }

 private:
  using Values = std::map<std::string, std::vector<std::uint8_t>>;
  /// One rank's part of a gather.
  struct Part {
    bool connected = false;
    std::string trouble = {};
    Values values = {};

    bool ended() const { return connected || !trouble.empty(); }
    Bytes encode() const {
      ByteWriter writer;
      writer.put(static_cast<std::uint8_t>(connected ? 1 : 0));
      writer.put_string(trouble);
      writer.put(static_cast<std::uint32_t>(values.size()));
      for (const auto& [key, value] : values) {
        writer.put_string(key);
        writer.put_string(std::string(value.begin(), value.end()));
      }
      return writer.take();
    }
    static Part decode(BytesView bytes) {
      ByteReader reader(bytes);
      Part part;
      part.connected = reader.get<std::uint8_t>() != 0;
      part.trouble = reader.get_string();
      for (std::size_t left = reader.get_count(8); left > 0; --left) {
        const std::string key = reader.get_string(), value = reader.get_string();
        part.values[key].assign(value.begin(), value.end());
      }
      return part;
    }
  };

  void run() {
    std::vector<int> sorted = ranks_;
    std::sort(sorted.begin(), sorted.end());
    try {
      while (!gather_once(sorted)) executor_.sleep(kBetweenGathers);
    } catch (const Error& error) {
      MutexLock lock(mutex_);
      failure_ = error;
    }
    parker_->unpark();
  }

  /// True if all ranks are connected or have failed.
  bool gather_once(const std::vector<int>& sorted) {
    Bytes mine;
    {
      MutexLock lock(mutex_);
      mine = own_.encode();
    }
    bool all_ended = true;
    std::size_t place = 0;
    for (const Bytes& theirs : rounds_.gather(*world_, mine, sorted, deadline_)) {
      const Part part = Part::decode(theirs);
      all_ended = all_ended && part.ended();
      const int rank = sorted[place++];
      MutexLock lock(mutex_);
      values_.insert(part.values.begin(), part.values.end());
      if (!part.trouble.empty() && !failure_) {
        failure_ = Error(ErrorKind::kDisconnected,
                         fmt::format("rank {} could not connect through Gloo: {}", rank, part.trouble));
      }
    }
    parker_->unpark();
    return all_ended;
  }

  const std::shared_ptr<WorldLink> world_;
  Executor& executor_;
  const std::vector<int> ranks_;
  ConnectionRounds rounds_;  ///< of the thread
  const Deadline deadline_;
  Mutex mutex_;
  Values values_ TORCHSPAN_GUARDED_BY(mutex_);
  Part own_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  const std::unique_ptr<Parker> parker_;
  Thread thread_;
};

/// Blocks SIGPIPE on this thread. Gloo writes to sockets whose peers may have closed them, and does not block
/// the signal; its threads inherit the mask of the thread that starts them.
class WithoutPipeSignal {
 public:
  WithoutPipeSignal() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutPipeSignal() {
    if (sigismember(&before_, SIGPIPE) == 0) {
      constexpr timespec kAtOnce{};
      while (sigtimedwait(&pipe_, nullptr, &kAtOnce) == SIGPIPE) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutPipeSignal(const WithoutPipeSignal&) = delete;

 private:
  sigset_t pipe_, before_;
};

/// By default Gloo uses the address of the host's name, which other hosts may not reach.
std::shared_ptr<gloo::transport::Device> make_device(const WorldLink& world, const GlooOptions& options) {
  if (options.loopback) return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  const std::string host = net::host_of_route(world.self().address);
  return host.empty() ? c10d::ProcessGroupGloo::createDefaultDevice()
                      : c10d::ProcessGroupGloo::createDeviceForHostname(host);
}

C10dGroup connect(const std::shared_ptr<WorldLink>& world, const std::vector<int>& ranks,
                  const GlooOptions& options) {
  auto gloo_options = c10d::ProcessGroupGloo::Options::create(
      std::chrono::ceil<std::chrono::milliseconds>(std::min(options.timeout, kLongestTimeout)));
  gloo_options->threads = 2;
  auto store = c10::make_intrusive<GlooStore>(world, ranks, options.rounds,
                                              world->runtime()->executor.deadline_in(options.timeout));
  const auto rank = std::find(ranks.begin(), ranks.end(), world->self().rank) - ranks.begin();
  C10dGroup group;
  Connections connections;
  std::string trouble;
  try {
    const WithoutPipeSignal without_pipe_signal;
    gloo_options->devices.push_back(make_device(*world, options));
    group.group = compat::gloo_group(c10::make_intrusive<c10d::ProcessGroupGloo>(
        store, static_cast<int>(rank), static_cast<int>(ranks.size()), gloo_options));
    group.engine = "gloo";
  } catch (...) {
    trouble = torchspan::describe(std::current_exception()).text;
  }
  store->finish(trouble);
  store->add_addresses(connections);
  connections.identify();
  group.abort = [connections = std::move(connections)] { connections.end(); };
  group.runtime = world->runtime();
  group.split = [world, ranks, options](const std::vector<int>& members, std::uint64_t number) {
    std::vector<int> part;
    for (const int member : members) part.push_back(ranks[static_cast<std::size_t>(member)]);
    GlooOptions of_part = options;
    of_part.rounds.split = number;
    return connect(world, part, of_part);
  };
  return group;
}

}  // namespace

bool has_gloo() { return true; }

std::unique_ptr<BlockingCollectives> connect_gloo(const std::shared_ptr<WorldLink>& world,
                                                  const std::vector<int>& ranks, const GlooOptions& options) {
  if (ranks.size() == 1) return nullptr;
  return std::make_unique<C10dCollectives>(connect(world, ranks, options));
}

}  // namespace torchspan::collective

#else

namespace torchspan::collective {

bool has_gloo() { return false; }

std::unique_ptr<BlockingCollectives> connect_gloo(const std::shared_ptr<WorldLink>&,
                                                  const std::vector<int>& ranks, const GlooOptions&) {
  if (ranks.size() == 1) return nullptr;
  throw Error(
      ErrorKind::kUnsupported,
      "this build has no Gloo: use another backend, or configure again with the headers of LibTorch's Gloo "
      "(libgloo-dev for Debian's LibTorch; pip's torch has none)");
}

}  // namespace torchspan::collective

#endif
