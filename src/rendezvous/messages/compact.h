#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/rendezvous/membership.h>

/// Encodings of the fields of messages. Those of what grows with the world, which are ranks, incarnations and members,
/// take few bytes for regular lists; such a list has at most kMaxWorkers elements. All decoders are total.
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

/// Writes or reads a list as u32 count and elements, each at least `least_size` bytes.
template <class T, class Put>
void put_list(ByteWriter& writer, const std::vector<T>& list, Put put) {
  writer.put(static_cast<std::uint32_t>(list.size()));
  for (const T& element : list) put(element);
}
template <class Get>
auto get_list(ByteReader& reader, std::size_t least_size, Get get) {
  std::vector<decltype(get())> list;
  const std::size_t count = reader.get_count(least_size);
  list.reserve(count);
  for (std::size_t i = 0; i < count; ++i) list.push_back(get());
  return list;
}

/// Writes or reads one field. Numbers have their full width, other lists than the above a u32 count.
template <FixedWidth T>
void put(ByteWriter& writer, T number) {
  writer.put(number);
}
template <FixedWidth T>
void get(ByteReader& reader, T& number) {
  number = reader.get<T>();
}
void get(ByteReader& reader, ErrorKind& kind);
inline void put(ByteWriter& writer, const std::string& text) { writer.put_string(text); }
inline void get(ByteReader& reader, std::string& text) { text = reader.get_string(); }
void put(ByteWriter& writer, const Bytes& bytes);
void get(ByteReader& reader, Bytes& bytes);
inline void put(ByteWriter& writer, TimePoint time) {
  writer.put(std::int64_t{time.time_since_epoch().count()});
}
inline void get(ByteReader& reader, TimePoint& time) {
  time = TimePoint(Duration(reader.get<std::int64_t>()));
}
/// A timeout: not negative, at most a year, or Duration::max().
inline void put(ByteWriter& writer, Duration duration) { writer.put(std::int64_t{duration.count()}); }
void get(ByteReader& reader, Duration& duration);
inline void put(ByteWriter& writer, const ProtocolRange& range) { put_range(writer, range); }
inline void get(ByteReader& reader, ProtocolRange& range) { range = get_range(reader); }
inline void put(ByteWriter& writer, const Ranks& ranks) { ranks.encode(writer); }
inline void get(ByteReader& reader, Ranks& ranks) { ranks = Ranks::decode(reader); }
inline void put(ByteWriter& writer, const std::vector<int>& ranks) { Ranks(ranks).encode(writer); }
inline void get(ByteReader& reader, std::vector<int>& ranks) { ranks = Ranks::decode(reader).list(); }
inline void put(ByteWriter& writer, const std::vector<std::uint32_t>& incarnations) {
  put_repeated(writer, incarnations);
}
inline void get(ByteReader& reader, std::vector<std::uint32_t>& incarnations) {
  incarnations = get_repeated(reader);
}
/// One member, in full; see put_members().
void put(ByteWriter& writer, const Member& member);
void get(ByteReader& reader, Member& member);
inline void put(ByteWriter& writer, const std::vector<Member>& members) { put_members(writer, members); }
inline void get(ByteReader& reader, std::vector<Member>& members) { members = get_members(reader); }
template <class T>
void put(ByteWriter& writer, const std::vector<T>& list) {
  put_list(writer, list, [&](const T& element) { put(writer, element); });
}
template <class T>
void get(ByteReader& reader, std::vector<T>& list) {
  constexpr std::size_t kLeastSize = std::is_same_v<T, std::string>     ? 4
                                     : std::is_same_v<T, std::uint64_t> ? 8
                                                                        : 2;
  list = get_list(reader, kLeastSize, [&] {
    T element;
    get(reader, element);
    return element;
  });
}

/// Writes or reads a tuple of references to fields.
template <class... Fields>
void put_all(ByteWriter& writer, const std::tuple<Fields...>& fields) {
  std::apply([&](const auto&... field) { (put(writer, field), ...); }, fields);
}
template <class... Fields>
void get_all(ByteReader& reader, const std::tuple<Fields...>& fields) {
  std::apply([&](auto&... field) { (get(reader, field), ...); }, fields);
}

}  // namespace torchspan::rendezvous
