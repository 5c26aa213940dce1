#include "launch/watch/diagnosis.h"
#include "launch/watch/host_report.h"
#include "tests/support/fuzz_seeds.h"

namespace {

torchspan::Bytes bytes_of(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using namespace torchspan::launch;
    WorkerReport worker;
    worker.rank = 2;
    worker.open = {{"collective", "all_reduce", 3, 17, 5}};
    worker.pending = {{"f", "worker0", "train.cpp:3", 2, true}};
    worker.passes = {{7, true, {"a tensor"}}};
    worker.threads = {{'S', 3}};
    HostReport host{.node = 1, .host = "far", .trouble = "", .workers = {worker}};
    host.notices.emplace_back(2, torchspan::TimeoutNotice{.kind = "call", .name = "f"});
    const JobReport job{.node = 0, .host = "near", .workers = 2, .prefix = "worker", .others = {host}};
    return std::vector<torchspan::Bytes>{bytes_of(encode_host_report(host)),
                                         bytes_of(encode_job_report(job))};
  });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace torchspan::launch;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto host = decode_host_report(text);
  if (host && !decode_host_report(encode_host_report(*host))) __builtin_trap();
  const auto job = decode_job_report(text);
  if (!job) return 0;
  if (!decode_job_report(encode_job_report(*job))) __builtin_trap();
  const auto workers = merge_hosts({}, *job);
  if (workers.size() < 200) static_cast<void>(format_diagnosis(workers));
  return 0;
}
