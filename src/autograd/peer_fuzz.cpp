#include <algorithm>
#include <cstdlib>
#include <limits>

#include <ATen/ops/ones.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/rpc/service.h>
#include <torchspan/detail/wire/frame.h>
#include <torchspan/wire.h>

#include "autograd/messages/messages.h"
#include "core/api/sim_executor.h"
#include "net/api/sim.h"
#include "tests/support/fuzz_seeds.h"
#include "wire/api/tensors.h"

/// A worker with functions, references and autograd, and a peer that knows the secret and sends any bytes.
namespace {

using namespace torchspan;

at::Tensor same(const at::Tensor& x) { return x; }
std::int64_t count(const std::vector<std::int64_t>& numbers) {
  return static_cast<std::int64_t>(numbers.size());
}
constexpr Function<same> kSame{"same"};
constexpr Function<count> kCount{"count"};

constexpr std::uint64_t kInstance = 1000;

struct CloseHandler final : net::Handler {
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>&, net::Message) override {}
  void on_closed(const std::shared_ptr<net::Channel>&, const Error&) override { closed = true; }
  bool closed = false;
};

/// The peer's identity, with the bytes of a hello message.
Bytes hello() {
  wire::Frame frame;
  frame.header.type = wire::MessageType{0x0001};
  frame.header.flags = wire::kFlagOneWay;
  frame.value = wire::to_payload(std::make_tuple(std::string("peer"), std::uint32_t{1}, kInstance)).value;
  return wire::encode_frame(frame);
}

rendezvous::MembershipOptions join_options(int rank, const std::string& address) {
  rendezvous::MembershipOptions join;
  join.name = rank == 0 ? "worker" : "peer";
  join.rank = rank;
  join.world_size = 2;
  join.store_address = "sim:store";
  join.address = address;
  join.instance = kInstance;
  return join;
}

/// Excludes LibTorch's operators and large tensors, which are not what this target tests.
bool is_small(BytesView bytes, std::span<const Segment> sent) {
  try {
    const wire::FrameView frame = wire::decode_frame(bytes);
    const auto type = static_cast<int>(frame.header.type);
    if ((type == 0x0013 || type == 0x0014) && (frame.header.flags & wire::kFlagReply) == 0) {
      ByteReader reader(frame.value);
      const std::string name = reader.get_string();
      if (name != "aten::alias" && name != "aten::detach") return false;
    }
    std::vector<Buffer> segments;
    for (const Segment& segment : sent) segments.push_back(allocate_buffer(segment.size));
    for (const at::Tensor& tensor : wire::unpack(frame.tensor_metadata, segments)) {
      if (tensor.defined() && tensor.numel() > 4096) return false;
    }
  } catch (const Error&) {
  }
  return true;
}

class World {
 public:
  void run(BytesView script) {
    executor_.run([&] {
      const Thread worker = executor_.spawn("worker", [&] { serve(); });
      const Thread peer = executor_.spawn("peer", [&] { send_invalid(script); });
    });
  }

 private:
  std::unique_ptr<rendezvous::Membership> join(Runtime& runtime, int rank, const std::string& address) {
    return rendezvous::Membership::join(
        runtime,
        [this, rank](const std::string& endpoint, net::Handler& handler) {
          return network_.make_transport(endpoint == "store" ? endpoint : "member" + std::to_string(rank),
                                         handler, {});
        },
        join_options(rank, address));
  }

  /// Serves while its peer is in the world.
  void serve() {
    Runtime runtime(executor_, "worker", LogLevel::kOff);
    FunctionTable functions;
    functions.add(kSame, kCount);
    rpc::ServiceOptions options;
    options.name = "worker";
    options.listen = "sim:worker";
    options.threads = 1;
    options.stopped_limit = Duration::zero();
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<autograd::AutogradExtension>());
    rpc::WorkerService service(
        runtime, functions, options,
        [&](net::Handler& handler) { return network_.make_transport("worker", handler, {}); },
        std::move(extensions));
    service.start(join(runtime, 0, service.address()));
    while (service.worker().backend()->is_present(1)) executor_.sleep(std::chrono::milliseconds(100));
    if (service.worker().rpc_sync(0, kCount, std::vector<std::int64_t>(3)) != 3) std::abort();
    service.stop();
  }

  void send_invalid(BytesView script) {
    Runtime runtime(executor_, "peer", LogLevel::kOff);
    CloseHandler peer_handler;
    const auto transport = network_.make_transport("peer", peer_handler, {});
    const auto membership = join(runtime, 1, transport->listen("sim:peer"));
    std::shared_ptr<net::Channel> channel;
    const auto say = [&](BytesView header, std::vector<Segment> segments) {
      if (!channel || peer_handler.closed) {
        peer_handler.closed = false;
        channel = transport->connect("sim:worker", Deadline::never());
        channel->send(hello(), {});
      }
      try {
        channel->send(header, segments);
      } catch (const Error&) {
        peer_handler.closed = true;
      }
      for (int i = 0; i < 2; ++i) {
        executor_.sleep(std::chrono::microseconds(100));
        while (transport->poll()) {
        }
      }
    };
    for (int messages = 0; script.size() > 2 && messages < 32; ++messages) say_next(script, say);
    executor_.sleep(std::chrono::milliseconds(200));
    while (transport->poll()) {
    }
    membership->leave(executor_.deadline_in(std::chrono::seconds(1)));
  }

  /// Reads from the script one byte with the number of segments, and two with the length of the frame.
  template <class Say>
  void say_next(BytesView& script, const Say& say) {
    const auto at = [&](std::size_t i) { return static_cast<std::size_t>(script[i]); };
    const std::size_t count = at(0) % 4, length = std::min(at(1) + 256 * at(2), script.size() - 3);
    const BytesView frame = script.subspan(3, length);
    script = script.subspan(3 + length);
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < count && !script.empty(); ++i) {
      segments.push_back({kMemory.data(), 1 + static_cast<std::size_t>(script[0]), nullptr});
      script = script.subspan(1);
    }
    if (is_small(frame, segments)) say(frame, segments);
  }

  const Bytes kMemory = Bytes(256);
  SimExecutor executor_{1};
  net::SimNetwork network_{executor_, {}};
};

}  // namespace

/// For any bytes from the peer, the worker must not crash or hang, and must serve itself after the peer left.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size <= 1 << 13) World().run(std::as_bytes(std::span(data, size)));
  return 0;
}

namespace {

class Seeds {
 public:
  Seeds& message(int type, std::uint32_t flags, wire::Payload payload, std::vector<wire::Handle> handles = {},
                 std::vector<wire::NamedBlob> blobs = {}) {
    wire::Frame frame;
    frame.header.type = static_cast<wire::MessageType>(type);
    frame.header.flags = flags;
    frame.header.instance = kInstance;
    frame.header.sequence = frame.header.call = ++calls_;
    frame.header.remaining = 1'000'000'000;
    frame.blobs = std::move(blobs);
    frame.handles = std::move(handles);
    frame.value = payload.value;
    const wire::PackedTensors packed = wire::pack(payload.tensors);
    frame.tensor_metadata = packed.metadata;
    const Bytes bytes = wire::encode_frame(frame);
    wire::decode_frame(bytes);
    seed_.push_back(static_cast<std::byte>(packed.segments.size()));
    seed_.push_back(static_cast<std::byte>(bytes.size() % 256));
    seed_.push_back(static_cast<std::byte>(bytes.size() / 256));
    seed_.insert(seed_.end(), bytes.begin(), bytes.end());
    for (const Segment& segment : packed.segments) seed_.push_back(static_cast<std::byte>(segment.size - 1));
    return *this;
  }
  template <class... T>
  Seeds& say(int type, std::vector<wire::Handle> handles, const T&... values) {
    return message(type, wire::kFlagHasDeadline, wire::to_payload(std::make_tuple(values...)),
                   std::move(handles));
  }
  /// A message with its type. Throws, so that no seeds are written, if it cannot be decoded.
  template <rpc::Message M>
  Seeds& add_request(const M& encoded) {
    wire::Payload payload = wire::to_payload(encoded), copy = payload;
    wire::from_payload<M>(copy);
    return message(static_cast<int>(M::kType), wire::kFlagHasDeadline, std::move(payload));
  }
  void end() { all_.push_back(std::exchange(seed_, {})); }
  std::vector<Bytes> take() { return std::move(all_); }

 private:
  std::uint64_t calls_ = 0;
  Bytes seed_;
  std::vector<Bytes> all_;
};

std::vector<Bytes> make_seeds() {
  Seeds seeds;
  const std::uint64_t same_id = rpc::function_id("same", rpc::signature_of<same>());
  const std::uint64_t count_id = rpc::function_id("count", rpc::signature_of<count>());
  const at::Tensor tensor = at::ones({2, 2});
  const GlobalId value{1, 5}, fork{1, 6};
  const wire::Handle handle{0, value, fork, wire::type_tag<at::Tensor>()};
  const std::vector<c10::IValue> args = {tensor};
  const std::map<std::string, c10::IValue> kwargs = {{"self", tensor}};
  const std::uint64_t context = std::uint64_t{1} << 48, pass = context + 1;
  const auto edges = [&](std::uint64_t message) {
    return wire::NamedBlob{
        "autograd",
        wire::to_payload(autograd::EdgeHeader{context, message, {0}, "aten::alias", "here:1"}).value};
  };
  // Calls, by function and by name, with and without edges.
  seeds.say(0x0010, {}, same_id, tensor).say(0x0010, {}, count_id, std::vector<std::int64_t>{1, 2}).end();
  seeds.say(0x0013, {}, std::string("aten::alias"), args, kwargs).say(0x0002, {}).end();
  // In a context: a pass of each mode, questions about it, and its end. The worker's first reply is its
  // message 1.
  const auto call_in_context = [&]() -> Seeds& {
    return seeds.message(0x0013, 0,
                         wire::to_payload(std::make_tuple(std::string("aten::alias"), args,
                                                          std::map<std::string, c10::IValue>())),
                         {}, {edges(pass)});
  };
  const std::int64_t patience = 1'000'000;
  call_in_context()
      .add_request(autograd::PropagateGradients{context, pass, 1, true, 1, {tensor}, {}})
      .add_request(autograd::AskPass{context, pass, pass + 1, patience})
      .add_request(autograd::AbortPass{context, pass, Error(ErrorKind::kCancelled, "no more")})
      .add_request(autograd::ClearGradients{context})
      .add_request(autograd::ReleaseContext{context})
      .end();
  call_in_context()
      .add_request(autograd::MarkSends{context, pass, false, 2, {{1, {0}}}})
      .add_request(autograd::MarksFinal{context, pass})
      .add_request(autograd::AskGraph{context, pass + 2, patience})
      .add_request(autograd::PropagateGradients{context, pass, 1, false, 2, {tensor}, {1}})
      .add_request(autograd::AdoptMember{context})
      .add_request(autograd::ReleaseContext{context})
      .end();
  using Patience = std::numeric_limits<std::int64_t>;
  call_in_context()
      .add_request(autograd::AskPass{context, pass, pass + 1, Patience::max()})
      .add_request(autograd::AskGraph{context, pass + 2, Patience::min()})
      .end();
  // References: created, awaited, fetched, forked, deleted, queried, abandoned.
  seeds
      .say(0x0014, {handle}, std::string("aten::detach"), std::vector<c10::IValue>{tensor},
           std::map<std::string, c10::IValue>())
      .say(0x0017, {{0, value, {1, 7}, handle.type_tag}}, std::uint32_t{0})
      .say(0x0012, {{0, value, {1, 7}, handle.type_tag}}, std::uint32_t{0})
      .say(0x0020, {}, value, GlobalId{1, 8}, std::uint32_t{0},
           std::uint64_t{1})  // a message of rpc, whose types are not visible here
      .say(0x0021, {}, value, GlobalId{1, 8})
      .say(0x0023, {}, std::vector<GlobalId>{fork, {1, 9}})
      .say(0x0022, {}, value, fork)
      .say(0x0024, {}, GlobalId{1, 10}, GlobalId{1, 11}, std::string("no more"))
      .end();
  seeds.say(0x0016, {handle, {0, value, {1, 7}, 1}}, std::uint32_t{0}, std::string("forward"), args, kwargs)
      .end();
  // Replies without a request, and errors with frames.
  seeds.message(0x0010, wire::kFlagReply, wire::to_payload(tensor), {handle}).end();
  seeds
      .message(0x0010, wire::kFlagReply | wire::kFlagError,
               wire::to_payload(Error(ErrorKind::kInvalid, "no")), {}, {{"rpc.error", Bytes(9)}})
      .end();
  return seeds.take();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return testing::offer_seeds(count, arguments, make_seeds);
}
