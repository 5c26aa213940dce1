#include "checkpoint/commit/listing.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>
#include <set>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::checkpoint {
namespace {

void put_sizes(ByteWriter& out, const Sizes& sizes) {
  out.put(static_cast<std::uint32_t>(sizes.size()));
  for (const std::int64_t size : sizes) out.put(size);
}

Sizes get_sizes(ByteReader& in) {
  Sizes sizes(in.get_count(sizeof(std::int64_t)));
  for (std::int64_t& size : sizes) size = in.get<std::int64_t>();
  return sizes;
}

std::string key_of(const ListedPart& part) {
  if (part.box == whole_box(part.shape)) return part.name;
  return fmt::format("{}@{}", part.name, fmt::join(part.box.offset, ","));
}

/// What is known about one tensor.
struct Gathered {
  const ListedPart* first = nullptr;
  std::size_t writer = 0;
  std::map<Box, std::uint64_t> boxes;  ///< with their fingerprints
};

void check_same_tensor(const Gathered& known, const ListedPart& part, const std::string& first_writer,
                       const std::string& writer) {
  if (known.first->type == part.type && known.first->shape == part.shape) return;
  throw_invalid(fmt::format("{} saves '{}' with shape {} and dtype {}, but {} with shape {} and dtype {}; use "
                            "different names, or add_per_rank() if each rank has its own",
                            first_writer, part.name, describe(known.first->shape),
                            to_string(known.first->type), writer, describe(part.shape), to_string(part.type)));
}

}  // namespace

Bytes encode_listing(const Listing& listing) {
  ByteWriter out;
  out.put(static_cast<std::uint32_t>(listing.size()));
  for (const ListedPart& part : listing) {
    out.put_string(part.name);
    out.put(part.type);
    put_sizes(out, part.shape);
    put_sizes(out, part.box.offset);
    put_sizes(out, part.box.size);
    out.put(part.fingerprint);
  }
  return out.take();
}

Listing decode_listing(BytesView bytes) {
  ByteReader in(bytes);
  Listing listing(in.get_count(25));
  for (ListedPart& part : listing) {
    part.name = in.get_string();
    part.type = in.get<ElementType>();
    if (part.type > ElementType::kU64) throw_invalid("a listing of a checkpoint has an unknown dtype");
    part.shape = get_sizes(in);
    part.box.offset = get_sizes(in);
    part.box.size = get_sizes(in);
    part.fingerprint = in.get<std::uint64_t>();
    if (!element_count(part.shape) || !fits(part.box, part.shape))
      throw_invalid(fmt::format("a listing of a checkpoint has an impossible part of '{}'", part.name));
  }
  in.expect_end();
  return listing;
}

Plan make_plan(const std::vector<Listing>& listings, const std::vector<std::string>& writers) {
  std::map<std::string_view, Gathered> tensors;
  std::vector<std::vector<std::size_t>> chosen(listings.size());
  for (std::size_t w = 0; w < listings.size(); ++w) {
    for (std::size_t i = 0; i < listings[w].size(); ++i) {
      const ListedPart& part = listings[w][i];
      Gathered& known = tensors[part.name];
      if (known.first == nullptr) {
        known.first = &part;
        known.writer = w;
      }
      check_same_tensor(known, part, writers[known.writer], writers[w]);
      const auto [place, is_new] = known.boxes.emplace(part.box, part.fingerprint);
      if (is_new) {
        chosen[w].push_back(i);
      } else if (place->second != part.fingerprint) {
        throw_invalid(fmt::format("{} and {} save different states as '{}', which are no replicas; register "
                                  "it with add_per_rank(), or under different names",
                                  writers[known.writer], writers[w], part.name));
      }
    }
  }
  for (const auto& [name, known] : tensors) {
    std::vector<Box> boxes;
    for (const auto& [box, fingerprint] : known.boxes) boxes.push_back(box);
    if (const std::string fault = coverage_fault(whole_box(known.first->shape), boxes); !fault.empty())
      throw_invalid(fmt::format("the shards of '{}' do not make up the tensor: {}", name, fault));
  }
  Plan plan;
  plan.shares.resize(listings.size());
  const auto files = std::ranges::count_if(chosen, [](const auto& parts) { return !parts.empty(); });
  int number = 0;
  for (std::size_t w = 0; w < listings.size(); ++w) {
    if (chosen[w].empty()) continue;
    Plan::Share& share = plan.shares[w];
    share.file = fmt::format("model-{:05}-of-{:05}.safetensors", ++number, files);
    // Wide dtypes first, so that all data is aligned; then by name.
    std::ranges::sort(chosen[w], [&](std::size_t a, std::size_t b) {
      const ListedPart &x = listings[w][a], &y = listings[w][b];
      return std::make_pair(bits_of(y.type), std::string_view(x.name)) <
             std::make_pair(bits_of(x.type), std::string_view(y.name));
    });
    share.parts = chosen[w];
    for (const std::size_t i : share.parts) {
      const ListedPart& part = listings[w][i];
      share.entries.push_back({key_of(part), part.type, part.box.size});
    }
    share.entries = encode_header(std::move(share.entries), {}).header.entries;
  }
  return plan;
}

void fill_manifest(Manifest& manifest, const std::vector<Listing>& listings, const Plan& plan,
                   const std::vector<FileReport>& reports) {
  for (std::size_t w = 0; w < plan.shares.size(); ++w) {
    const Plan::Share& share = plan.shares[w];
    if (share.file.empty()) continue;
    manifest.files[share.file] = reports[w].file;
    for (std::size_t i = 0; i < share.parts.size(); ++i) {
      const ListedPart& part = listings[w][share.parts[i]];
      SavedTensor& tensor = manifest.tensors[part.name];
      tensor.type = part.type;
      tensor.shape = part.shape;
      tensor.boxes.push_back(
          {part.box, share.file, share.entries[i].name, share.entries[i].begin, reports[w].checksums.at(i)});
    }
  }
}

TensorIndex index_of(const Manifest& manifest) {
  TensorIndex index;
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const SavedBox& saved : tensor.boxes) {
      index.total_bytes += byte_count(tensor.type, saved.box.size, name);
      index.files[saved.key] = saved.file;
    }
  }
  return index;
}

}  // namespace torchspan::checkpoint
