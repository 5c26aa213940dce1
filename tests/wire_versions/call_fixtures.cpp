// Calls have no structs: their frames are taken from a conversation of two workers.
#include <algorithm>
#include <cstdio>
#include <map>

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include "tests/parity/rpc_world.h"
#include "tests/wire_versions/fixtures.h"

namespace torchspan::wire_versions::call_bytes {
namespace {

using namespace torchspan::testing;  // NOLINT(google-build-using-namespace)

at::Tensor scale(const at::Tensor& x, std::int64_t by, const std::string&) { return x * by; }
RRef<at::Tensor> same(const RRef<at::Tensor>& x) { return x; }
void fail(std::int64_t number) { throw Error(ErrorKind::kInvalid, "number " + std::to_string(number)); }
void wait_until_cancelled(Worker& worker) {
  const auto current = worker.current_call();
  while (!current->stop.stop_requested()) nap(worker, std::chrono::milliseconds(1));
}
torch::jit::Module make_module() {
  torch::jit::Module module("Adder");
  module.define("def forward(self, x: Tensor) -> Tensor:\n    return x + 1\n");
  return module;
}
constexpr Function<scale> kScale{"scale"};
constexpr Function<same> kSame{"same"};
constexpr Function<fail> kFail{"fail"};
constexpr Function<wait_until_cancelled> kWaitUntilCancelled{"wait_until_cancelled"};
constexpr Function<make_module> kMakeModule{"make_module"};

void converse(Worker& worker) {
  const at::Tensor x = at::tensor({1.5F, 2.5F});
  worker.rpc_sync("worker1", kScale, x, 3, "text");
  const RRef<at::Tensor> there = worker.remote("worker1", kScale, x, 4, "text");
  there.to_here();
  worker.rpc_sync("worker1", kSame, there).creation().wait();
  worker.rpc_sync("worker1", "aten::add", {x, x}, {{"alpha", std::int64_t{2}}});
  worker.remote("worker1", "aten::add", {x, x}).to_here();
  const auto module = worker.remote("worker1", kMakeModule);
  module.rpc_sync("forward", {x});
  module.remote("forward", {x}).to_here();
  EXPECT_THROW(worker.rpc_sync("worker1", kFail, 5), Error);
  std::stop_source stop;
  const auto cancelled = worker.with({.stop = stop.get_token()}).rpc_async("worker1", kWaitUntilCancelled);
  nap(worker, std::chrono::milliseconds(50));
  stop.request_stop();
  EXPECT_THROW(cancelled.wait(), Error);
}

Bytes encode(const wire::FrameView& view) {
  wire::Frame frame;
  frame.header = view.header;
  for (const auto& blob : view.blobs)
    frame.blobs.push_back({std::string(blob.name), Bytes(blob.bytes.begin(), blob.bytes.end())});
  frame.handles = view.handles;
  frame.value.assign(view.value.begin(), view.value.end());
  frame.tensor_metadata.assign(view.tensor_metadata.begin(), view.tensor_metadata.end());
  return wire::encode_frame(frame);
}

/// The frame without what differs from run to run, and without the line of the call.
Bytes normalized(BytesView bytes) {
  wire::FrameView view = wire::decode_frame(bytes);
  view.header.sequence = view.header.call = 0;
  view.header.remaining = 0;
  Bytes site;  // a call site is the line as a u32, then the file name
  for (auto& blob : view.blobs) {
    if (blob.name != "rpc.site") continue;
    EXPECT_GT(blob.bytes.size(), sizeof(std::uint32_t));
    site.assign(blob.bytes.begin(), blob.bytes.end());
    std::fill_n(site.begin(), sizeof(std::uint32_t), std::byte{0});
    blob.bytes = site;
  }
  return encode(view);
}

/// The first request, reply and error of each type.
std::string key_of(const wire::FrameHeader& header) {
  char type[16];
  std::snprintf(type, sizeof type, "0x%04X", static_cast<int>(header.type));
  if ((header.flags & wire::kFlagError) != 0) return std::string(type) + "/error";
  return (header.flags & wire::kFlagReply) != 0 ? std::string(type) + "/reply" : type;
}

}  // namespace

Fixtures fixtures() {
  SimCluster cluster(
      world_of(2, FunctionTable().add(kScale, kSame, kFail, kWaitUntilCancelled, kMakeModule)));
  std::map<std::string, Bytes> frames;  // by key; only one simulated thread runs at a time
  cluster.network().observe([&](const net::SimMessage& message) {
    if (!message.from.starts_with("sim:worker") || message.from.ends_with(".membership")) return;
    const wire::FrameHeader header = wire::decode_frame(message.header).header;
    // Those of the types without a struct.
    const auto type = static_cast<int>(header.type);
    if (type == 0x0002 || (type >= 0x0010 && type <= 0x0017))
      frames.emplace(key_of(header), normalized(message.header));
  });
  cluster.run([](Worker& worker) {
    if (worker.rank() == 0) converse(worker);
  });
  Fixtures all;
  for (auto& [key, frame] : frames) {
    all.push_back(
        {key, {frame}, [](const Parts& parts) { return Parts{encode(wire::decode_frame(parts.at(0)))}; }});
  }
  return all;
}

}  // namespace torchspan::wire_versions::call_bytes
