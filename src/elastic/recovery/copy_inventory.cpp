#include "elastic/recovery/copy_inventory.h"

#include <algorithm>

namespace torchspan::elastic {
namespace {

void put_ids(ByteWriter& out, const std::vector<CopyId>& ids) {
  out.put(static_cast<std::uint32_t>(ids.size()));
  for (const CopyId& id : ids) {
    out.put(id.step);
    out.put(id.round);
  }
}

std::vector<CopyId> get_ids(ByteReader& in) {
  std::vector<CopyId> ids(in.get_count(sizeof(std::int64_t) + sizeof(std::uint64_t)));
  for (CopyId& id : ids) {
    id.step = in.get<std::int64_t>();
    id.round = in.get<std::uint64_t>();
  }
  return ids;
}

bool contains(const std::vector<CopyId>& ids, const CopyId& id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Bytes CopyInventory::encode() const {
  ByteWriter out;
  put_ids(out, own);
  put_ids(out, held);
  out.put(newest_checkpoint);
  out.put(round);
  return out.take();
}

CopyInventory CopyInventory::decode(BytesView bytes) {
  ByteReader in(bytes);
  CopyInventory inventory;
  inventory.own = get_ids(in);
  inventory.held = get_ids(in);
  inventory.newest_checkpoint = in.get<std::int64_t>();
  inventory.round = in.get<std::uint64_t>();
  in.expect_end();
  return inventory;
}

std::optional<CopyId> newest_complete(const std::vector<CopyInventory>& ranks) {
  std::optional<CopyId> newest;
  if (ranks.empty()) return newest;
  // A complete copy of rank 0 is at rank 0 or at rank 1.
  std::vector<CopyId> candidates = ranks[0].own;
  const std::vector<CopyId>& held = ranks[1 % ranks.size()].held;
  candidates.insert(candidates.end(), held.begin(), held.end());
  for (const CopyId& id : candidates) {
    bool complete = true;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      complete =
          complete && (contains(ranks[rank].own, id) || contains(ranks[(rank + 1) % ranks.size()].held, id));
    if (complete && (!newest || *newest < id)) newest = id;
  }
  return newest;
}

}  // namespace torchspan::elastic
