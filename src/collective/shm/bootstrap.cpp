#include "collective/shm/bootstrap.h"

#include <algorithm>
#include <fmt/format.h>
#include <optional>

#include "collective/shm/unix_sockets.h"
#include "core/api/rate_limited_warning.h"

namespace torchspan::collective::shm {
namespace {

std::string hex(BytesView bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

/// The names of a rank's sockets, and the token that peers need; no names if no other rank is on its machine.
struct ListenerInfo {
  std::vector<std::string> names = {};
  Bytes token = {};
  std::string refusal = {};  ///< why there are no names although there should be

  Bytes encode() const {
    ByteWriter writer;
    writer.put_string(refusal);
    writer.put(static_cast<std::uint32_t>(names.size()));
    for (const std::string& name : names) writer.put_string(name);
    writer.put_bytes(token);
    return writer.take();
  }
  static ListenerInfo decode(BytesView bytes) {
    ByteReader reader(bytes);
    ListenerInfo info;
    info.refusal = reader.get_string();
    info.names.resize(reader.get_count(4));
    for (std::string& name : info.names) name = reader.get_string();
    const BytesView token = reader.get_bytes(reader.left());
    info.token.assign(token.begin(), token.end());
    return info;
  }
};

/// Which rank a rank has reached.
struct Answer {
  std::int32_t leader = 0;
  bool same_network = false;
  std::string reason = {};

  Bytes encode() const {
    ByteWriter writer;
    writer.put(leader);
    writer.put(static_cast<std::uint8_t>(same_network ? 1 : 0));
    writer.put_string(reason);
    return writer.take();
  }
  static Answer decode(BytesView bytes) {
    ByteReader reader(bytes);
    Answer answer;
    answer.leader = reader.get<std::int32_t>();
    answer.same_network = reader.get<std::uint8_t>() != 0;
    answer.reason = reader.get_string();
    return answer;
  }
};

ListenerInfo start_listening(Executor& executor, const LocalRanksPlan& plan,
                             std::optional<UnixListener>& listener) {
  const std::string& mine = plan.hosts[static_cast<std::size_t>(plan.self)];
  if (std::count(plan.hosts.begin(), plan.hosts.end(), mine) < 2) return {};
  if (!plan.refusal.empty()) return {.refusal = plan.refusal};
  try {
    const std::string name = "torchspan-" + hex(random_bytes(16));
    std::vector<std::string> names{name};
    if (!plan.folder.empty()) names.push_back(plan.folder + "/g-" + hex(random_bytes(8)) + ".sock");
    listener.emplace(executor, names);
    return {listener->names(), random_bytes(kTokenBytes)};
  } catch (const NoDescriptorLeft&) {
    throw;
  } catch (const Error& error) {
    return {.refusal = error.message()};
  }
}

Answer dial_earlier_ranks(Executor& executor, const LocalRanksPlan& plan,
                          const std::vector<ListenerInfo>& listeners,
                          std::optional<UnixConnection>& connection) {
  const auto self = static_cast<std::size_t>(plan.self);
  Answer answer{.leader = plan.self, .same_network = true};
  for (std::size_t rank = 0; rank < self && listeners[self].refusal.empty(); ++rank) {
    if (plan.hosts[rank] != plan.hosts[self]) continue;
    std::string why = listeners[rank].refusal;
    for (const std::string& name : listeners[rank].names) {
      try {
        connection.emplace(dial(executor, name));
        answer.leader = static_cast<std::int32_t>(rank);
        answer.same_network = UnixListener::is_nameless(name);
        return answer;
      } catch (const NoDescriptorLeft&) {
        throw;
      } catch (const Error& error) {
        if (why.empty()) why = error.message();
      }
    }
    if (answer.reason.empty()) {
      answer.reason =
          fmt::format("{} cannot reach {}: {}", plan.peers[self].text, plan.peers[rank].text, why);
    }
  }
  if (!listeners[self].refusal.empty()) {
    answer.reason = fmt::format("{}: {}", plan.peers[self].text, listeners[self].refusal);
  }
  return answer;
}

}  // namespace

bool LocalRanks::all_together() const {
  return std::all_of(leaders.begin(), leaders.end(), [&](int leader) { return leader == leaders[0]; });
}

LocalRanks find_local_ranks(Executor& executor, const LocalRanksPlan& plan, const GatherBytes& gather) {
  LocalRanks found;
  std::vector<ListenerInfo> listeners;
  for (const Bytes& bytes : gather(start_listening(executor, plan, found.listener).encode())) {
    listeners.push_back(ListenerInfo::decode(bytes));
    found.tokens.push_back(listeners.back().token);
  }
  std::vector<Answer> answers;
  for (const Bytes& bytes :
       gather(dial_earlier_ranks(executor, plan, listeners, found.connection).encode())) {
    answers.push_back(Answer::decode(bytes));
  }
  found.one_network = true;
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    int leader = answers[rank].leader;
    const bool good = leader >= 0 && leader <= static_cast<int>(rank) &&
                      answers[static_cast<std::size_t>(leader)].leader == leader;
    if (!good) leader = static_cast<int>(rank);
    found.leaders.push_back(leader);
    found.reasons.push_back(answers[rank].reason);
    found.one_network = found.one_network && answers[rank].same_network;
  }
  found.one_network = found.one_network && found.all_together();
  const auto self = static_cast<std::size_t>(plan.self);
  if (found.leaders[self] == plan.self) found.connection.reset();
  return found;
}

namespace {

/// A peer that connects and sends nothing delays the others for at most this long.
constexpr Duration kHelloLimit = std::chrono::seconds(10);
/// All ranks begin together, so a rank that has not connected by then never will.
constexpr Duration kBootstrapLimit = std::chrono::seconds(30);

/// The first message of a member that connects: the token, its rank and the size of the memory it passes.
struct Hello {
  Bytes token;
  std::uint32_t rank = 0;
  std::uint64_t size = 0;

  Bytes encode() const {
    ByteWriter writer;
    writer.put_bytes(token);
    writer.put(rank);
    writer.put(size);
    return writer.take();
  }
  static Hello decode(BytesView bytes) {
    ByteReader reader(bytes);
    Hello hello;
    const BytesView token = reader.get_bytes(kTokenBytes);
    hello.token.assign(token.begin(), token.end());
    hello.rank = reader.get<std::uint32_t>();
    hello.size = reader.get<std::uint64_t>();
    reader.expect_end();
    return hello;
  }
  static constexpr std::size_t kBytes = kTokenBytes + 12;
};

/// Exchanges memory between the ranks of one host.
class Bootstrap {
 public:
  Bootstrap(const std::shared_ptr<WorldLink>& world, const BootstrapOptions& plan, LocalRanks& local_ranks)
      : runtime_(*world->runtime()), rejections_(runtime_.log, runtime_.executor), local_ranks_(local_ranks) {
    const auto& leaders = local_ranks.leaders;
    leader_ = leaders[static_cast<std::size_t>(plan.self)];
    token_ = local_ranks.tokens[static_cast<std::size_t>(leader_)];
    for (std::size_t rank = 0; rank < leaders.size(); ++rank) {
      if (leaders[rank] != leader_) continue;
      if (static_cast<int>(rank) == plan.self) self_ = size();
      peers_.push_back(plan.peers[rank]);
    }
    if (size() == 1) return;
    deadline_ = earlier(plan.deadline, runtime_.executor.deadline_in(kBootstrapLimit));
    peer_memory_ = std::make_shared<PeerMemory>(world, peers_, self_, plan.memory);
  }

  void hold() {
    if (size() == 1) return;
    if (self_ == 0) {
      host();
    } else {
      join();
    }
  }

  std::shared_ptr<PeerMemory> take_hub() { return std::move(peer_memory_); }

 private:
  struct AcceptedPeer {
    UnixConnection connection;
    Descriptor memory;
    std::uint64_t size;
  };

  int size() const { return static_cast<int>(peers_.size()); }

  /// Returns nullopt for a connection without the token, or without a message in time.
  std::optional<std::pair<std::uint32_t, AcceptedPeer>> receive_hello(UnixConnection connection) {
    try {
      const Deadline deadline = earlier(deadline_, runtime_.executor.deadline_in(kHelloLimit));
      DescriptorMessage received = connection.receive(Hello::kBytes, deadline);
      const Hello hello = Hello::decode(received.bytes);
      if (hello.token != token_ || hello.rank == 0 || hello.rank >= peers_.size()) return std::nullopt;
      return std::pair(hello.rank,
                       AcceptedPeer{std::move(connection), std::move(received.descriptor), hello.size});
    } catch (const NoDescriptorLeft&) {
      throw;
    } catch (const Error& error) {
      rejections_.write(fmt::format("rejected a connection to the group's socket: {}", error.message()));
      return std::nullopt;
    }
  }

  void host() {
    std::vector<std::optional<AcceptedPeer>> peers(peers_.size());
    for (int missing = size() - 1; missing > 0;) {
      auto peer = receive_hello(local_ranks_.listener->accept(deadline_));
      if (!peer || peers[peer->first]) continue;
      peers[peer->first].emplace(std::move(peer->second));
      --missing;
    }
    for (int to = 1; to < size(); ++to) {
      for (int of = 0; of < size(); ++of) {
        if (of == to) continue;
        const bool mine = of == 0;
        const Descriptor& memory = mine ? peer_memory_->own()->descriptor() : peers[of]->memory;
        const Hello about{token_, static_cast<std::uint32_t>(of),
                          mine ? peer_memory_->own()->mapping().size() : peers[of]->size};
        peers[to]->connection.send(about.encode(), memory.get(), deadline_);
      }
    }
    for (int rank = 1; rank < size(); ++rank) {
      peer_memory_->add_peer(rank, map_arena(peers[rank]->memory, peers[rank]->size));
      peer_memory_->add_end(rank, peers[rank]->connection.take_socket());
    }
  }

  void join() {
    UnixConnection connection = std::move(*local_ranks_.connection);
    const Hello hello{token_, static_cast<std::uint32_t>(self_), peer_memory_->own()->mapping().size()};
    connection.send(hello.encode(), peer_memory_->own()->descriptor().get(), deadline_);
    std::vector<bool> known(peers_.size());
    known[static_cast<std::size_t>(self_)] = true;
    for (int missing = size() - 1; missing > 0; --missing) {
      DescriptorMessage received = connection.receive(Hello::kBytes, deadline_);
      const Hello about = Hello::decode(received.bytes);
      if (about.token != token_ || about.rank >= known.size() || known[about.rank]) {
        throw_invalid("the first rank of the host passed memory for an unknown rank or with a wrong token");
      }
      known[about.rank] = true;
      peer_memory_->add_peer(static_cast<int>(about.rank), map_arena(received.descriptor, about.size));
    }
    peer_memory_->add_end(0, connection.take_socket());
  }

  Runtime& runtime_;
  RateLimitedWarning rejections_;
  LocalRanks& local_ranks_;
  int leader_ = 0;
  int self_ = 0;  ///< among peers_
  std::vector<PeerIdentity> peers_;
  Bytes token_;
  Deadline deadline_;
  std::shared_ptr<PeerMemory> peer_memory_;
};

}  // namespace

BootstrapResult bootstrap(const std::shared_ptr<WorldLink>& world, const BootstrapOptions& plan,
                          LocalRanks local_ranks, const GatherBytes& gather) {
  BootstrapResult met{local_ranks.leaders, local_ranks.reasons};
  std::string trouble;
  try {
    Bootstrap exchange(world, plan, local_ranks);
    exchange.hold();
    met.peer_memory = exchange.take_hub();
  } catch (const NoDescriptorLeft&) {
    throw;
  } catch (const Error& error) {
    trouble = error.message();
  }
  local_ranks.connection.reset();  // a leader that waits for this rank sees the end of the connection
  ByteWriter writer;
  writer.put_string(trouble);
  const std::vector<Bytes> answers = gather(writer.bytes());
  std::vector<bool> failed(answers.size());
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    const std::string text = ByteReader(answers[rank]).get_string();
    if (text.empty()) continue;
    failed[static_cast<std::size_t>(local_ranks.leaders[rank])] = true;
    met.reasons[rank] = fmt::format("{}: {}", plan.peers[rank].text, text);
  }
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    if (!failed[static_cast<std::size_t>(local_ranks.leaders[rank])]) continue;
    met.leaders[rank] = static_cast<int>(rank);
    if (static_cast<int>(rank) == plan.self) met.peer_memory.reset();
  }
  return met;
}

}  // namespace torchspan::collective::shm
