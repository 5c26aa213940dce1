#include "launch/supervisor/prepare.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <netinet/in.h>
#include <optional>
#include <sched.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/detail/net/secret.h>

#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"
#include "launch/supervisor/limits.h"
#include "launch/supervisor/processes.h"
#include "launch/watch/running_job.h"
#include "rendezvous/api/environment.h"

namespace torchspan::launch {
namespace {

using rendezvous::Environment;

constexpr int kMostNodes = 65536;
constexpr std::uint16_t kDefaultPort = 29500;

int read_count(const std::string& text, const char* option, int least, int most) {
  const auto number = parse_number<int>(text);
  if (number && *number >= least && *number <= most) return *number;
  throw_invalid("{} {}: expected a number from {} to {}", option, text, least, most);
}

void read_rdzv(const std::string& text, NodePlace& place) {
  const std::size_t bracket = text.rfind(']'), colon = text.rfind(':');
  const bool has_port = colon != std::string::npos && (bracket == std::string::npos || colon > bracket) &&
                        (bracket != std::string::npos || text.find(':') == colon);
  place.rdzv_host = has_port ? text.substr(0, colon) : text;
  if (place.rdzv_host.starts_with('[') && place.rdzv_host.ends_with(']')) {
    place.rdzv_host = place.rdzv_host.substr(1, place.rdzv_host.size() - 2);
  }
  place.rdzv_port =
      has_port ? static_cast<std::uint16_t>(read_count(text.substr(colon + 1), "--rdzv port", 1, 65535))
               : kDefaultPort;
  if (place.rdzv_host.empty()) {
    throw_invalid("--rdzv {}: expected HOST or HOST:PORT, an address of the host with node rank 0", text);
  }
}

/// Throws if the workers could not read the job's secret.
void check_secret(const Environment& environment) {
  if (!value_of(environment, "TORCHSPAN_CERTIFICATE_FILE").empty()) return;
  const std::string named = value_of(environment, "TORCHSPAN_SECRET_FILE");
  try {
    net::Secret::from_file(named.empty() ? value_of(environment, "HOME") + "/.torchspan/secret" : named);
  } catch (const Error& error) {
    throw_invalid("--nnodes needs the job's secret, the same file on every host: {}", error.message());
  }
}

/// The options, with those that are absent from a pod's variables; nullopt if the job has one pod or none.
std::optional<NodeOptions> complete_from_pod(NodeOptions options, const Environment& environment) {
  const std::string pods = value_of(environment, "PET_NNODES");
  if (!options.nodes.empty() || pods.empty() || pods == "1") return std::nullopt;
  options.nodes = pods;
  if (options.node_rank.empty()) options.node_rank = value_of(environment, "PET_NODE_RANK");
  const std::string host = value_of(environment, "PET_MASTER_ADDR");
  const std::string port = value_of(environment, "PET_MASTER_PORT");
  if (options.rdzv.empty() && !host.empty()) {
    const bool bare_ipv6 = std::count(host.begin(), host.end(), ':') > 1 && !host.starts_with('[');
    options.rdzv = (bare_ipv6 ? "[" + host + "]" : host) + (port.empty() ? "" : ":" + port);
  }
  return options;
}

}  // namespace

NodePlace read_node_options(const NodeOptions& options, const Environment& environment) {
  if (const auto completed = complete_from_pod(options, environment)) {
    try {
      return read_node_options(*completed, environment);
    } catch (const Error& error) {
      throw_invalid(
          "{}; the Kubernetes Trainer's PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT give "
          "what these options do not: --nnodes 1 starts a job of this pod alone",
          error.message());
    }
  }
  NodePlace place;
  place.port_range = options.port_range;
  if (!options.nodes.empty()) place.count = read_count(options.nodes, "--nnodes", 1, kMostNodes);
  if (!place.several()) {
    for (const auto& [value, name] :
         {std::pair(options.node_rank, "--node-rank"), std::pair(options.rdzv, "--rdzv"),
          std::pair(options.rdzv_id, "--rdzv-id")}) {
      if (value.empty() || (value == "0" && name == std::string("--node-rank"))) continue;
      throw_invalid("{} {} is for a job on several hosts: add --nnodes", name, value);
    }
    return place;
  }
  if (options.node_rank.empty() || options.rdzv.empty()) {
    throw_invalid(
        "--nnodes needs --node-rank (0 on the first host, 1 on the next, …) and --rdzv HOST:PORT, an address "
        "of the first host that the others can reach");
  }
  place.node_rank = read_count(options.node_rank, "--node-rank", 0, place.count - 1);
  read_rdzv(options.rdzv, place);
  place.job_id =
      options.rdzv_id.empty() ? fmt::format("{}-{}", place.rdzv_host, place.rdzv_port) : options.rdzv_id;
  check_secret(environment);
  return place;
}

void add_node_variables(const NodePlace& place, const Environment& base, int workers, int local_rank,
                        Environment& worker) {
  if (!place.port_range.empty()) worker["TORCHSPAN_PORT_RANGE"] = place.port_range;
  if (!place.several()) return;
  const std::string rank = std::to_string(place.first_rank(workers) + local_rank);
  worker["RANK"] = worker["ROLE_RANK"] = rank;
  worker["WORLD_SIZE"] = worker["ROLE_WORLD_SIZE"] = std::to_string(place.count * workers);
  worker["GROUP_RANK"] = std::to_string(place.node_rank);
  worker["GROUP_WORLD_SIZE"] = std::to_string(place.count);
  worker["MASTER_ADDR"] = place.rdzv_host;
  worker["MASTER_PORT"] = std::to_string(place.rdzv_port);
  worker["TORCHSPAN_RUN_ID"] = worker["TORCHELASTIC_RUN_ID"] = place.job_id;
  if (const auto secret = base.find("TORCHSPAN_SECRET_FILE"); secret != base.end()) {
    worker["TORCHSPAN_SECRET_FILE"] = secret->second;
  } else {
    worker.erase("TORCHSPAN_SECRET_FILE");
  }
}

namespace {

/// Leaves room for the runtime folder's name within the 60 characters that sockets need.
constexpr std::size_t kLongestParent = 38;
constexpr std::uint16_t kFirstPort = 20000;
constexpr std::uint16_t kLastPort = 32000;

bool is_folder(const std::string& path) {
  struct stat about {};
  return stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
}

void check_program(const std::string& path) {
  if (access(path.c_str(), F_OK) != 0) {
    throw_invalid("there is no program '{}': {}", path, std::strerror(errno));
  }
  if (is_folder(path)) throw_invalid("'{}' is a folder, not a program", path);
  if (access(path.c_str(), X_OK) != 0) {
    throw_invalid("'{0}' cannot be executed: {1}; if it is a program, run: chmod +x '{0}'", path,
                  std::strerror(errno));
  }
}

}  // namespace

int chosen_threads(const Environment& base, const JobSetting& setting) {
  if (base.contains("OMP_NUM_THREADS") || setting.extra.contains("OMP_NUM_THREADS")) return 0;
  return std::max(1, setting.cores / std::max(1, setting.workers));
}

std::string error_file_of(const JobSetting& setting, int rank, int incarnation) {
  return incarnation == 0 ? fmt::format("{}/rank{}.json", setting.error_folder, rank)
                          : fmt::format("{}/rank{}.{}.json", setting.error_folder, rank, incarnation);
}

std::string mark_of(const JobSetting& setting, int rank) {
  return fmt::format("{}/{}", setting.run_id, rank);
}

namespace {

/// The variables that torchrun sets besides rank and world size.
void add_torchrun_variables(const JobSetting& setting, int rank, Environment& environment) {
  const std::string size = std::to_string(setting.workers);
  environment["GROUP_RANK"] = "0";
  environment["GROUP_WORLD_SIZE"] = "1";
  environment["ROLE_NAME"] = "default";
  environment["ROLE_RANK"] = std::to_string(rank);
  environment["ROLE_WORLD_SIZE"] = size;
  environment["TORCHELASTIC_RUN_ID"] = setting.run_id;
  environment["TORCHELASTIC_RESTART_COUNT"] = std::to_string(setting.restart_count);
  environment["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(setting.max_restarts);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "False";
}

}  // namespace

Environment worker_environment(const Environment& base, const JobSetting& setting, int rank,
                               int incarnation) {
  Environment environment = base;
  std::erase_if(environment, [](const auto& entry) { return entry.first.starts_with("TORCHELASTIC_"); });
  const std::string size = std::to_string(setting.workers);
  environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = size;
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(setting.master_port);
  environment["TORCHSPAN_NAME"] = setting.name_prefix + std::to_string(setting.rank_of(rank));
  environment["TORCHSPAN_RUN_ID"] = setting.run_id;
  environment["TORCHSPAN_RESTART_COUNT"] = std::to_string(setting.restart_count);
  if (setting.preempt_signal != 0) {
    environment["TORCHSPAN_PREEMPT_SIGNAL"] = std::to_string(setting.preempt_signal);
  }
  environment["TORCHSPAN_REPLACEMENT_COUNT"] = std::to_string(incarnation);
  add_torchrun_variables(setting, rank, environment);
  if (!setting.error_folder.empty()) {
    environment["TORCHELASTIC_ERROR_FILE"] = error_file_of(setting, rank, incarnation);
  }
  environment["TORCHSPAN_SECRET_FILE"] = setting.secret_file;
  environment["TORCHSPAN_RUNTIME_DIR"] = setting.runtime_folder;
  if (const int threads = chosen_threads(base, setting); threads > 0) {
    environment["OMP_NUM_THREADS"] = std::to_string(threads);
  }
  add_node_variables(setting.nodes, base, setting.workers, rank, environment);
  for (const auto& [name, value] : setting.extra) environment[name] = value;
  const std::string outer = value_of(base, kJobsVariable);
  const std::string ids = setting.run_id + ":" + mark_of(setting, rank);
  environment[kJobsVariable] = outer.empty() ? ids : outer + ":" + ids;
  return environment;
}

std::string find_program(const std::string& name, const Environment& environment) {
  if (name.empty()) throw_invalid("the program's name is empty");
  if (name.find('/') != std::string::npos) {
    check_program(name);
    return name;
  }
  std::string rest = value_of(environment, "PATH");
  if (rest.empty()) rest = "/usr/local/bin:/usr/bin:/bin";
  const std::string searched = rest;
  while (!rest.empty()) {
    const std::string folder = rest.substr(0, rest.find(':'));
    rest.erase(0, std::min(rest.size(), folder.size() + 1));
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (access(path.c_str(), X_OK) == 0 && !is_folder(path)) return path;
  }
  if (access(name.c_str(), X_OK) == 0) {
    throw_invalid("there is no program '{0}' in PATH; to run the one in this folder, use ./{0}", name);
  }
  throw_invalid("there is no program '{}' in PATH ({})", name, searched);
}

void check_port(std::uint16_t port) {
  if (ReservedPort::is_free(port, INADDR_LOOPBACK)) return;
  throw_invalid(
      "port {0} is in use ('ss -ltnp sport = :{0}' shows the process); choose another --master-port, or none "
      "for a free one",
      port);
}

ReservedPort choose_port() {
  auto port = ReservedPort::draw(kFirstPort, kLastPort, INADDR_LOOPBACK);
  if (port) return std::move(*port);
  throw_invalid("no free port was found between {} and {}; choose one with --master-port", kFirstPort,
                kLastPort);
}

net::PortRange read_port_range(const std::string& range) {
  if (range.empty()) return {};
  if (const auto ports = rendezvous::parse_port_range(range)) return *ports;
  throw_invalid("--port-range {}: expected two ports from 1 to 65535, FIRST-LAST", range);
}

ReservedPort choose_store_port(const std::string& range) {
  const net::PortRange ports = read_port_range(range);
  std::optional<ReservedPort> port;
  if (range.empty()) port = ReservedPort::draw(kFirstPort, kLastPort, INADDR_ANY);
  for (int number = ports.last; !port && !range.empty() && number >= ports.first; --number) {
    port = ReservedPort::take(static_cast<std::uint16_t>(number));
    if (port && !ReservedPort::is_free(port->number(), INADDR_ANY)) port.reset();
  }
  if (port) return std::move(*port);
  throw_invalid("no port {} is free for the workers' store; give another --port-range",
                range.empty() ? fmt::format("from {} to {}", kFirstPort, kLastPort) : "of " + range);
}

int usable_cores() {
  cpu_set_t affinity;
  const int cores = sched_getaffinity(0, sizeof affinity, &affinity) == 0
                        ? CPU_COUNT(&affinity)
                        : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, std::min(cores, read_cpu_quota().value_or(cores)));
}

namespace {

/// Locks a folder for this process; null if another process holds the lock or the folder belongs to another
/// user.
Descriptor lock_folder(const std::string& path) {
  Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat opened {
  }, named{};
  if (!folder || flock(folder.get(), LOCK_EX | LOCK_NB) != 0 || fstat(folder.get(), &opened) != 0 ||
      lstat(path.c_str(), &named) != 0 || opened.st_ino != named.st_ino || opened.st_uid != geteuid()) {
    return {};
  }
  return folder;
}

/// Whether a folder with a job folder's name contains only what a job folder contains.
bool is_job_folder(const std::string& path) {
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator(path, failure)) {
    const std::string name = entry.path().filename().string();
    // A launcher that was killed while it wrote the secret has left "secret." and a suffix.
    if (name != "secret" && !name.starts_with("secret.") && name != "run" && name != "errors") return false;
  }
  return !failure;
}

/// Removes the folders of launchers that were killed: their locks ended with them.
void remove_abandoned_folders(const std::string& parent) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
    const std::string path = entry.path().string();
    if (!is_job_name(entry.path().filename().string())) continue;
    if (const Descriptor lock = lock_folder(path); lock && is_job_folder(path)) {
      std::filesystem::remove_all(path, ignored);
    }
  }
}

}  // namespace

void JobFolder::make_locked(const std::string& parent) {
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts && !lock_; ++attempt) {
    path_ = fmt::format("{}/{}XXXXXX", parent, kJobPrefix);
    if (mkdtemp(path_.data()) == nullptr) break;
    lock_ = lock_folder(path_);  // fails if another launcher just removed it as abandoned
  }
  if (lock_) return;
  throw_invalid("the job's folder cannot be created in '{}': {}; set TMPDIR to a folder with room", parent,
                std::strerror(errno));
}

JobFolder::JobFolder(const Environment& environment) {
  std::string parent = "/tmp";
  for (const char* name : {"XDG_RUNTIME_DIR", "TMPDIR"}) {
    const std::string path = value_of(environment, name);
    // Workers may change their folder, so a relative path would not lead them to the job's.
    if (path.starts_with('/') && path.size() <= kLongestParent && is_folder(path) &&
        access(path.c_str(), W_OK) == 0) {
      parent = path;
      break;
    }
  }
  remove_abandoned_folders(parent);
  make_locked(parent);
  try {
    net::Secret::random().write_file(secret_file());
    for (const std::string& folder : {runtime_folder(), error_folder()}) {
      if (mkdir(folder.c_str(), 0700) != 0) {
        throw_invalid("folder '{}' cannot be created: {}", folder, std::strerror(errno));
      }
    }
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
    throw;
  }
}

JobFolder::~JobFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace torchspan::launch
