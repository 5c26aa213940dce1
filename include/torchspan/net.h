#pragma once
// Options of the connections between workers: shared memory on one host, TLS or UCX between hosts. Includes no
// LibTorch.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <torchspan/core/time.h>

namespace torchspan {
class Metrics;
}

namespace torchspan::net {

/// Shared memory between the workers of one host.
struct LocalOptions {
  std::size_t ring_bytes = std::size_t{1} << 20;      ///< per direction; a power of two, at least 4096
  std::size_t lend_from = std::size_t{16} << 10;      ///< smaller segments go through the ring
  std::uint64_t pool_bytes = std::uint64_t{1} << 30;  ///< lent blocks of the whole transport, in use or not
  /// Blocks unused for this long are returned to the system; 0: never.
  Duration idle_after = std::chrono::seconds(30);
  Metrics* metrics = nullptr;  ///< gets net.local.*; must outlive the transport
};

/// The TCP ports at which a worker may listen, both included; 0: the system chooses.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
};

/// What protects the bytes between hosts after both sides have authenticated each other in a TLS 1.3 handshake.
enum class TcpNetwork : std::uint8_t {
  kEncrypted,  ///< encryption and authentication of every byte
  /// Nothing: you assert that only the job's hosts can read and change what this network carries. Workers
  /// that do not all ask for it get kDenied.
  kIsolated,
};

/// TCP with TLS 1.3 between hosts; equal on all workers of a job. A silent host is reported within
/// dead_after + heartbeat.
struct TlsOptions {
  TcpNetwork network = TcpNetwork::kEncrypted;
  /// Extra connections per channel that carry parts of messages of at least 1 MiB; 0 to 16. A channel works
  /// with fewer if some cannot be opened.
  std::uint32_t lanes = 2;
  Duration heartbeat = std::chrono::milliseconds(200);  ///< interval of heartbeats on an idle channel
  Duration dead_after = std::chrono::seconds(5);        ///< silence that ends a channel with kDisconnected
  /// Where to listen if an address has port 0, for firewalls; a worker takes the first free port for its
  /// calls and one for each lane of each group.
  PortRange ports = {};

  /// PEM files. If set, both sides must present a certificate signed by the authority, and
  /// WorkerOptions::secret is not used; otherwise both sides authenticate with the secret.
  std::string certificate_file = {};
  std::string key_file = {};
  std::string authority_file = {};
  /// With certificates: the dialing side also verifies that the certificate names the dialed host. False:
  /// any holder of a certificate from the authority can impersonate another.
  bool check_names = false;
};

/// Which network UCX may use. UCX neither authenticates nor encrypts: any host that reaches one of its TCP
/// ports can crash the worker or write its memory.
enum class UcxNetwork : std::uint8_t {
  kRdma,      ///< RDMA devices only; UCX opens no TCP port
  kIsolated,  ///< also TCP: you assert that only the job's workers reach this network
};

/// UCX (openucx.org) between hosts with fast fabrics; TLS authenticates the peers and detects their death. A
/// UCX of release 1.19 or later with CUDA also carries tensors from GPU to GPU; this has not run on a GPU.
/// Tested over UCX's TCP on one host only: run the conformance suite's "Ucx" row on your RDMA devices
/// before relying on it.
struct UcxOptions {
  UcxNetwork network = UcxNetwork::kRdma;  ///< equal on all workers of a job
  std::string devices = {};                ///< UCX names, "mlx5_0:1,mlx5_1:1"; empty: all
  /// Minimum size in bytes of segments sent by UCX rendezvous, directly into the receiver's memory; smaller
  /// ones are copied. 0: 64 KiB with RDMA and never with TCP, where UCX 1.13 aborts the process if a peer
  /// dies during a rendezvous.
  std::size_t rendezvous_from = 0;
  /// TLS connections that authenticate the peers and detect their death; `lanes` is ignored.
  TlsOptions tls = {};
  Metrics* metrics = nullptr;  ///< gets net.ucx.*; must outlive the transport
};

/// How workers reach each other: WorkerOptions::network.
struct NetworkOptions {
  LocalOptions local = {};
  TlsOptions tls = {};
  /// If set, messages between hosts use UCX, and TLS authenticates; equal on all workers. Uses
  /// NetworkOptions::tls; UcxOptions::tls is ignored.
  std::optional<UcxOptions> ucx = {};
};

}  // namespace torchspan::net
