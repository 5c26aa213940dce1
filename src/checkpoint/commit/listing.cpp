#include "checkpoint/commit/listing.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>
#include <set>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

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
  std::size_t rank = 0;
  std::set<Box> boxes;
};

/// Whether two ranks have the same state by what they say, whatever its bytes are: archives of LibTorch contain addresses,
/// so that even their lengths differ between processes.
bool are_declared_replicas(const ListedPart& a, const ListedPart& b) {
  return a.fingerprint != 0 && a.fingerprint == b.fingerprint;
}

void check_same_tensor(const Gathered& known, const ListedPart& part, const std::string& first_writer,
                       const std::string& writer) {
  const ListedPart& first = *known.first;
  if (first.fingerprint != part.fingerprint) {
    throw_invalid(
        "{} and {} save different states as '{}', which are not replicas; register it with add_per_rank(), "
        "or under different names",
        first_writer, writer, part.name);
  }
  if (first.type == part.type && first.shape == part.shape) return;
  throw_invalid(
      "{} saves '{}' with shape {} and dtype {}, but {} with shape {} and dtype {}; use different names, or "
      "add_per_rank() if each rank has its own",
      first_writer, part.name, describe(first.shape), to_string(first.type), writer, describe(part.shape),
      to_string(part.type));
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
    out.put_string(part.owner);
  }
  return out.take();
}

Listing decode_listing(BytesView bytes) {
  ByteReader in(bytes);
  Listing listing(in.get_count(29));
  for (ListedPart& part : listing) {
    part.name = in.get_string();
    part.type = in.get<ElementType>();
    if (part.type > ElementType::kU64) throw_invalid("a listing of a checkpoint has an unknown dtype");
    part.shape = get_sizes(in);
    part.box.offset = get_sizes(in);
    part.box.size = get_sizes(in);
    part.fingerprint = in.get<std::uint64_t>();
    part.owner = in.get_string();
    if (!element_count(part.shape) || !fits(part.box, part.shape))
      throw_invalid("a listing of a checkpoint has an impossible part of '{}'", part.name);
  }
  in.expect_end();
  return listing;
}

namespace {

/// The parts that each rank writes, by listing index.
std::vector<std::vector<std::size_t>> choose_parts(const std::vector<Listing>& listings,
                                                   const std::vector<std::string>& names) {
  std::map<std::string_view, Gathered> tensors;
  std::vector<std::vector<std::size_t>> chosen(listings.size());
  for (std::size_t rank = 0; rank < listings.size(); ++rank) {
    for (std::size_t i = 0; i < listings[rank].size(); ++i) {
      const ListedPart& part = listings[rank][i];
      Gathered& known = tensors[part.name];
      if (known.first == nullptr) {
        known.first = &part;
        known.rank = rank;
      }
      if (known.first != &part && are_declared_replicas(*known.first, part)) continue;
      check_same_tensor(known, part, names[known.rank], names[rank]);
      if (known.boxes.insert(part.box).second) chosen[rank].push_back(i);
    }
  }
  for (const auto& [name, known] : tensors) {
    const std::vector<Box> boxes(known.boxes.begin(), known.boxes.end());
    if (const std::string fault = coverage_fault(whole_box(known.first->shape), boxes); !fault.empty())
      throw_invalid("the shards of '{}' do not make up the tensor: {}", name, fault);
  }
  return chosen;
}

Plan::Share share_of(const Listing& listing, std::vector<std::size_t> parts) {
  // Wide dtypes first, so that all data is aligned; then by name.
  std::ranges::sort(parts, [&](std::size_t a, std::size_t b) {
    const ListedPart &x = listing[a], &y = listing[b];
    return std::make_pair(bits_of(y.type), std::string_view(x.name)) <
           std::make_pair(bits_of(x.type), std::string_view(y.name));
  });
  Plan::Share share;
  for (const std::size_t i : parts) {
    const ListedPart& part = listing[i];
    share.entries.push_back({key_of(part), part.type, part.box.size});
  }
  share.entries = encode_header(std::move(share.entries), {}).header.entries;
  share.parts = std::move(parts);
  return share;
}

}  // namespace

const Plan::Share* Plan::own_share(std::size_t rank) const {
  for (const Share& share : shares) {
    if (share.rank == rank && share.owner.empty()) return &share;
  }
  return nullptr;
}

Plan make_plan(const std::vector<Listing>& listings, const std::vector<std::string>& names) {
  const std::vector<std::vector<std::size_t>> chosen = choose_parts(listings, names);
  Plan plan;
  for (std::size_t rank = 0; rank < listings.size(); ++rank) {
    std::map<std::string, std::vector<std::size_t>> by_owner;
    for (const std::size_t i : chosen[rank]) by_owner[listings[rank][i].owner].push_back(i);
    for (auto& [owner, parts] : by_owner) {
      Plan::Share share = share_of(listings[rank], std::move(parts));
      share.rank = rank;
      share.owner = owner;
      plan.shares.push_back(std::move(share));
    }
  }
  for (std::size_t i = 0; i < plan.shares.size(); ++i)
    plan.shares[i].file = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, plan.shares.size());
  return plan;
}

Bytes encode_report(const FileReport& report) {
  ByteWriter out;
  out.put(report.file.bytes);
  out.put(report.file.head_bytes);
  out.put(report.file.head_checksum);
  out.put(static_cast<std::uint32_t>(report.checksums.size()));
  for (const std::uint64_t checksum : report.checksums) out.put(checksum);
  return out.take();
}

FileReport decode_report(ByteReader& in) {
  FileReport report;
  report.file.bytes = in.get<std::uint64_t>();
  report.file.head_bytes = in.get<std::uint64_t>();
  report.file.head_checksum = in.get<std::uint64_t>();
  report.checksums.resize(in.get_count(sizeof(std::uint64_t)));
  for (std::uint64_t& checksum : report.checksums) checksum = in.get<std::uint64_t>();
  return report;
}

void fill_manifest(Manifest& manifest, const std::vector<Listing>& listings, const Plan& plan,
                   const std::vector<FileReport>& reports) {
  for (std::size_t s = 0; s < plan.shares.size(); ++s) {
    const Plan::Share& share = plan.shares[s];
    manifest.files[share.file] = reports[s].file;
    for (std::size_t i = 0; i < share.parts.size(); ++i) {
      const ListedPart& part = listings[share.rank][share.parts[i]];
      SavedTensor& tensor = manifest.tensors[part.name];
      tensor.type = part.type;
      tensor.shape = part.shape;
      tensor.boxes.push_back(
          {part.box, share.file, share.entries[i].name, share.entries[i].begin, reports[s].checksums.at(i)});
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
