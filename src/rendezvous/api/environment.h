#pragma once
#include <optional>
#include <string>
#include <string_view>

#include <torchspan/detail/net/secret.h>
#include <torchspan/net.h>
#include <torchspan/rendezvous.h>

namespace torchspan::rendezvous {

/// Whether `name` can name a worker or a tag: 1 to 127 of A-Z a-z 0-9 _ . : -
bool is_name(std::string_view name);

/// Throws kInvalid unless `name` is valid; `what` names its source ("TORCHSPAN_NAME").
void check_name(std::string_view name, std::string_view what);

/// Reads the ports "29600-29699", the smaller first, or one port; nullopt for other texts.
std::optional<net::PortRange> parse_port_range(std::string_view text);

/// Reads how workers of several hosts reach each other: TORCHSPAN_NETWORK (tls, tcp-isolated, ucx, ucx-isolated),
/// TORCHSPAN_PORT_RANGE, and the files of the certificates. Pure. Throws kInvalid that names the wrong variable.
net::NetworkOptions read_network(const Environment& environment);

/// Loads the job's secret from `worker.secret_file`. If all workers run on one host, the default file is
/// created once, with mode 0600. A missing named file, or a missing default file with several hosts, throws
/// kInvalid with the command that creates it, unless certificates authenticate the hosts. Safe against
/// concurrent processes.
net::Secret load_secret(const WorkerEnvironment& worker);

/// Returns a folder for sockets with mode 0700, owned by this user: `worker.runtime_folder` if set, else
/// torchspan-<uid> in `worker.temporary_folder`. Creates it if missing and removes sockets of killed
/// workers. Throws kDenied if it belongs to another user or is open to others, kInvalid if it cannot be
/// created or its path is too long for sockets.
std::string make_runtime_folder(const WorkerEnvironment& worker);

}  // namespace torchspan::rendezvous
