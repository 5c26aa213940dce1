#include "checkpoint/files/manifest.h"
#include "core/api/trace_format.h"
#include "launch/supervisor/host_link.h"
#include "launch/supervisor/node_rounds.h"
#include "tests/wire_versions/fixtures.h"

namespace torchspan::wire_versions::file_bytes {
namespace {

Bytes bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(data, data + text.size());
}
std::string text_of(const Bytes& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

TraceContents trace() {
  TraceContents trace;
  trace.identity = {"worker1",         1, 4, "node", "clock", "run", 2, 0x21324354, 0x1122334455667788,
                    0x2122334455667788};
  trace.names = {"step", "loss"};
  trace.threads = {"main", "pool"};
  trace.spans = {{0x21324354, 0x3142536475, {3, 4, 5, 6}, 1, 0, SpanKind::kHandler, true}};
  trace.scalars = {{"loss", 7, 0.25, TimePoint(Duration(0x3142536475))}};
  trace.clock_samples = {
      {1, TimePoint(Duration(2)), TimePoint(Duration(3)), TimePoint(Duration(4)), TimePoint(Duration(5))}};
  trace.counters = {{8, {{"bytes", 9}, {"calls", 10}}}};
  trace.lost = 11;
  trace.complete = true;
  return trace;
}

Bytes encode_trace(const TraceContents& trace) {
  TraceEncoder encoder;
  encoder.identity(trace.identity);
  encoder.names(0, trace.names);
  encoder.threads(0, trace.threads);
  encoder.spans(trace.spans);
  encoder.scalars(trace.scalars);
  encoder.clock_samples(trace.clock_samples);
  for (const CounterSample& sample : trace.counters) encoder.counters(sample);
  encoder.lost(trace.lost);
  if (trace.complete) encoder.end();
  return encoder.take();
}

checkpoint::Manifest manifest() {
  using namespace checkpoint;  // NOLINT(google-build-using-namespace)
  Manifest manifest;
  manifest.step = 1200;
  manifest.world_size = 2;
  manifest.metric = 0.25;
  manifest.files["a.safetensors"] = {100, 60, 7};
  manifest.files["b.safetensors"] = {101, 61, 8};
  manifest.tensors["w"] = {ElementType::kF32,
                           {4, 2},
                           {{{{0, 0}, {2, 2}}, "a.safetensors", "w@0,0", 0, 11},
                            {{{2, 0}, {2, 2}}, "b.safetensors", "w@2,0", 0, 12}}};
  manifest.values = {{"epoch", std::int64_t{3}}, {"loss", 0.5}, {"done", true}, {"name", std::string("run")}};
  return manifest;
}

launch::NodeState node_state() {
  launch::NodeState state;
  state.attempt = 3;
  state.phase = launch::NodeState::Phase::kRunning;
  state.store_port = 29501;
  state.signal = 15;
  state.options = "-n 4";
  state.questions = "tls:node:29502";
  state.failure = launch::NodeState::Failure{
      {.workers = 4, .started = 5, .ran = Duration(6), .code = 7, .signal = 9}, "worker3 exited with code 1"};
  return state;
}

}  // namespace

Fixtures fixtures() {
  Fixtures all;
  all.push_back({"trace", {encode_trace(trace())}, [](const Parts& parts) {
                   const TraceContents read = decode_trace(parts.at(0));
                   return read.ignored == 0 ? Parts{encode_trace(read)} : Parts();
                 }});
  all.push_back({"manifest", {bytes_of(checkpoint::encode_manifest(manifest()))}, [](const Parts& parts) {
                   return Parts{bytes_of(checkpoint::encode_manifest(
                       checkpoint::parse_manifest(text_of(parts.at(0)), "the manifest")))};
                 }});
  all.push_back({"launchers", {launch::encode_node_state(node_state())}, [](const Parts& parts) {
                   const auto read = launch::decode_node_state(parts.at(0));
                   return read ? Parts{launch::encode_node_state(*read)} : Parts();
                 }});
  launch::HostMessage answer;
  answer.kind = launch::HostMessage::Kind::kAnswer;
  answer.id = 0x1122334455667788;
  answer.brief = true;
  all.push_back({"launchers_answer", {launch::encode_host_message(answer)}, [](const Parts& parts) {
                   const auto read = launch::decode_host_message(parts.at(0));
                   return read ? Parts{launch::encode_host_message(*read)} : Parts();
                 }});
  return all;
}

}  // namespace torchspan::wire_versions::file_bytes
