#include <cstdlib>
#include <string_view>

#include <torchspan/core/error.h>

#include "checkpoint/files/manifest.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/files/strict_json.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::checkpoint;

void check_header(BytesView bytes) {
  const Header header = parse_header(bytes, bytes.size(), "file");
  if (header.data_start + header.data_bytes() != bytes.size()) std::abort();
  const EncodedHeader again = encode_header(header.entries, header.metadata);
  const Header read = parse_header(again.bytes, again.bytes.size() + header.data_bytes(), "file");
  if (read.entries != header.entries || read.metadata != header.metadata) std::abort();
}

/// The body without its checksum, which no mutation would keep.
void check_manifest(std::string_view body) {
  const std::string text = R"({"xxh3":")" + checksum_text(checksum_of(std::as_bytes(std::span(body)))) +
                           R"(","manifest":)" + std::string(body) + "}\n";
  const Manifest manifest = parse_manifest(text, "manifest");
  const std::string again = encode_manifest(manifest);
  if (encode_manifest(parse_manifest(again, "manifest")) != again) std::abort();
}

void check_index(std::string_view text) {
  const TensorIndex index = parse_index(text, "index");
  if (parse_index(encode_index(index), "index").files != index.files) std::abort();
}

}  // namespace

/// Any bytes are refused with an Error, or their value can be encoded and read again.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const BytesView bytes = std::as_bytes(std::span(data + 1, size - 1));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  try {
    switch (data[0] % 3) {
      case 0:
        check_header(bytes);
        break;
      case 1:
        check_manifest(text);
        break;
      default:
        check_index(text);
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kInvalid) std::abort();
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    const EncodedHeader header = encode_header(
        {{"weight", ElementType::kF32, {2, 3}}, {"bias", ElementType::kI64, {}}}, {{"format", "pt"}});
    Manifest manifest;
    manifest.metric = 0.5;
    manifest.files["a"] = {100, 60, 7};
    manifest.tensors["w"] = {
        ElementType::kF32,
        {4, 2},
        {{{{0, 0}, {2, 2}}, "a", "w@0,0", 0, 1}, {{{2, 0}, {2, 2}}, "a", "w@2,0", 16, 2}}};
    manifest.values = {
        {"epoch", std::int64_t{-3}}, {"loss", 3.5}, {"done", true}, {"name", std::string("x")}};
    const std::string text = encode_manifest(manifest);
    const std::string_view body = std::string_view(text).substr(37, text.size() - 39);
    const std::string index = encode_index({12, {{"w", "model.safetensors"}}});
    return std::vector<Bytes>{
        joined({bytes_of({0}), header.bytes, Bytes(header.header.data_bytes())}),
        joined({bytes_of({1}), std::as_bytes(std::span(body))}),
        joined({bytes_of({2}), std::as_bytes(std::span(index))}),
    };
  });
}
