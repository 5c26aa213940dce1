#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/rendezvous/membership.h>

/// What clients and the store say to each other. A message travels as u16 type, then its fields; it is one
/// struct here and one handler in a MessageTable.
namespace torchspan::rendezvous {

inline constexpr std::uint32_t kStoreVersion = 3;
inline constexpr std::size_t kMostGatherBytes = std::size_t{64} << 10;
inline constexpr int kMaxWorkers = 1 << 20;

/// The end of a wait that a message asked for; Duration::max() is never.
Deadline deadline_after(TimePoint now, Duration timeout);

/// Client to store, first message of a connection: lets this worker into the world. Of another version only
/// the version is read.
struct Register {
  static constexpr std::uint16_t kType = 1;
  std::uint32_t version = kStoreVersion;
  std::string job;
  Member member;
  int world_size = 0;
  bool require_same_functions = true;
  std::vector<std::string> functions;
  Duration timeout{0};  ///< what is left of this worker's patience

  void encode(ByteWriter& writer) const;
  static Register decode(ByteReader& reader);
};

/// A worker that is not in any more: it left, or died for a reason.
struct Gone {
  int rank = 0;
  bool died = false;
  std::string reason;
};

/// Store to a client: it is in, since the world is complete or open. It knows itself by its name.
struct Welcome {
  static constexpr std::uint16_t kType = 2;
  std::vector<Member> members;  ///< the latest of every rank, by rank
  std::vector<Gone> gone;       ///< which of them are

  void encode(ByteWriter& writer) const;
  static Welcome decode(ByteReader& reader);
};

/// Store to a client: it will not be in the world that is here. `passing`: that world ends, and the next one
/// may begin at the same address, so the client comes again.
struct Refused {
  static constexpr std::uint16_t kType = 3;
  ErrorKind kind = ErrorKind::kInvalid;
  std::string text;
  bool passing = false;

  void encode(ByteWriter& writer) const;
  static Refused decode(ByteReader& reader);
};

/// Client to store: comes to the `round`th barrier or gather of these `ranks` under this `tag`.
struct Contribute {
  static constexpr std::uint16_t kType = 4;
  std::uint64_t call = 0;  ///< the client's own number, repeated in the answer
  std::string tag;
  std::vector<int> ranks;  ///< ascending
  std::uint64_t round = 0;
  Duration timeout{0};  ///< Duration::max(): never
  Bytes bytes;
  std::vector<std::uint32_t> incarnations = {};  ///< of `ranks`, as the client knows them

  void encode(ByteWriter& writer) const;
  static Contribute decode(ByteReader& reader);
};

/// Store to the participants of a round: everybody came.
struct Gathered {
  static constexpr std::uint16_t kType = 5;
  std::uint64_t call = 0;
  std::vector<Bytes> bytes;  ///< by ascending rank

  void encode(ByteWriter& writer) const;
  static Gathered decode(ByteReader& reader);
};

/// Store to the participants of a round that cannot succeed any more.
struct RoundFailed {
  static constexpr std::uint16_t kType = 6;
  std::uint64_t call = 0;
  ErrorKind kind = ErrorKind::kInvalid;
  std::string text;

  void encode(ByteWriter& writer) const;
  static RoundFailed decode(ByteReader& reader);
};

/// Client to store: good-bye.
struct Leave {
  static constexpr std::uint16_t kType = 7;
  void encode(ByteWriter&) const {}
  static Leave decode(ByteReader&) { return {}; }
};

/// Store to a client: its good-bye was heard.
struct Farewell {
  static constexpr std::uint16_t kType = 8;
  void encode(ByteWriter&) const {}
  static Farewell decode(ByteReader&) { return {}; }
};

/// Store to the others: `rank` said good-bye.
struct Left {
  static constexpr std::uint16_t kType = 9;
  int rank = 0;

  void encode(ByteWriter& writer) const;
  static Left decode(ByteReader& reader);
};

/// Store to the others: the connection of `rank` ended without a good-bye, it fell silent, or it gave up.
struct Died {
  static constexpr std::uint16_t kType = 10;
  int rank = 0;
  std::string reason;  ///< a sentence that begins with the worker

  void encode(ByteWriter& writer) const;
  static Died decode(ByteReader& reader);
};

/// Store to the others: a worker came into a running world, perhaps in the place of one that is gone.
struct Joined {
  static constexpr std::uint16_t kType = 11;
  Member member;

  void encode(ByteWriter& writer) const;
  static Joined decode(ByteReader& reader);
};

/// Store to a client of another host: give a sign of life. A store that sends none for `dead_after` is dead.
struct Ping {
  static constexpr std::uint16_t kType = 12;
  Duration dead_after{0};

  void encode(ByteWriter& writer) const;
  static Ping decode(ByteReader& reader);
};

/// Client to store: here I am.
struct Pong {
  static constexpr std::uint16_t kType = 13;
  void encode(ByteWriter&) const {}
  static Pong decode(ByteReader&) { return {}; }
};

/// Store to a client that was silent for too long: to the world it is dead.
struct DeclaredDead {
  static constexpr std::uint16_t kType = 14;
  std::string reason;

  void encode(ByteWriter& writer) const;
  static DeclaredDead decode(ByteReader& reader);
};

/// Client to store: who has not come to the round for which this client waits under its number `call`?
struct AskMissing {
  static constexpr std::uint16_t kType = 15;
  std::uint64_t call = 0;

  void encode(ByteWriter& writer) const;
  static AskMissing decode(ByteReader& reader);
};

/// Store to a client: the answer. None comes for a round that has ended.
struct Missing {
  static constexpr std::uint16_t kType = 16;
  std::uint64_t call = 0;
  std::vector<int> ranks;

  void encode(ByteWriter& writer) const;
  static Missing decode(ByteReader& reader);
};

/// Client to store: it ends without a good-bye, and why; answered by a Farewell.
struct GiveUp {
  static constexpr std::uint16_t kType = 17;
  std::string why;  ///< "left because …": what comes after its name

  void encode(ByteWriter& writer) const;
  static GiveUp decode(ByteReader& reader);
};

template <class Message>
Bytes encode_message(const Message& message) {
  Bytes bytes;
  bytes.reserve(64);
  ByteWriter writer(std::move(bytes));
  writer.put(Message::kType);
  message.encode(writer);
  return writer.take();
}

/// Which handler executes which message. Dispatching is total: unknown types and malformed bytes throw
/// Error{kInvalid}.
template <class... Context>
class MessageTable {
 public:
  template <class Message>
  void on(std::function<void(Context..., Message)> handler) {
    handlers_[Message::kType] = [handler = std::move(handler)](Context... context, ByteReader& reader) {
      Message message = Message::decode(reader);
      reader.expect_end();
      handler(std::forward<Context>(context)..., std::move(message));
    };
  }
  void dispatch(Context... context, BytesView bytes) const {
    ByteReader reader(bytes);
    const auto found = handlers_.find(reader.get<std::uint16_t>());
    if (found == handlers_.end()) throw_unknown(bytes);
    found->second(std::forward<Context>(context)..., reader);
  }

 private:
  [[noreturn]] static void throw_unknown(BytesView bytes) {
    throw Error(ErrorKind::kInvalid,
                "store message of type " + std::to_string(ByteReader(bytes).get<std::uint16_t>()) +
                    " is not known here: do all workers run the same version of TorchSpan?");
  }
  std::map<std::uint16_t, std::function<void(Context..., ByteReader&)>> handlers_;
};

}  // namespace torchspan::rendezvous
