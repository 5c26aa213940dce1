#include "rendezvous/api/environment.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fmt/format.h>
#include <optional>
#include <string_view>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rendezvous.h>

#include "core/api/hashes.h"
#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"
#include "rendezvous/environment/slurm.h"
#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {
namespace {

constexpr std::size_t kMostCharacters = 127;

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
         c == ':' || c == '-';
}

}  // namespace

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= kMostCharacters &&
         std::all_of(name.begin(), name.end(), is_name_character);
}

void check_name(std::string_view name, std::string_view what) {
  if (is_name(name)) return;
  const bool shortened = name.size() > kMostCharacters;
  throw_invalid("{} is '{}'{}; expected 1 to {} of the characters A-Z a-z 0-9 _ . : -", what,
                name.substr(0, 40), shortened ? fmt::format("… ({} characters)", name.size()) : "",
                kMostCharacters);
}

namespace {

constexpr std::uint16_t kFirstDerivedPort = 20000;
constexpr std::uint64_t kDerivedPorts = 10000;

/// Typed access to the variables; an empty value counts as not set.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const {
    const auto found = environment_.find(name);
    if (found == environment_.end() || found->second.empty()) return std::nullopt;
    return found->second;
  }
  std::string text_or(const std::string& name, std::string fallback) const {
    return text(name).value_or(std::move(fallback));
  }
  /// The first of `names` that is set.
  std::optional<std::string> first(const std::vector<std::string>& names) const {
    for (const auto& name : names) {
      if (auto value = text(name)) return value;
    }
    return std::nullopt;
  }
  std::optional<std::int64_t> integer(const std::string& name, std::int64_t least, std::int64_t most) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto number = parse_number<std::int64_t>(*value);
    if (!number || *number < least || *number > most)
      throw_invalid("{} is '{}'; expected a whole number from {} to {}", name, *value, least, most);
    return number;
  }
  std::optional<int> count(const std::string& name) const { return narrow(integer(name, 1, kMaxWorkers)); }
  std::optional<int> index(const std::string& name) const {
    return narrow(integer(name, 0, kMaxWorkers - 1));
  }

 private:
  static std::optional<int> narrow(std::optional<std::int64_t> number) {
    if (!number) return std::nullopt;
    return static_cast<int>(*number);
  }
  const Environment& environment_;
};

/// The names of the variables in which one launcher passes rank and world size.
struct Convention {
  Launcher launcher;
  std::string rank, size, local_rank, local_size;
};

const std::vector<Convention>& conventions() {
  static const std::vector<Convention> all = {
      {Launcher::kExplicit, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
      {Launcher::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {Launcher::kPmi, "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"},
      {Launcher::kSlurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""},
      {Launcher::kKubernetes, "PET_NODE_RANK", "PET_NNODES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
  };
  return all;
}

/// A shell inside an allocation has Slurm's variables, but is not a task of srun. It may be the only task of its step,
/// or the one that `srun --pty bash` connects to the terminal; other steps run programs, under the name of the job in
/// which srun starts them.
bool is_slurm_task(const Variables& variables) {
  const std::string job = variables.text_or("SLURM_JOB_NAME", "");
  if (job != "bash" && job != "interactive") return true;
  const bool is_terminal = variables.text("SLURM_PTY_PORT") && variables.text_or("SLURM_STEP_ID", "0") == "0";
  return variables.count("SLURM_STEP_NUM_TASKS").value_or(1) > 1 && !is_terminal;
}

/// sbatch starts its script once, with the variables of rank 0 but without those of a step of srun.
void refuse_batch_script(const Variables& variables) {
  constexpr std::int64_t kLastStep = 0xffffffef;  // larger numbers mean batch scripts and similar steps
  constexpr std::int64_t kMostSteps = std::int64_t{1} << 40;
  const bool step = variables.integer("SLURM_STEP_ID", 0, kMostSteps).value_or(kMostSteps) <= kLastStep ||
                    variables.first({"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"});
  if (step || variables.index("SLURM_PROCID").value_or(0) != 0) return;
  const int size = variables.count("SLURM_NTASKS").value_or(1);
  if (size == 1) return;
  throw_invalid(
      "this process runs in the batch script of Slurm job {}, where it is the only one, and not as one of "
      "the job's {} tasks (SLURM_NTASKS); in the script, start the program with srun: srun ./program",
      variables.text_or("SLURM_JOB_ID", "?"), size);
}

/// The Kubernetes Trainer describes pods; only if each has one worker does that describe workers, too.
void refuse_many_per_pod(const Variables& variables) {
  const std::string per_pod = variables.text_or("PET_NPROC_PER_NODE", "1");
  if (per_pod == "1") return;
  throw_invalid(
      "PET_NPROC_PER_NODE is {}, but this process was started without RANK, as the only one of its pod; "
      "start the program with torchrun --no-python, which reads the PET variables, or set numProcPerNode to "
      "1",
      per_pod);
}

/// With Slurm's plugin pmi2, srun sets PMI_RANK and PMI_SIZE too, but only Slurm's own variables contain local ranks
/// and hosts.
bool is_pmi_of_slurm(const Variables& variables) {
  return !variables.first({"PMI_LOCAL_RANK", "MPI_LOCALRANKID"}) &&
         variables.text("PMI_RANK") == variables.text("SLURM_PROCID") &&
         variables.text("PMI_SIZE") == variables.text("SLURM_STEP_NUM_TASKS");
}

/// The launcher's convention whose variables are set, with the other spellings of Slurm and Intel filled in.
std::optional<Convention> find_convention(const Variables& variables) {
  for (Convention convention : conventions()) {
    if (!variables.text(convention.rank)) continue;
    if (convention.launcher == Launcher::kPmi && is_pmi_of_slurm(variables)) continue;
    if (convention.launcher == Launcher::kSlurm) {
      if (!is_slurm_task(variables)) continue;
      refuse_batch_script(variables);
      if (variables.text("SLURM_STEP_NUM_TASKS")) convention.size = "SLURM_STEP_NUM_TASKS";
    }
    if (convention.launcher == Launcher::kKubernetes) refuse_many_per_pod(variables);
    if (convention.launcher == Launcher::kPmi && variables.text("MPI_LOCALRANKID")) {
      convention.local_rank = "MPI_LOCALRANKID";
      convention.local_size = "MPI_LOCALNRANKS";
    }
    return convention;
  }
  return std::nullopt;
}

void read_ranks(const Variables& variables, const Convention& convention, WorkerEnvironment& worker) {
  worker.launcher = convention.launcher;
  worker.rank = *variables.index(convention.rank);
  const auto size = variables.count(convention.size);
  if (!size) {
    throw_invalid("{} is {} but {} is not set; set both, to this worker's rank and the number of workers",
                  convention.rank, worker.rank, convention.size);
  }
  worker.world_size = *size;
  if (worker.rank >= worker.world_size) {
    throw_invalid("{} is {} but {} is {}; ranks go from 0 to {}", convention.rank, worker.rank,
                  convention.size, worker.world_size, worker.world_size - 1);
  }
  const auto said = variables.count("WORLD_SIZE");
  if (said && *said != worker.world_size) {
    throw_invalid("WORLD_SIZE is {} but {} is {}; unset WORLD_SIZE, or set RANK and WORLD_SIZE both", *said,
                  convention.size, worker.world_size);
  }
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

/// Reads the local rank and the local world size. If the launcher sets neither, a loopback master means that
/// all workers are on one host; any other master means one worker per host.
void read_local_ranks(const Variables& variables, const Convention& convention, WorkerEnvironment& worker) {
  std::optional<int> size;
  std::string size_name = convention.local_size;
  if (convention.launcher == Launcher::kSlurm) {
    size_name =
        variables.text("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
    if (const auto list = variables.text(size_name)) {
      size = slurm_tasks_of_node(*list, variables.index("SLURM_NODEID").value_or(0), size_name);
    }
  } else {
    size = variables.count(size_name);
  }
  const auto rank = variables.index(convention.local_rank);
  const bool here = is_loopback(variables.text_or("MASTER_ADDR", ""));
  worker.local_world_size = size.value_or(here ? worker.world_size : 1);
  worker.local_rank = rank.value_or(worker.one_host() ? worker.rank : 0);
  if (worker.local_world_size > worker.world_size) {
    throw_invalid("{} is {}, more than the whole world ({} is {})", size_name, worker.local_world_size,
                  convention.size, worker.world_size);
  }
  if (!size && rank && *rank >= worker.local_world_size) {
    throw_invalid("{} is {} but {} is not set; set it to the number of workers on this host",
                  convention.local_rank, *rank, size_name);
  }
  if (worker.local_rank >= worker.local_world_size) {
    throw_invalid("{} is {} but {} is {}; local ranks go from 0 to {}", convention.local_rank,
                  worker.local_rank, size_name, worker.local_world_size, worker.local_world_size - 1);
  }
}

bool is_open_world(const Variables& variables) { return variables.text_or("WORLD_SIZE", "") == "0"; }

/// WORLD_SIZE=0: workers join and leave; a worker without RANK gets one.
void read_open_world(const Variables& variables, WorkerEnvironment& worker) {
  worker.launcher = Launcher::kExplicit;
  worker.world_size = kOpenWorld;
  worker.rank = variables.index("RANK").value_or(kAnyRank);
  worker.local_rank = variables.index("LOCAL_RANK").value_or(std::max(worker.rank, 0));
  worker.local_world_size = is_loopback(variables.text_or("MASTER_ADDR", "")) ? worker.world_size : 1;
  if (worker.rank == kAnyRank && !variables.text("TORCHSPAN_NAME")) {
    throw_invalid(
        "WORLD_SIZE is 0, an open world, and neither RANK nor TORCHSPAN_NAME is set; give this worker a "
        "rank, or a unique name to get the next free rank");
  }
}

/// A port below the system's range for outgoing connections, computed from a hash that differs between jobs.
std::uint16_t derived_port(std::uint64_t key) {
  return static_cast<std::uint16_t>(kFirstDerivedPort + key % kDerivedPorts);
}

std::optional<std::uint16_t> port_of_job(const Variables& variables, Launcher launcher) {
  if (launcher == Launcher::kSlurm) {
    const auto job = variables.integer("SLURM_JOB_ID", 0, std::int64_t{1} << 40);
    const auto step = variables.integer("SLURM_STEP_ID", 0, std::int64_t{1} << 40);
    if (job) return derived_port(static_cast<std::uint64_t>(*job + step.value_or(0)));
  }
  if (launcher == Launcher::kOpenMpi) {
    if (const auto space = variables.text("PMIX_NAMESPACE")) return derived_port(fnv1a(*space));
  }
  if (launcher == Launcher::kPmi) {
    if (const auto job = variables.first({"PMI_JOBID", "SLURM_JOB_ID"})) {
      return derived_port(fnv1a(*job));
    }
  }
  return std::nullopt;
}

std::string slurm_master(const Variables& variables) {
  const auto list = variables.first({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  return list ? first_slurm_host(*list) : std::string();
}

std::string how_to_set_master(Launcher launcher) {
  if (launcher == Launcher::kOpenMpi)
    return "run with: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=…";
  return "set it to the host of rank 0, the same for all workers (127.0.0.1 when all run on one host)";
}

void read_master(const Variables& variables, WorkerEnvironment& worker) {
  const bool alone = worker.world_size == 1;
  const bool loose = worker.launcher != Launcher::kExplicit;
  const bool kubernetes = worker.launcher == Launcher::kKubernetes;
  worker.master_host = variables.text_or("MASTER_ADDR", "");
  if (worker.master_host.empty() && kubernetes) {
    worker.master_host = variables.text_or("PET_MASTER_ADDR", "");
  }
  if (worker.master_host.empty() && worker.launcher == Launcher::kSlurm)
    worker.master_host = slurm_master(variables);
  if (worker.master_host.empty() && (alone || (loose && worker.one_host()))) worker.master_host = "127.0.0.1";
  if (worker.master_host.empty()) {
    throw_invalid("MASTER_ADDR is not set, but this is rank {} of {}; {}", worker.rank, worker.world_size,
                  how_to_set_master(worker.launcher));
  }
  const bool named = kubernetes && !variables.text("MASTER_PORT");
  if (const auto port = variables.integer(named ? "PET_MASTER_PORT" : "MASTER_PORT", 1, 65535)) {
    worker.master_port = static_cast<std::uint16_t>(*port);
  } else if (loose || alone) {
    worker.master_port = port_of_job(variables, worker.launcher).value_or(worker.master_port);
  } else {
    throw_invalid(
        "MASTER_PORT is not set, but this is rank {} of {}; set it to a free port of the host of rank 0, the "
        "same for all workers",
        worker.rank, worker.world_size);
  }
  if (variables.text_or("TORCHELASTIC_USE_AGENT_STORE", "") == "True") {
    if (worker.master_port == 65535) {
      throw_invalid(
          "MASTER_PORT is 65535 and belongs to torchrun's agent, so the store would need the next one; "
          "choose a smaller port");
    }
    ++worker.master_port;
  }
}

void read_secret_place(const Variables& variables, WorkerEnvironment& worker) {
  if (const auto named = variables.text("TORCHSPAN_SECRET_FILE")) {
    worker.secret_file = *named;
    worker.secret_named = true;
  } else if (const auto home = variables.text("HOME")) {
    worker.secret_file = *home + "/.torchspan/secret";
  }
}

/// Reads what workers of several hosts need, too: where to listen, and certificates if there are any.
void read_network(const Variables& variables, WorkerEnvironment& worker) {
  worker.listen_host = variables.text_or("TORCHSPAN_LISTEN_HOST", "");
  const std::pair<const char*, std::string*> files[] = {
      {"TORCHSPAN_CERTIFICATE_FILE", &worker.certificate_file},
      {"TORCHSPAN_KEY_FILE", &worker.key_file},
      {"TORCHSPAN_AUTHORITY_FILE", &worker.authority_file}};
  std::string given, missing;
  for (const auto& [name, file] : files) {
    *file = variables.text_or(name, "");
    (file->empty() ? missing : given) = name;
  }
  if (given.empty() || missing.empty()) return;
  throw_invalid(
      "{} is set but {} is not; certificates need all three: TORCHSPAN_CERTIFICATE_FILE, TORCHSPAN_KEY_FILE "
      "and TORCHSPAN_AUTHORITY_FILE",
      given, missing);
}

/// Each agent of torchrun counts restarts on its own, so only the count of torchspan run is part of the job's id.
void read_job(const Variables& variables, WorkerEnvironment& worker) {
  const bool ours = variables.text("TORCHSPAN_RESTART_COUNT").has_value();
  const char* const count = ours ? "TORCHSPAN_RESTART_COUNT" : "TORCHELASTIC_RESTART_COUNT";
  worker.restart_count = static_cast<int>(variables.integer(count, 0, kMaxWorkers).value_or(0));
  worker.job = variables.first({"TORCHSPAN_RUN_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID"})
                   .value_or("");
  if (ours && worker.restart_count > 0) worker.job += fmt::format("/attempt {}", worker.restart_count);
}

/// TORCHSPAN_NETWORK: the transport between hosts.
void choose_transport(const std::string& name, net::NetworkOptions& network) {
  if (name == "tls") return;
  if (name == "tcp-isolated") {
    network.tls.network = net::TcpNetwork::kIsolated;
  } else if (name == "ucx") {
    network.ucx = net::UcxOptions{.network = net::UcxNetwork::kRdma};
  } else if (name == "ucx-isolated") {
    network.ucx = net::UcxOptions{.network = net::UcxNetwork::kIsolated};
  } else {
    throw_invalid(
        "TORCHSPAN_NETWORK is '{}'; expected tls, tcp-isolated (not encrypted), ucx (RDMA devices only), or "
        "ucx-isolated (TCP too); the isolated ones only on a network that only this job's workers can reach",
        name);
  }
}

net::PortRange read_ports(const std::string& text) {
  if (const auto ports = parse_port_range(text)) return *ports;
  throw_invalid(
      "TORCHSPAN_PORT_RANGE is '{}'; expected two ports from 1 to 65535, the smaller first, such as "
      "29600-29699",
      text);
}

}  // namespace

std::optional<net::PortRange> parse_port_range(std::string_view text) {
  const std::size_t dash = text.find('-');
  const auto first = parse_number<std::uint16_t>(text.substr(0, dash));
  const auto last =
      dash == std::string_view::npos ? first : parse_number<std::uint16_t>(text.substr(dash + 1));
  if (!first || !last || *first == 0 || *last < *first) return std::nullopt;
  return net::PortRange{.first = *first, .last = *last};
}

net::NetworkOptions read_network(const Environment& environment) {
  const Variables variables(environment);
  WorkerEnvironment worker;
  read_network(variables, worker);
  net::NetworkOptions network;
  network.tls.certificate_file = worker.certificate_file;
  network.tls.key_file = worker.key_file;
  network.tls.authority_file = worker.authority_file;
  if (const auto name = variables.text("TORCHSPAN_NETWORK")) choose_transport(*name, network);
  if (const auto ports = variables.text("TORCHSPAN_PORT_RANGE")) network.tls.ports = read_ports(*ports);
  return network;
}

Environment process_environment() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals != std::string_view::npos)
      environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

std::string WorkerEnvironment::store_address() const {
  if (one_host() || master_host == "localhost") return fmt::format("tcp:127.0.0.1:{}", master_port);
  const bool bare = master_host.find(':') != std::string::npos && !master_host.starts_with('[');
  const std::string host = bare ? fmt::format("[{}]", master_host) : master_host;
  return fmt::format("{}:{}:{}", is_loopback(master_host) ? "tcp" : "tls", host, master_port);
}

WorkerEnvironment read_environment(const Environment& environment) {
  const Variables variables(environment);
  WorkerEnvironment worker;
  if (is_open_world(variables)) {
    read_open_world(variables, worker);
  } else if (const auto convention = find_convention(variables)) {
    read_ranks(variables, *convention, worker);
    read_local_ranks(variables, *convention, worker);
  } else if (const auto size = variables.count("WORLD_SIZE"); size && *size != 1) {
    throw_invalid("WORLD_SIZE is {} but RANK is not set; set it to this worker's rank, 0 to {}", *size,
                  *size - 1);
  }
  read_master(variables, worker);
  read_job(variables, worker);
  read_secret_place(variables, worker);
  read_network(variables, worker);
  worker.name = variables.text_or("TORCHSPAN_NAME", fmt::format("worker{}", worker.rank));
  check_name(worker.name, "TORCHSPAN_NAME");
  if (const auto named = variables.text("TORCHSPAN_RUNTIME_DIR")) {
    worker.runtime_folder = *named;
  } else if (const auto session = variables.text("XDG_RUNTIME_DIR")) {
    worker.runtime_folder = *session + "/torchspan";
  }
  worker.error_file = variables.text_or("TORCHELASTIC_ERROR_FILE", "");
  worker.temporary_folder = variables.text_or("TMPDIR", worker.temporary_folder);
  if (const auto seconds = variables.integer("TORCHSPAN_JOIN_TIMEOUT", 1, 7 * 24 * 3600)) {
    worker.join_timeout = std::chrono::seconds(*seconds);
  }
  return worker;
}

namespace {

/// A socket's path has at most 107 characters; this leaves 47 for the file's name.
constexpr std::size_t kLongestFolder = 60;

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

std::string how_to_make(const std::string& path) {
  const std::string folder = path.substr(0, path.rfind('/'));
  const bool there = folder == path || folder.empty() || exists(folder);
  return fmt::format("make one with: (umask 077; {}openssl rand -hex 32 > '{}')",
                     there ? "" : fmt::format("mkdir -p '{}'; ", folder), path);
}

void make_folder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw_invalid("folder '{}' cannot be created: {}", path, std::strerror(errno));
  }
}

}  // namespace

net::Secret load_secret(const WorkerEnvironment& worker) {
  const std::string& path = worker.secret_file;
  if (path.empty()) {
    throw_invalid(
        "neither TORCHSPAN_SECRET_FILE nor HOME is set, so there is no cluster secret; set "
        "TORCHSPAN_SECRET_FILE to a file that all workers of the job can read");
  }
  if (exists(path)) return net::Secret::from_file(path);
  if (worker.secret_named) {
    throw_invalid("TORCHSPAN_SECRET_FILE is '{}', which does not exist; {}", path, how_to_make(path));
  }
  if (!worker.one_host() && worker.certificate_file.empty()) {
    throw_invalid(
        "there is no cluster secret in '{0}', and the workers of this job run on several hosts, so each "
        "would make its own; on one host {1} and copy it to the others (mode 0600), or set "
        "TORCHSPAN_SECRET_FILE to a file that all can read",
        path, how_to_make(path));
  }
  make_folder(path.substr(0, path.rfind('/')));
  try {
    net::Secret::random().write_file(path);
  } catch (const Error&) {
    if (!exists(path)) throw;  // else another worker of this job created it first
  }
  return net::Secret::from_file(path);
}

namespace {

/// A socket file is checked only at this age, when its owner has had time to bind it.
constexpr std::time_t kStaleAfterSeconds = 60;

/// Whether no process has the socket open. A datagram socket cannot connect to a listener, which does not
/// notice the attempt; the error shows whether there is a listener.
bool is_abandoned(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return false;
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool refused =
      connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 && errno == ECONNREFUSED;
  close(fd);
  return refused;
}

/// Removes the sockets of workers that were killed.
void remove_stale_sockets(const std::string& folder) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string path = entry.path().string();
    struct stat about {};
    if (!path.ends_with(".sock") || lstat(path.c_str(), &about) != 0 || !S_ISSOCK(about.st_mode)) continue;
    if (std::time(nullptr) - about.st_mtime > kStaleAfterSeconds && is_abandoned(path)) unlink(path.c_str());
  }
}

}  // namespace

std::string make_runtime_folder(const WorkerEnvironment& worker) {
  const std::string path = worker.runtime_folder.empty()
                               ? fmt::format("{}/torchspan-{}", worker.temporary_folder, geteuid())
                               : worker.runtime_folder;
  if (path.size() > kLongestFolder) {
    throw_invalid(
        "the folder for sockets '{}' has {} characters, more than {}; set TORCHSPAN_RUNTIME_DIR to a shorter "
        "path",
        path, path.size(), kLongestFolder);
  }
  make_folder(path);
  struct stat about {};
  if (lstat(path.c_str(), &about) != 0 || !S_ISDIR(about.st_mode)) {
    throw_invalid(
        "'{}' is not a folder, so sockets cannot be created there; remove it, or set TORCHSPAN_RUNTIME_DIR "
        "to another one",
        path);
  }
  if (about.st_uid != geteuid() || (about.st_mode & 077) != 0) {
    throw Error(
        ErrorKind::kDenied,
        fmt::format("folder '{}' belongs to user {} and has mode {:04o}; sockets need one of this user ({}) "
                    "with mode 0700: correct it, or set TORCHSPAN_RUNTIME_DIR to another one",
                    path, about.st_uid, about.st_mode & 07777, geteuid()));
  }
  remove_stale_sockets(path);
  return path;
}

}  // namespace torchspan::rendezvous
