#include "collective/shm/local_ranks.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::collective::shm {
namespace {

std::string hex(BytesView bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

/// Where a rank listens, and the token that peers need; no names if it is alone on its machine.
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
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kOverloaded) throw;  // no descriptor is left, wherever the ranks are
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
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kOverloaded) throw;
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

LocalRanks find_local_ranks(Executor& executor, const LocalRanksPlan& plan, const Gather& gather) {
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

}  // namespace torchspan::collective::shm
