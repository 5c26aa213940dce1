#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
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

/// A list of ranks, as runs with constant steps ("0 to 4095", "0, 8, 16 …"): regular lists are short, however
/// many ranks they have. Equal lists that were made from ranks have equal runs.
class Ranks {
 public:
  struct Run {
    int first = 0;
    int step = 0;  ///< 0: one rank
    std::size_t count = 1;
    friend auto operator<=>(const Run&, const Run&) = default;  // NOLINT(modernize-use-nullptr)
  };
  Ranks() = default;
  Ranks(const std::vector<int>& list);     // NOLINT(google-explicit-constructor)
  Ranks(std::initializer_list<int> list);  // NOLINT(google-explicit-constructor)

  std::size_t size() const { return size_; }
  std::vector<int> list() const;
  /// For ascending lists.
  bool contains(int rank) const;
  friend auto operator<=>(const Ranks&, const Ranks&) = default;

  void encode(ByteWriter& writer) const;
  static Ranks decode(ByteReader& reader);

 private:
  void add(Run run);

  std::size_t size_ = 0;
  std::vector<Run> runs_;
};

/// Repeated numbers take two numbers.
void put_repeated(ByteWriter& writer, std::span<const std::uint32_t> numbers);
std::vector<std::uint32_t> get_repeated(ByteReader& reader);

/// Members: of each, the fields in which it differs from the one before. Fields that a newer version added are
/// skipped.
void put_members(ByteWriter& writer, std::span<const Member> members);
std::vector<Member> get_members(ByteReader& reader);

}  // namespace torchspan::rendezvous
