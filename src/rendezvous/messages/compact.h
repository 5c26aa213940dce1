#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/rendezvous/membership.h>

/// Encodings of what grows with the world: ranks, incarnations and members. Regular lists take few bytes. All
/// decoders are total; a list that they return has at most kMaxWorkers elements.
namespace torchspan::rendezvous {

inline constexpr int kMaxWorkers = 1 << 20;

/// LEB128, at most ten bytes.
void put_number(ByteWriter& writer, std::uint64_t number);
std::uint64_t get_number(ByteReader& reader);

/// Throws kInvalid for a rank that no world can have.
int checked_rank(std::int64_t rank);

/// Ranks with constant steps ("0 to 4095", "0, 8, 16 …") take three numbers.
void put_ranks(ByteWriter& writer, std::span<const int> ranks);
std::vector<int> get_ranks(ByteReader& reader);

/// Repeated numbers take two numbers.
void put_repeated(ByteWriter& writer, std::span<const std::uint32_t> numbers);
std::vector<std::uint32_t> get_repeated(ByteReader& reader);

/// Members: of each, the fields in which it differs from the one before.
void put_members(ByteWriter& writer, std::span<const Member> members);
std::vector<Member> get_members(ByteReader& reader);

}  // namespace torchspan::rendezvous
