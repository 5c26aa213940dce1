#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>

namespace torchspan::launch {

/// Quotes a text; bytes that are not UTF-8 become replacement characters.
std::string json_string(const std::string& text);
/// Microseconds with three decimals: exact, which a double is not.
std::string json_microseconds(std::int64_t nanoseconds);

/// Writes the events of Chrome's JSON format one after another. The process of an event is a rank.
class JsonEvents {
 public:
  explicit JsonEvents(std::ostream& out) : out_(out) {}

  void add(const std::string& event);
  void add_metadata(int rank, int thread, const char* name, const std::string& arguments);
  /// `arguments` are the members of an object.
  void add_slice(int rank, int thread, std::int64_t begin, std::int64_t end, const std::string& category,
                 const std::string& name, const std::string& arguments);
  /// The same as a pair of asynchronous events, which may overlap others.
  void add_overlapping(int rank, std::int64_t begin, std::int64_t end, const std::string& category,
                       const std::string& name, const std::string& arguments);
  /// Ends of an arrow, each inside a slice of its row. Every arrow has another id.
  void begin_arrow(int rank, int thread, std::int64_t at);
  void end_arrow(int rank, int thread, std::int64_t at);
  std::uint64_t arrows() const { return arrows_; }

 private:
  void add_arrow_end(const char* phase, int rank, int thread, std::int64_t at, const char* more);

  std::ostream& out_;
  bool first_ = true;
  std::uint64_t overlapping_ = 0;
  std::uint64_t arrows_ = 0;
};

}  // namespace torchspan::launch
