#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "rendezvous/messages/compact.h"

/// The messages between clients and the store. A message is encoded as u16 type, then its fields(); it is one
/// struct here and one handler in a MessageTable. A newer version may add fields at the end of a message or of a
/// member, where their size precedes them, and messages that need no answer; readers of the version before it
/// skip both. Register, Welcome, Refused and Ping are exchanged before both sides know the other's version.
namespace torchspan::rendezvous {

inline constexpr std::size_t kMostGatherBytes = std::size_t{64} << 10;
inline constexpr std::size_t kMostCounts = 1024;

/// Draws a Member::instance, which is not 0, from the system's random source.
std::uint64_t random_instance();

/// Client to store, first message of a connection: this worker asks to join the world. Without a common
/// version, the store reads nothing else.
struct Register {
  static constexpr std::uint16_t kType = 1;
  ProtocolRange versions = kStoreProtocol;
  std::string job;
  Member member;
  int world_size = 0;
  bool require_same_functions = true;
  std::vector<std::string> functions;
  Duration timeout{0};  ///< the rest of this worker's join timeout

  static auto fields(auto& self) {
    return std::tie(self.versions, self.job, self.member, self.world_size, self.require_same_functions,
                    self.functions, self.timeout);
  }
  static Register decode(ByteReader& reader, const ProtocolRange& spoken = kStoreProtocol);
};

/// Workers that have left, or died in the same way.
struct Departed {
  std::vector<int> ranks;
  bool died = false;
  std::string how = {};  ///< of a death: the text after describe(worker), as in " died: its process ended …"
};

/// Store to a client: it has joined, because the world is complete or open. It finds itself by its name.
struct Welcome {
  static constexpr std::uint16_t kType = 2;
  std::vector<Member> members;     ///< the latest member of every rank, by rank
  std::vector<Departed> departed;  ///< those of them that left or died, by rank
  ProtocolRange versions = kStoreProtocol;

  static auto fields(auto& self) { return std::tie(self.members, self.departed, self.versions); }
  static Welcome decode(ByteReader& reader, const ProtocolRange& spoken = kStoreProtocol);
};

/// Store to a client: it cannot join this world. `passing`: this world ends, and the next one may begin at
/// the same address, so the client tries again.
struct Refused {
  static constexpr std::uint16_t kType = 3;
  ErrorKind kind = ErrorKind::kInvalid;
  std::string text;
  bool passing = false;

  static auto fields(auto& self) { return std::tie(self.kind, self.text, self.passing); }
};

/// Client to store: takes part in barrier or gather number `round` of these `ranks` under this `tag`.
struct Contribute {
  static constexpr std::uint16_t kType = 4;
  std::uint64_t call = 0;  ///< a number of the client; the answer repeats it
  std::string tag;
  Ranks ranks;  ///< ascending
  std::uint64_t round = 0;
  Duration timeout{0};  ///< Duration::max(): never
  Bytes bytes;
  std::vector<std::uint32_t> incarnations = {};  ///< of `ranks`, as the client knows them
  /// If not empty, the answer is the sum of all ranks' counts, a Summed, instead of all ranks' bytes.
  std::vector<std::uint64_t> counts = {};
  bool once = false;  ///< not sent: the tag has one round only, so the worker does not count its rounds

  static auto fields(auto& self) {
    return std::tie(self.call, self.tag, self.ranks, self.round, self.timeout, self.bytes, self.incarnations,
                    self.counts);
  }
};

/// Store to the participants of a round: all ranks arrived.
struct Gathered {
  static constexpr std::uint16_t kType = 5;
  /// The bytes of consecutive ranks that contributed the same.
  struct Run {
    std::size_t ranks = 1;
    Bytes bytes = {};
  };
  std::uint64_t call = 0;
  std::vector<Run> runs;  ///< by ascending rank

  /// Appends the bytes of the next rank.
  void add(Bytes bytes);
  /// The bytes of all ranks; throws kInvalid if they are not `ranks` many.
  std::vector<Bytes> all(std::size_t ranks) const;
  static auto fields(auto& self) { return std::tie(self.call, self.runs); }
};

/// Store to the participants of a round: it has failed.
struct RoundFailed {
  static constexpr std::uint16_t kType = 6;
  std::uint64_t call = 0;
  ErrorKind kind = ErrorKind::kInvalid;
  std::string text;

  static auto fields(auto& self) { return std::tie(self.call, self.kind, self.text); }
};

/// Client to store: goodbye.
struct Leave {
  static constexpr std::uint16_t kType = 7;
  static auto fields(auto&) { return std::tie(); }
};

/// Store to a client: acknowledges its goodbye.
struct Farewell {
  static constexpr std::uint16_t kType = 8;
  static auto fields(auto&) { return std::tie(); }
};

/// Workers that joined a running world, perhaps in place of others that left or died.
struct Arrived {
  std::vector<Member> members;
};

/// Store to a client: what happened to other workers since the last Changes or the Welcome, in order. A worker
/// is gone if it said goodbye, or died: its connection ended, or it was silent, or it gave up.
struct Changes {
  static constexpr std::uint16_t kType = 18;
  using Change = std::variant<Arrived, Departed>;
  std::vector<Change> list;

  /// Appends a change; joins it to the last one if both are of the same kind.
  void add(const Change& change);
  static auto fields(auto& self) { return std::tie(self.list); }
};

/// Store to a client on another host: requests a heartbeat. A store that sends none for `dead_after` is dead.
struct Ping {
  static constexpr std::uint16_t kType = 12;
  Duration dead_after{0};
  TimePoint sent = {};  ///< by the store's clock

  static auto fields(auto& self) { return std::tie(self.dead_after, self.sent); }
};

/// Client to store: the heartbeat, with the times from which the store's process compares the clocks.
struct Pong {
  static constexpr std::uint16_t kType = 13;
  TimePoint sent = {};      ///< of the Ping that it answers
  TimePoint received = {};  ///< by the client's clock
  TimePoint answered = {};  ///< by the client's clock

  static auto fields(auto& self) { return std::tie(self.sent, self.received, self.answered); }
};

/// Store to a client that was silent for too long: it was declared dead.
struct DeclaredDead {
  static constexpr std::uint16_t kType = 14;
  std::string reason;

  static auto fields(auto& self) { return std::tie(self.reason); }
};

/// Client to store: asks which ranks are missing in the round for which this client waits under number
/// `call`.
struct AskMissing {
  static constexpr std::uint16_t kType = 15;
  std::uint64_t call = 0;

  static auto fields(auto& self) { return std::tie(self.call); }
};

/// Store to a client: the answer. There is none for a round that has ended.
struct Missing {
  static constexpr std::uint16_t kType = 16;
  std::uint64_t call = 0;
  std::vector<int> ranks;

  static auto fields(auto& self) { return std::tie(self.call, self.ranks); }
};

/// Store to the participants of a round with counts: all ranks arrived.
struct Summed {
  static constexpr std::uint16_t kType = 19;
  std::uint64_t call = 0;
  CountSums sums;

  static auto fields(auto& self) { return std::tie(self.call, self.sums); }
};

/// Client to store: it ends without a goodbye, with the reason; the answer is a Farewell.
struct GiveUp {
  static constexpr std::uint16_t kType = 17;
  std::string why;  ///< follows the worker's name: "left because …"

  static auto fields(auto& self) { return std::tie(self.why); }
};

void put(ByteWriter& writer, const std::vector<Departed>& departed);
void get(ByteReader& reader, std::vector<Departed>& departed);
void put(ByteWriter& writer, const Gathered::Run& run);
void get(ByteReader& reader, Gathered::Run& run);
void put(ByteWriter& writer, const CountSums& sums);
void get(ByteReader& reader, CountSums& sums);
void put(ByteWriter& writer, const std::vector<Changes::Change>& changes);
void get(ByteReader& reader, std::vector<Changes::Change>& changes);

/// Reads the fields of a message after its type.
template <class Message>
Message decode_fields(ByteReader& reader) {
  Message message;
  get_all(reader, Message::fields(message));
  return message;
}
/// The same, but Register and Welcome may be of a newer version.
template <class Message>
Message decode_message(ByteReader& reader) {
  if constexpr (requires { Message::decode(reader); }) {
    return Message::decode(reader);
  } else {
    return decode_fields<Message>(reader);
  }
}

/// An encoded message, which several connections may send.
using SharedBytes = std::shared_ptr<const Bytes>;

/// Header of a message that is in the only segment.
inline constexpr std::array<std::byte, 1> kInSegment{};

template <class Message>
Bytes encode_message(const Message& message) {
  Bytes bytes;
  bytes.reserve(64);
  ByteWriter writer(std::move(bytes));
  writer.put(Message::kType);
  put_all(writer, Message::fields(message));
  return writer.take();
}

template <class Message>
SharedBytes share_message(const Message& message) {
  return std::make_shared<const Bytes>(encode_message(message));
}

/// Who sent a message: a process that speaks no newer version than this one, or one that does.
enum class Sender : std::uint8_t { kKnown, kNewer };

/// Maps message types to handlers. Unknown types and malformed bytes throw Error{kInvalid}; unknown types and
/// bytes after the known fields are ignored if the sender is newer.
template <class... Context>
class MessageTable {
 public:
  template <class Message>
  void on(std::function<void(Context..., Message)> handler) {
    on<Message>(std::move(handler), [](ByteReader& reader) { return decode_message<Message>(reader); });
  }
  template <class Message>
  void on(std::function<void(Context..., Message)> handler, std::function<Message(ByteReader&)> decode) {
    handlers_[Message::kType] = [handler = std::move(handler), decode = std::move(decode)](
                                    Context... context, ByteReader& reader, Sender sender) {
      Message message = decode(reader);
      if (sender == Sender::kKnown) reader.expect_end();
      handler(std::forward<Context>(context)..., std::move(message));
    };
  }
  void dispatch(Context... context, BytesView bytes, Sender sender = Sender::kKnown) const {
    ByteReader reader(bytes);
    const auto found = handlers_.find(reader.get<std::uint16_t>());
    if (found != handlers_.end()) return found->second(std::forward<Context>(context)..., reader, sender);
    if (sender == Sender::kKnown) throw_unknown(bytes);
  }

 private:
  [[noreturn]] static void throw_unknown(BytesView bytes) {
    throw_invalid("store message of type " + std::to_string(ByteReader(bytes).get<std::uint16_t>()) +
                  " is not known here: do all workers run the same version of TorchSpan?");
  }
  std::map<std::uint16_t, std::function<void(Context..., ByteReader&, Sender)>> handlers_;
};

}  // namespace torchspan::rendezvous
