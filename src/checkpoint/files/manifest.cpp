#include "checkpoint/files/manifest.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <limits>

#include <torchspan/core/error.h>

#include "checkpoint/files/safetensors.h"
#include "checkpoint/files/strict_json.h"

namespace torchspan::checkpoint {

Box whole_box(const Sizes& shape) { return {Sizes(shape.size(), 0), shape}; }

std::optional<Box> intersection(const Box& a, const Box& b) {
  if (a.offset.size() != b.offset.size()) return std::nullopt;
  Box common;
  for (std::size_t d = 0; d < a.offset.size(); ++d) {
    const std::int64_t begin = std::max(a.offset[d], b.offset[d]);
    const std::int64_t end = std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]);
    if (begin >= end) return std::nullopt;
    common.offset.push_back(begin);
    common.size.push_back(end - begin);
  }
  return common;
}

std::string coverage_fault(const Box& wanted, const std::vector<Box>& boxes) {
  std::int64_t left = element_count(wanted.size).value_or(0);
  std::vector<Box> parts;
  for (const Box& box : boxes) {
    const std::optional<Box> part = intersection(wanted, box);
    if (!part) continue;
    parts.push_back(*part);
  }
  std::sort(parts.begin(), parts.end());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t j = i + 1; j < parts.size(); ++j) {
      // Sorted by the first dimension: later boxes begin behind this one.
      if (!parts[i].offset.empty() && parts[j].offset[0] >= parts[i].offset[0] + parts[i].size[0]) break;
      if (intersection(parts[i], parts[j]))
        return fmt::format("parts {} and {} overlap", describe(parts[i]), describe(parts[j]));
    }
  }
  // Disjoint parts, so they have no more elements than the box.
  for (const Box& part : parts) left -= *element_count(part.size);
  if (left != 0) return fmt::format("{} of the elements of {} are in no part", left, describe(wanted));
  return {};
}

namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kPrefix = R"({"xxh3":")";
constexpr std::string_view kMiddle = R"(","manifest":)";
constexpr std::string_view kSuffix = "}\n";
constexpr std::size_t kHexDigits = 16;
constexpr const char* kFormat = "torchspan.checkpoint";
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kManifestDepth = 8;

std::uint64_t text_checksum(std::string_view text) { return checksum_of(std::as_bytes(std::span(text))); }

// JSON has no text for these.
OrderedJson double_json(double value) {
  if (std::isfinite(value)) return value;
  return OrderedJson{{"not_finite", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

OrderedJson value_json(const Value& value) {
  if (const auto* number = std::get_if<double>(&value)) return double_json(*number);
  return std::visit([](const auto& plain) { return OrderedJson(plain); }, value);
}

double not_finite_of(const JsonObject& object) {
  const std::string text = object.text("not_finite");
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  object.refuse(fmt::format("'{}' is not a number", text));
}

Value value_of(const nlohmann::json& json, const std::string& where) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_number_unsigned() &&
      json.get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return json.get<std::int64_t>();
  }
  if (json.is_number_integer() && !json.is_number_unsigned()) return json.get<std::int64_t>();
  return not_finite_of(JsonObject(json, where));
}

OrderedJson tensor_json(const SavedTensor& tensor) {
  OrderedJson boxes = OrderedJson::array();
  for (const SavedBox& saved : tensor.boxes) {
    OrderedJson box = OrderedJson::object();
    box["file"] = saved.file;
    box["key"] = saved.key;
    box["offset"] = saved.box.offset;
    box["shape"] = saved.box.size;
    box["begin"] = saved.begin;
    box["xxh3"] = checksum_text(saved.checksum);
    boxes.push_back(std::move(box));
  }
  OrderedJson json = OrderedJson::object();
  json["dtype"] = to_string(tensor.type);
  json["shape"] = tensor.shape;
  json["boxes"] = std::move(boxes);
  return json;
}

SavedBox saved_box_of(const JsonObject& json, const SavedTensor& tensor, const std::string& where) {
  SavedBox saved;
  saved.file = json.text("file");
  saved.key = json.text("key");
  saved.box = {json.sizes("offset"), json.sizes("shape")};
  saved.begin = json.number("begin");
  saved.checksum = parse_checksum(json.text("xxh3"), where);
  if (!fits(saved.box, tensor.shape)) {
    json.refuse(
        fmt::format("the box {} is not within the shape {}", describe(saved.box), describe(tensor.shape)));
  }
  return saved;
}

SavedTensor saved_tensor_of(const nlohmann::json& json, const Manifest& manifest, const std::string& where) {
  const JsonObject object(json, where);
  SavedTensor tensor;
  const auto type = element_type_named(object.text("dtype"));
  if (!type) object.refuse(fmt::format("unknown dtype '{}'", object.text("dtype")));
  tensor.type = *type;
  tensor.shape = object.sizes("shape");
  byte_count(tensor.type, tensor.shape, where);
  std::vector<Box> boxes;
  for (const nlohmann::json& entry : object.list("boxes")) {
    SavedBox saved = saved_box_of(JsonObject(entry, where), tensor, where);
    const auto file = manifest.files.find(saved.file);
    if (file == manifest.files.end())
      object.refuse(fmt::format("its file '{}' is not listed under 'files'", saved.file));
    const std::uint64_t data = file->second.bytes - file->second.head_bytes;
    const std::uint64_t bytes = byte_count(tensor.type, saved.box.size, where);
    if (bytes > data || saved.begin > data - bytes)
      object.refuse(fmt::format("box {} does not fit into its file", describe(saved.box)));
    boxes.push_back(saved.box);
    tensor.boxes.push_back(std::move(saved));
  }
  if (const std::string fault = coverage_fault(whole_box(tensor.shape), boxes); !fault.empty())
    object.refuse(fault);
  return tensor;
}

SavedFile saved_file_of(const std::string& name, const nlohmann::json& json, const std::string& what) {
  const JsonObject object(json, fmt::format("{}: file '{}'", what, name));
  if (!is_plain_name(name)) object.refuse("not a plain file name");
  SavedFile file;
  file.bytes = object.number("bytes");
  file.head_bytes = object.number("head_bytes");
  file.head_checksum = parse_checksum(object.text("head_xxh3"), what);
  if (file.head_bytes > file.bytes) object.refuse("'head_bytes' exceeds 'bytes'");
  return file;
}

std::string checked_body(std::string_view text, const std::string& what) {
  const std::size_t frame = kPrefix.size() + kHexDigits + kMiddle.size() + kSuffix.size();
  if (text.size() < frame || !text.starts_with(kPrefix) || !text.ends_with(kSuffix) ||
      text.substr(kPrefix.size() + kHexDigits, kMiddle.size()) != kMiddle) {
    throw_invalid(what + ": it is damaged, or not a manifest of TorchSpan");
  }
  const std::uint64_t expected = parse_checksum(text.substr(kPrefix.size(), kHexDigits), what);
  std::string body(text.substr(frame - kSuffix.size(), text.size() - frame));
  if (text_checksum(body) != expected) throw_invalid(what + ": its checksum does not match: it is damaged");
  return body;
}

}  // namespace

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

std::string encode_manifest(const Manifest& manifest) {
  OrderedJson root = OrderedJson::object();
  root["format"] = kFormat;
  root["version"] = kVersion;
  root["step"] = manifest.step;
  root["world_size"] = manifest.world_size;
  if (manifest.metric) root["metric"] = double_json(*manifest.metric);
  OrderedJson::object_t files, tensors, values;
  for (const auto& [name, file] : manifest.files) {
    OrderedJson json = OrderedJson::object();
    json["bytes"] = file.bytes;
    json["head_bytes"] = file.head_bytes;
    json["head_xxh3"] = checksum_text(file.head_checksum);
    files.emplace_back(name, std::move(json));
  }
  for (const auto& [name, tensor] : manifest.tensors) tensors.emplace_back(name, tensor_json(tensor));
  for (const auto& [name, value] : manifest.values) values.emplace_back(name, value_json(value));
  root["files"] = std::move(files);
  root["tensors"] = std::move(tensors);
  root["values"] = std::move(values);
  const std::string body = dumped(root, "the manifest");
  std::string text(kPrefix);
  text += checksum_text(text_checksum(body));
  text += kMiddle;
  text += body;
  text += kSuffix;
  return text;
}

Manifest parse_manifest(std::string_view text, const std::string& what) {
  const nlohmann::json json = parse_strictly(checked_body(text, what), kManifestDepth, what);
  const JsonObject root(json, what);
  if (root.text("format") != kFormat) root.refuse("it is not a manifest of TorchSpan");
  if (root.number("version") != kVersion) {
    root.refuse(
        fmt::format("it has version {}; this library reads version {}", root.number("version"), kVersion));
  }
  Manifest manifest;
  manifest.step = root.signed_number("step");
  const std::uint64_t world = root.number("world_size");
  if (world < 1 || world > static_cast<std::uint64_t>(std::numeric_limits<int>::max()))
    root.refuse("'world_size' is out of range");
  manifest.world_size = static_cast<int>(world);
  if (root.has("metric")) {
    const Value metric = value_of(root.member("metric"), what + ": metric");
    if (!std::holds_alternative<double>(metric)) root.refuse("'metric' is not a floating-point number");
    manifest.metric = std::get<double>(metric);
  }
  root.object("files");
  for (const auto& [name, file] : root.member("files").items())
    manifest.files.emplace(name, saved_file_of(name, file, what));
  root.object("tensors");
  for (const auto& [name, tensor] : root.member("tensors").items()) {
    manifest.tensors.emplace(name,
                             saved_tensor_of(tensor, manifest, fmt::format("{}: tensor '{}'", what, name)));
  }
  root.object("values");
  for (const auto& [name, value] : root.member("values").items())
    manifest.values.emplace(name, value_of(value, fmt::format("{}: value '{}'", what, name)));
  return manifest;
}

std::string encode_index(const TensorIndex& index) {
  OrderedJson root = OrderedJson::object();
  root["metadata"]["total_size"] = index.total_bytes;
  OrderedJson::object_t map;
  for (const auto& [tensor, file] : index.files) map.emplace_back(tensor, file);
  root["weight_map"] = std::move(map);
  return dumped(root, kIndexFile) + "\n";
}

TensorIndex parse_index(std::string_view text, const std::string& what) {
  const nlohmann::json json = parse_strictly(text, kManifestDepth, what);
  const JsonObject root(json, what);
  TensorIndex index;
  root.object("weight_map");
  for (const auto& [tensor, file] : root.member("weight_map").items()) {
    if (!file.is_string() || !is_plain_name(file.get<std::string>()))
      root.refuse(fmt::format("the file of tensor '{}' is not a plain file name", tensor));
    index.files.emplace(tensor, file.get<std::string>());
  }
  if (root.has("metadata")) {
    const JsonObject metadata = root.object("metadata");
    if (metadata.has("total_size") && metadata.member("total_size").is_number_unsigned())
      index.total_bytes = metadata.number("total_size");
  }
  return index;
}

}  // namespace torchspan::checkpoint
