#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/source_location.h>

#include "rpc/references/reference_states.h"

namespace torchspan::rpc {

/// Names the blob with the call site of a creation's request.
inline constexpr const char* kSiteBlob = "rpc.site";
/// Encodes the call site of a creation for its request; empty if the site is not known.
Bytes encode_site(const SourceLocation& site);

/// Stores names of types and source files, of this program and of other workers', for lists of references.
/// Thread-safe.
class ProgramNames {
 public:
  void add_type(std::uint64_t tag, const std::string& name);
  /// Adds a name from another worker; ignores it if it does not match its tag.
  void check_and_add_type(std::uint64_t tag, const std::string& name);
  bool knows_type(std::uint64_t tag) const;
  std::unordered_map<std::uint64_t, std::string> types() const;
  /// Sets file and line from what encode_site() wrote; the file name lives as long as this object. Throws
  /// Error{kInvalid} if it is malformed.
  void read_site(BytesView site, Origin& origin);

 private:
  mutable Mutex mutex_;
  std::unordered_map<std::uint64_t, std::string> types_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by tag
  std::set<std::string> files_ TORCHSPAN_GUARDED_BY(mutex_);  ///< of other workers' programs
};

}  // namespace torchspan::rpc
