#include "core/api/timeout_notice.h"

#include <cstdlib>
#include <fcntl.h>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

#include "core/api/json_fields.h"
#include "core/api/parse_number.h"

namespace torchspan {

int launcher_pipe() {
  const char* text = std::getenv("TORCHSPAN_PROGRESS_FD");
  if (text == nullptr) return -1;
  const int descriptor = parse_number<int>(text).value_or(-1);
  struct stat status {};
  const bool is_pipe = descriptor > 2 && fstat(descriptor, &status) == 0 && S_ISFIFO(status.st_mode);
  if (!is_pipe) return -1;
  fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return descriptor;
}

namespace {

using nlohmann::json;

constexpr std::string_view kTimeoutPrefix = "torchspan-timeout 1 ";
constexpr double kLeastSeconds = 1;

}  // namespace

std::string encode_timeout(const TimeoutNotice& notice) {
  // A byte takes at most six characters of JSON, and the whole line must fit into one write to a pipe.
  constexpr std::size_t kLongestName = 100, kLongestDetail = 180;
  const json fields = {{"kind", notice.kind.substr(0, 20)},
                       {"name", notice.name.substr(0, kLongestName)},
                       {"peer", notice.peer.substr(0, kLongestName)},
                       {"site", notice.site.substr(0, kLongestName)},
                       {"detail", notice.detail.substr(0, kLongestDetail)},
                       {"seconds", notice.seconds},
                       {"id", notice.id},
                       {"part", notice.part}};
  return std::string(kTimeoutPrefix) + fields.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
}

std::optional<TimeoutNotice> decode_timeout(std::string_view line) {
  if (!line.starts_with(kTimeoutPrefix)) return std::nullopt;
  const json fields = json::parse(line.substr(kTimeoutPrefix.size()), nullptr, false);
  if (!fields.is_object()) return std::nullopt;
  TimeoutNotice notice;
  notice.kind = json_field<std::string>(fields, "kind").value_or("");
  notice.name = json_field<std::string>(fields, "name").value_or("");
  notice.peer = json_field<std::string>(fields, "peer").value_or("");
  notice.site = json_field<std::string>(fields, "site").value_or("");
  notice.detail = json_field<std::string>(fields, "detail").value_or("");
  notice.seconds = json_field<double>(fields, "seconds").value_or(notice.seconds);
  notice.id = json_field<std::uint64_t>(fields, "id").value_or(0);
  notice.part = json_field<int>(fields, "part").value_or(-1);
  return notice;
}

void report_timeout(const TimeoutNotice& notice) {
  if (notice.seconds < kLeastSeconds) return;
  const int descriptor = launcher_pipe();
  if (descriptor < 0) return;
  const std::string line = encode_timeout(notice);
  [[maybe_unused]] const auto written = write(descriptor, line.data(), line.size());
}

}  // namespace torchspan
