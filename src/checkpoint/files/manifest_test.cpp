#include "checkpoint/files/manifest.h"

#include <cmath>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>

#include "tests/support/errors.h"

namespace torchspan::checkpoint::manifest_test {

using ::testing::HasSubstr;
using torchspan::testing::invalid_text;

Manifest example() {
  Manifest manifest;
  manifest.step = 1200;
  manifest.world_size = 2;
  manifest.metric = 0.25;
  manifest.files["a.safetensors"] = {100, 60, 7};
  manifest.files["b.safetensors"] = {100, 60, 8};
  manifest.tensors["w"] = {ElementType::kF32,
                           {4, 2},
                           {{{{0, 0}, {2, 2}}, "a.safetensors", "w@0,0", 0, 11},
                            {{{2, 0}, {2, 2}}, "b.safetensors", "w@2,0", 0, ~std::uint64_t{0}}}};
  manifest.tensors["s"] = {ElementType::kF64, {}, {{{{}, {}}, "a.safetensors", "s", 16, 12}}};
  manifest.values = {{"epoch", std::int64_t{-3}},
                     {"loss", 3.0},
                     {"done", false},
                     {"name", std::string("ü \"quoted\"")},
                     {"bound", std::numeric_limits<double>::infinity()}};
  return manifest;
}

TEST(CheckpointManifest, IsReadBackAsWritten) {
  const Manifest manifest = example();
  EXPECT_EQ(parse_manifest(encode_manifest(manifest), "manifest"), manifest);
  Manifest with_nan;
  with_nan.values["x"] = std::numeric_limits<double>::quiet_NaN();
  const Manifest read = parse_manifest(encode_manifest(with_nan), "manifest");
  EXPECT_TRUE(std::isnan(std::get<double>(read.values.at("x"))));
}

TEST(CheckpointManifest, IsRefusedWhateverBitIsFlippedAndWhereverItIsCut) {
  const std::string text = encode_manifest(example());
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      EXPECT_THROW(parse_manifest(damaged, "manifest"), Error) << "byte " << at << " bit " << bit;
    }
    EXPECT_THROW(parse_manifest(text.substr(0, at), "manifest"), Error) << "cut at " << at;
  }
}

std::string refusal(const std::function<void(Manifest&)>& change) {
  Manifest manifest = example();
  change(manifest);
  return invalid_text([&] { parse_manifest(encode_manifest(manifest), "manifest"); });
}

TEST(CheckpointManifest, IsRefusedIfItsBoxesDoNotMakeUpTheTensors) {
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].boxes.pop_back(); }),
              HasSubstr("tensor 'w': 4 of the elements of [0:4, 0:2] are in no part"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].boxes[1].box.offset[0] = 1; }), HasSubstr("overlap"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].boxes[1].box.offset[0] = 3; }),
              HasSubstr("not within"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].boxes[1].file = "c"; }),
              HasSubstr("'c' is not listed"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].boxes[1].begin = 30; }), HasSubstr("does not fit"));
  EXPECT_THAT(refusal([](Manifest& m) { m.files["../x"] = {}; }), HasSubstr("plain file name"));
}

TEST(TensorIndex, HasTheFormOfTheHuggingFaceLibraries) {
  const TensorIndex index{12, {{"w", "model-00001-of-00001.safetensors"}}};
  EXPECT_EQ(encode_index(index),
            R"({"metadata":{"total_size":12},"weight_map":{"w":"model-00001-of-00001.safetensors"}})"
            "\n");
  EXPECT_EQ(parse_index(encode_index(index), "index").files, index.files);
  EXPECT_THAT(invalid_text([] { parse_index(R"({"weight_map":{"w":"/etc/passwd"}})", "index"); }),
              HasSubstr("plain file name"));
}

}  // namespace torchspan::checkpoint::manifest_test
